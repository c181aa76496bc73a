"""Played rewritings as rows of a log, and what such rows look like on the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from qrag_jax.environments.query_rewriting.output import REWRITTEN, read_output
from qrag_jax.environments.query_rewriting.task import RewriteTask, Rewritten
from qrag_jax.environments.tools.episode import Document, Failed
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.feedback.rewrite import GUARD_MEASURES, guard_measures
from qrag_jax.llm.outcomes import Failure
from qrag_jax.rollouts.token_episodes import Speech, TokenEpisode


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
    assert isinstance(ended, Rewritten)
    found = _found(ended.found)
    return dataclasses.replace(row, query=ended.answer, outcome=ended.outcome, found=found)


def searched_row(task: RewriteTask, query: str, found: Sequence[Document] | Failure) -> RewriteRow:
    """The row of a query that no model wrote."""
    row = RewriteRow(task.id, task.collection, task.question, query)
    if isinstance(found, Failure):
        return dataclasses.replace(row, outcome=found.cause)
    return dataclasses.replace(row, found=_found(found))


def _found(documents: Sequence[Document]) -> tuple[tuple[str, float], ...]:
    return tuple((each.id, float(each.score)) for each in documents)


def shape_of_rows(
    tasks: Sequence[RewriteTask], rows: Sequence[RewriteRow]
) -> dict[str, float | None]:
    """Means over the queries that did not fail: `readable`, the share with a query that was
    searched for, and `sampled_tokens`; and over those with a query `GUARD_MEASURES`. None: of
    nothing.
    """
    kept = [(task, row) for task, row in zip(tasks, rows, strict=True) if not row.failed]
    written = [(task, row) for task, row in kept if row.query]
    guards = [guard_measures(row.original, row.query, task.answers) for task, row in written]
    return {
        "readable": _mean([float(row.outcome == REWRITTEN) for _, row in kept]),
        "sampled_tokens": _mean([float(row.sampled) for _, row in kept]),
        **{name: _mean([each[name] for each in guards]) for name in GUARD_MEASURES},
    }


def _mean(values: Sequence[Any]) -> float | None:
    return float(np.mean(values)) if values else None
