"""What the card of an exported model says that learned by LeReT."""

from __future__ import annotations

from qrag_jax.metrics.hop_log import SHOWN
from qrag_jax.systems.exported_system import ExportedSystem, Fields, Scores
from qrag_jax.systems.leret_config import NAME, LeretConfig


def _told(fields: Fields) -> str:
    writing, questions = fields["writing"], fields["questions"]
    words = writing["passage_words"]
    cut = f"the first {words} words" if words else "all"
    return (
        f"Its prompt is `config.writing.prompt={writing['prompt']}`, without examples or marks, "
        f"and shows {cut} of each passage found so far. It was trained on "
        f"`config.questions.train={questions['train']}`, by {writing['hops']} queries of "
        f"{writing['k']} passages each."
    )


def _scores(summary: Fields, checkpoint: str) -> Scores:
    """Of the pool after the last hop."""
    scores, last = summary["scores"], summary["config"]["writing"]["hops"]
    if checkpoint not in scores:
        return {}
    own = scores[checkpoint]
    row = f"after hop {last}, {own['questions']} questions"
    return {row: {name: own[f"hop{last}/{name}"]["mean"] for name in SHOWN}}


LERET = ExportedSystem(
    name=NAME,
    title="LeReT",
    learned="write search queries, one at each hop",
    read=LeretConfig.of,
    told=_told,
    scored="passages found",
    scores=_scores,
)
