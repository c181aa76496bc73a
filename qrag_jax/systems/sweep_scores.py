"""The scores of each question of a scored run, of any system, from the log of its evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.evaluators import rewrite_log
from qrag_jax.evaluators.episode_sample import AGENTS, CHUNKS, HOPS, REWRITES, TOKENS
from qrag_jax.evaluators.shown import places
from qrag_jax.metrics import agent_log, hop_log, prediction_scores, predictions, retrieval_log, trec
from qrag_jax.metrics.facts import score_columns
from qrag_jax.metrics.ranking import ranking_columns
from qrag_jax.runtime.config_fields import refusing_types
from qrag_jax.runtime.saved_config import CONFIG_NAME, read_fields

Scores = dict[str, dict[str, float]]  # by the score's name, then by the question's id
OF_AGENTS = ("f1", "em", "recall")
OF_TOKENS = ("f1", "em", "recall", "reward")


@dataclasses.dataclass(frozen=True)
class RunScores:
    """What a run scored.

    Attributes:
        main: the score that sums it up.
        scores: all there are; a question whose episode failed has none.
    """

    main: str
    scores: Scores


def scores_of(workdir: Path) -> RunScores:
    """The scores of the newest evaluation of a run.

    Raises:
        InputError: it is not scored, or its log cannot be read.
    """
    place = places.find([workdir])[0]
    if place.log is None or place.log.kind not in _READERS:
        raise InputError(f"{workdir} has no log of an evaluation; score it with qrag evaluate.")
    found = _READERS[place.log.kind](place.log.path)
    if not found.scores.get(found.main):
        raise InputError(f"{place.log.path} has no question with {found.main}; look at its log.")
    return found


def _of_chunks(path: Path) -> RunScores:
    """Facts are those of all chunks taken; where no question has any, `answer_found`."""
    rows = retrieval_log.read_partial(path)
    found: Scores = {}
    for row in rows:
        for name, (value,) in score_columns([row]).items():
            found.setdefault(name, {})[row.id] = value
    return RunScores("fact_f1" if "fact_f1" in found else "answer_found", found)


def _of_agents(path: Path) -> RunScores:
    rows = [row for row in agent_log.read_partial(path) if not row.failed]
    return RunScores("f1", {name: _column(rows, name) for name in OF_AGENTS})


def _of_tokens(path: Path) -> RunScores:
    questions = prediction_scores.by_question(predictions.read_scores(path))
    by_id = prediction_scores.columns_of(questions)
    found = {name: {key: own[name] for key, own in by_id.items()} for name in OF_TOKENS}
    return RunScores("f1", found)


def _of_hops(path: Path) -> RunScores:
    """Scores after the last hop."""
    found: Scores = {}
    for row in (each for each in hop_log.read(path) if not each.failed):
        for name, value in row.hops[-1].scores.items():
            found.setdefault(name, {})[row.id] = value
    return RunScores("all_gold", found)


def _of_rewrites(path: Path) -> RunScores:
    """The measures of the run's config, by the judgements that its evaluation wrote."""
    from qrag_jax.systems.deepretrieval_scoring import QRELS, RUNS
    from qrag_jax.systems.rewrite_search import OWN

    of_run = path.parent.parent / CONFIG_NAME
    with refusing_types(of_run):
        config = read_fields(of_run)["eval"]
        measures, best_by = tuple(config["measures"]), str(config["best_by"])
    found: Scores = {}
    own: dict[str, dict[str, Sequence[str]]] = {}
    for row in rewrite_log.read(path):
        if not row.failed:
            own.setdefault(row.collection, {})[row.id] = row.ranking
    for collection, rankings in own.items():
        qrels = trec.read_qrels(path.parent / RUNS / (collection or OWN) / QRELS)
        qrels = {name: qrels[name] for name in rankings if name in qrels}
        for measure, column in ranking_columns(rankings, qrels, measures).items():
            named = {f"{collection}/{name}": value for name, value in column.items()}
            found.setdefault(measure, {}).update(named)
    return RunScores(best_by, found)


_READERS: dict[str, Callable[[Path], RunScores]] = {
    CHUNKS: _of_chunks,
    AGENTS: _of_agents,
    TOKENS: _of_tokens,
    HOPS: _of_hops,
    REWRITES: _of_rewrites,
}


def _column(rows: Sequence[Any], name: str) -> dict[str, float]:
    found = {row.id: getattr(row, name) for row in rows}
    return {key: value for key, value in found.items() if value is not None}
