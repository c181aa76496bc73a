"""Scores of language models: with tools, in an environment, as query writers, as rewriters."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qrag_jax.data.sample import Sample
from qrag_jax.environments.episode import Document, Failed
from qrag_jax.environments.queries import EMPTY, OUTCOMES, REWRITTEN, STOPPED, TOO_LONG, read_output
from qrag_jax.environments.queries import Searched as Found
from qrag_jax.evaluators.evaluation import Evaluation, lost_text, sampler
from qrag_jax.feedback.pairs import ALL_GOLD, AP, RECALL
from qrag_jax.feedback.rewrite import GUARD_MEASURES, guard_measures
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics import bootstrap
from qrag_jax.metrics.bootstrap import columns_of, means
from qrag_jax.metrics.ranking import ranking_columns
from qrag_jax.metrics.row_log import HOPS, PREDICTIONS, REWRITES, Prediction, RewriteRow, Searched
from qrag_jax.metrics.summaries import hop_columns
from qrag_jax.rollouts.token_episodes import Episode, Speech
from qrag_jax.rollouts.trajectories import REWARD, TRUNCATED, TokenTrajectory

# ---------------------------------------------------------------- with tools, in an environment

# What the line on the screen tells of an episode with tools; of others it tells everything.
_SHOWN = ("em", "f1", "recall", "citation", REWARD, "turns", "completed", "malformed")


def tool_evaluation(
    step: int,
    played: Sequence[TokenTrajectory],
    best_by: str,
    row_of: Callable[[int], Prediction],
    unused: Sequence[str] = (),
) -> Evaluation:
    """Scores an episode for each of the fixed questions of a training.

    Args:
        row_of: the place of a question → its row to look at.
        unused: counts that are always 0 in this training.
    """
    rows = []
    for t in played:
        if REWARD in t.parts:
            sampled = sum(len(turn.sampled) for segment in t.segments for turn in segment)
            tally = {**t.facts["tally"], "sampled_tokens": sampled}
            rows.append(episode_columns(t.parts, tally, t.status))
    columns = {name: column for name, column in columns_of(rows).items() if name not in unused}
    scores = {best_by: 0.0, REWARD: 0.0} | means(columns)
    scores["failed_share"] = 1 - len(rows) / len(played) if played else 0.0
    shown = (*_SHOWN, "failed_share") if "searches" in scores else [*scores]
    values = ", ".join(f"{name} {scores[name]:.3f}" for name in shown)
    return Evaluation.of(
        f"step {step}: {values} on {len(played)} questions",
        scores,
        best_by,
        columns,
        episodes=sampler(PREDICTIONS, range(len(played)), row_of),
    )


def episode_columns(
    parts: Mapping[str, float], tally: Mapping[str, Any], status: str
) -> dict[str, float]:
    """The parts of the reward of an episode, and its counts."""
    row = {**parts, "turns": float(tally["turns"]), "truncated": float(status == TRUNCATED)}
    if "searches" in tally:  # with our own tools
        row["searches"], row["completed"] = float(tally["searches"]), float(tally["completed"])
        row["malformed"] = float(tally["malformed"] + tally["unknown_tool"])
        row["calls"] = float(tally["calls"])
        row["failed_calls"] = float(tally["failed_calls"])
    return row | {"sampled_tokens": float(tally["sampled_tokens"])}


# ---------------------------------------------------------------- query writers


def query_evaluation(step: int, rows: Sequence[Searched], best_by: str) -> Evaluation:
    """Scores the played questions of a training."""
    scores, last = hop_scores(rows), len(rows[0].hops)
    of_hop = "hop {0}: recall {1:.3f}, AP {2:.3f}, all gold {3:.3f}"
    shown = [[scores[f"hop{n}/{x}"] for x in (RECALL, AP, ALL_GOLD)] for n in range(1, last + 1)]
    parts = [of_hop.format(n, *values) for n, values in enumerate(shown, 1)]
    lost = scores["empty_share"] + scores["too_long_share"] + scores["failed_share"]
    without = f"; {lost:.1%} without a query" if lost else ""
    return Evaluation.of(
        f"step {step}: {'; '.join(parts)}{without}; {len(rows)} questions",
        scores,
        f"hop{last}/{best_by}",
        hop_columns([row for row in rows if not row.failed]),
        episodes=sampler(HOPS, rows),
    )


def hop_scores(rows: Sequence[Searched]) -> dict[str, float]:
    """Means over the questions: `hopN/SCORE` after each hop, and what the queries took.

    A query that is empty or too long finds nothing: the pool stays as it was. A question with a hop
    that failed is left out of the scores.
    """
    columns = hop_columns([row for row in rows if not row.failed])
    scores = {name: float(np.mean(columns.get(name) or 0.0)) for name in hop_columns(rows)}
    hops = [hop for row in rows for hop in row.hops]
    outcomes = Counter(hop.outcome for hop in hops if hop.outcome)  # of what a model wrote
    count = max(outcomes.total(), 1)
    known = {"empty_share": EMPTY, "too_long_share": TOO_LONG, "stopped_share": STOPPED}
    failed = sum(number for outcome, number in outcomes.items() if outcome not in OUTCOMES)
    return {
        **scores,
        **{name: outcomes[outcome] / count for name, outcome in known.items()},
        "failed_share": failed / count,
        "sampled_tokens": sum(hop.sampled for hop in hops) / len(rows),
        "read_tokens": sum(hop.read for hop in hops) / len(rows),
    }


# ---------------------------------------------------------------- query rewriters

# Of one way of writing: measure → float `[queries]`, NaN where the search failed.
WayScores = Mapping[str, np.ndarray]


def rewrite_evaluation(
    step: int,
    tasks: Sequence[Sample],
    rows: Sequence[RewriteRow],
    *,
    originals: Sequence[RewriteRow],
    measures: Sequence[str],
    best_by: str,
) -> Evaluation:
    """Scores the played queries of a training next to the original ones."""
    original, columns = (
        {name: column[~np.isnan(column)] for name, column in measured(of, measures).items()}
        for of in (originals, rows)
    )
    scores, baselines = bootstrap.means(columns), bootstrap.means(original)
    values = ", ".join(
        f"{name} {scores[name]:.3f} ({baselines[name]:.3f} by the originals)" for name in measures
    )
    scores |= {name: value or 0.0 for name, value in shape_of_rows(tasks, rows).items()}
    scores.pop("readable")
    scores["failed_share"] = sum(row.failed for row in rows) / max(len(rows), 1)
    line = (
        f"step {step}: {values}, {scores['format']:.0%} readable, "
        f"{scores['query_words']:.1f} words{lost_text(scores, {'failed_share': 'failed'})} on "
        f"{len(tasks)} queries"
    )
    kept = sampler(REWRITES, rows)
    scored = Evaluation.of(line, scores, best_by, columns, episodes=kept)
    scored.baselines.update({f"original/{name}": value for name, value in baselines.items()})
    return scored


def measured(rows: Sequence[RewriteRow], measures: Sequence[str]) -> WayScores:
    """Each measure of each query; what is no query has found nothing."""
    # Names, since ids of collections may be alike.
    ranked = {f"{n}": row.ranking for n, row in enumerate(rows) if not row.failed}
    columns = {name: np.full(len(rows), np.nan) for name in measures}
    qrels = {name: rows[int(name)].grades for name in ranked}
    for measure, column in ranking_columns(ranked, qrels, measures).items() if ranked else ():
        columns[measure][[*map(int, column)]] = [*column.values()]
    return columns


def shape_of_rows(tasks: Sequence[Sample], rows: Sequence[RewriteRow]) -> dict[str, float | None]:
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
        **{name: _mean([g[name] for g in guards]) for name in GUARD_MEASURES},
    }


def _mean(values: Sequence[Any]) -> float | None:
    return float(np.mean(values)) if values else None


# ---------------------------------------------------------------------------- rows


def played_row(task: Sample, episode: Episode, speech: Speech, form: str = "") -> RewriteRow:
    """The row of an episode."""
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
        grades=dict(task.grades),
    )
    if isinstance(ended, Failed):
        cut_off = turn is None or turn.finish == "length"
        query = read_output(text, form, cut_off=cut_off)[0] if form else ""
        return dataclasses.replace(row, query=query, outcome=ended.cause)
    assert isinstance(ended, Found)
    hits = _scored(ended.found)
    return dataclasses.replace(row, query=ended.answer, outcome=ended.outcome, found=hits)


def searched_row(task: Sample, query: str, hits: Sequence[Document] | Failure) -> RewriteRow:
    """The row of a query that no model wrote."""
    asked = task.id, task.collection, task.question
    row = RewriteRow(*asked, query, grades=dict(task.grades))
    if isinstance(hits, Failure):
        return dataclasses.replace(row, outcome=hits.cause)
    return dataclasses.replace(row, found=_scored(hits))


def _scored(documents: Sequence[Document]) -> tuple[tuple[str, float], ...]:
    return tuple((d.id, float(d.score)) for d in documents)


# ---------------------------------------------------------------- ways together
# A search that failed tells nothing of its query, which is left out of the means of its way. A
# difference between two ways is over the queries that failed in neither.


def rewrite_summary(columns: WayScores) -> dict[str, Any]:
    """Each measure's interval over the queries, and how many of them `failed`."""
    count, left = len(next(iter(columns.values()))), _whole(columns)
    return {"queries": count, "failed": int(count - left.sum())} | bootstrap.with_intervals(
        {name: column[left] for name, column in columns.items()}
    )


def rewrite_gains(columns: WayScores, others: WayScores) -> dict[str, Any]:
    """Paired differences of all measures."""
    both = _whole(columns) & _whole(others)
    ours, theirs = ({name: c[both] for name, c in side.items()} for side in (columns, others))
    return bootstrap.gains(ours, theirs)


def _whole(columns: WayScores) -> np.ndarray:
    """bool `[queries]`, whether their search did not fail."""
    return ~np.isnan(next(iter(columns.values())))


def shape_lines(shapes: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """The table of what the queries of each model look like."""
    names = [*next(iter(shapes.values()), {})]
    rows = [["", *names]]
    for label, shape in shapes.items():
        cells = [shape[name] for name in names]
        rows.append([label, *("-" if cell is None else f"{cell:.3g}" for cell in cells)])
    return bootstrap.columns_text(rows)
