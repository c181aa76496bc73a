"""Scores of a query rewriter: what its queries find, and what they look like."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qrag_jax.environments.episode import Document, Failed
from qrag_jax.environments.queries import REWRITTEN, RewriteTask, Searched, read_output
from qrag_jax.evaluators.evaluation import Evaluation, lost_text, sampler
from qrag_jax.feedback.rewrite import GUARD_MEASURES, guard_measures
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics.ranking import ranking_columns
from qrag_jax.metrics.rows import REWRITES, RewriteRow
from qrag_jax.rollouts.token_episodes import Speech, TokenEpisode
from qrag_jax.runtime.interrupt import StopSignal

Rankings = Sequence[Sequence[str] | None]  # of each query, best first; None: its search failed


@dataclasses.dataclass(frozen=True)
class RewriteScores:
    """Scores fixed queries during training.

    Attributes:
        tasks: the queries.
        play: (parameters, signal) → a row for each query, in order.
        originals: signal → what each original query finds; asked in each evaluation.
        measures: of rankings, see `metrics.ranking`.
        best_by: the measure that chooses the best checkpoint.
    """

    tasks: Sequence[RewriteTask]
    play: Callable[[Any, StopSignal], Sequence[RewriteRow]]
    originals: Callable[[StopSignal], Rankings]
    measures: Sequence[str]
    best_by: str

    def evaluate(self, params: Any, step: int, stop: StopSignal) -> Evaluation:
        """Plays and scores the queries.

        Raises:
            Stopped: the run is told to stop.
        """
        rows = self.play(params, stop)
        original = means(measured(self.tasks, self.originals(stop), self.measures))
        columns = measured(self.tasks, rankings_of(rows), self.measures)
        scores = means(columns)
        told = ", ".join(
            f"{name} {scores[name]:.3f} ({original[name]:.3f} by the originals)"
            for name in self.measures
        )
        scores |= {name: value or 0.0 for name, value in shape_of_rows(self.tasks, rows).items()}
        scores.pop("readable")
        scores["failed_share"] = sum(row.failed for row in rows) / max(len(rows), 1)
        line = (
            f"step {step}: {told}, {scores['format']:.0%} readable, "
            f"{scores['query_words']:.1f} words{lost_text(scores, {'failed_share': 'failed'})} on "
            f"{len(self.tasks)} queries"
        )
        found = Evaluation.of(
            line,
            scores,
            self.best_by,
            episodes=sampler(REWRITES, lambda at: [rows[place] for place in at], len(rows)),
            each=columns[self.best_by],
        )
        found.baselines.update({f"original/{name}": value for name, value in original.items()})
        return found


def rankings_of(rows: Sequence[RewriteRow]) -> list[tuple[str, ...] | None]:
    """What each query found, best first; () if there is no query, None if its search failed."""
    return [None if row.failed else row.ranking for row in rows]


def measured(
    tasks: Sequence[RewriteTask], rankings: Rankings, measures: Sequence[str]
) -> dict[str, list[float]]:
    """Each measure of each query whose search has not failed, in order."""
    # Names, since ids of collections may be alike.
    ranked = {f"{n}": ranking for n, ranking in enumerate(rankings) if ranking is not None}
    if not ranked:
        return {measure: [] for measure in measures}
    qrels = {name: dict(tasks[int(name)].grades) for name in ranked}
    columns = ranking_columns(ranked, qrels, measures)
    return {measure: [column[name] for name in ranked] for measure, column in columns.items()}


def means(columns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The mean of each column, 0 of nothing."""
    return {name: float(np.mean(column)) if column else 0.0 for name, column in columns.items()}


def shape_of_rows(
    tasks: Sequence[RewriteTask], rows: Sequence[RewriteRow]
) -> dict[str, float | None]:
    """Means over the queries that did not fail; None: of nothing.

    `format` is the share with a query, even one that the search cannot read, as in the reward, and
    `readable` that with a query that was searched for. There are also `sampled_tokens`, and over
    those with a query `GUARD_MEASURES`.
    """
    kept = [(task, row) for task, row in zip(tasks, rows, strict=True) if not row.failed]
    written = [(task, row) for task, row in kept if row.query]
    guards = [guard_measures(row.original, row.query, task.answers) for task, row in written]
    return {
        "format": _mean([float(bool(row.query)) for _, row in kept]),
        "readable": _mean([float(row.outcome == REWRITTEN) for _, row in kept]),
        "sampled_tokens": _mean([float(row.sampled) for _, row in kept]),
        **{name: _mean([each[name] for each in guards]) for name in GUARD_MEASURES},
    }


def _mean(values: Sequence[Any]) -> float | None:
    return float(np.mean(values)) if values else None


# ---------------------------------------------------------------------------- rows


def played_row(
    task: RewriteTask, episode: TokenEpisode, speech: Speech, form: str = ""
) -> RewriteRow:
    """The row of an episode.

    Args:
        task: its query.
        form: of the output, by which the query is read of an episode whose search failed; "": it
            is none of `output.FORMS`, and the query is lost.
    """
    ended = episode.ended
    turn = next((turn for segment in episode.segments for turn in segment), None)
    text = "" if turn is None else speech.text(turn.sampled)
    row = RewriteRow(
        id=task.id,
        collection=task.collection,
        original=task.question,
        query="",
        text=text,
        sampled=0 if turn is None else len(turn.sampled),
    )
    if isinstance(ended, Failed):
        cut_off = turn is None or turn.finish == "length"
        query = read_output(text, form, cut_off=cut_off).query if form else ""
        return dataclasses.replace(row, query=query, outcome=ended.cause)
    assert isinstance(ended, Searched)
    found = _scored(ended.found)
    return dataclasses.replace(row, query=ended.answer, outcome=ended.outcome, found=found)


def searched_row(task: RewriteTask, query: str, found: Sequence[Document] | Failure) -> RewriteRow:
    """The row of a query that no model wrote."""
    row = RewriteRow(task.id, task.collection, task.question, query)
    if isinstance(found, Failure):
        return dataclasses.replace(row, outcome=found.cause)
    return dataclasses.replace(row, found=_scored(found))


def _scored(documents: Sequence[Document]) -> tuple[tuple[str, float], ...]:
    return tuple((each.id, float(each.score)) for each in documents)
