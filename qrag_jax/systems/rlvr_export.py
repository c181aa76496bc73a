"""What the card of an exported model says that learned by RLVR."""

from __future__ import annotations

from qrag_jax.systems.exported_system import ExportedSystem, Fields, Scores
from qrag_jax.systems.rlvr_config import NAME, RlvrConfig

_SHOWN = ("em", "f1", "recall", "citation", "reward")


def _told(fields: Fields) -> str:
    tools, questions = fields["tools"], fields["questions"]
    return (
        f"Its prompt is `config.tools.prompt={tools['prompt']}`, its calls are written as "
        f"`config.tools.form={tools['form']}`, and it was trained on "
        f"`config.questions.train={questions['train']}`."
    )


def _scores(summary: Fields, checkpoint: str) -> Scores:
    return {
        retriever: {name: weights[checkpoint]["all"][name]["mean"] for name in _SHOWN}
        for retriever, weights in summary["scores"].items()
        if checkpoint in weights
    }


RLVR = ExportedSystem(
    name=NAME,
    title="RLVR",
    learned="search with tools",
    read=RlvrConfig.of,
    told=_told,
    scored="retriever",
    scores=_scores,
)
