"""Scores of query rewriters: what queries find and look like, and which way of writing won."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qrag_jax.environments.episode import Document, Failed
from qrag_jax.environments.queries import REWRITTEN, RewriteTask, Searched, read_output
from qrag_jax.evaluators.evaluation import Evaluation, lost_text, sampler
from qrag_jax.feedback.rewrite import GUARD_MEASURES, guard_measures
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics import bootstrap
from qrag_jax.metrics.ranking import ranking_columns
from qrag_jax.metrics.rows import REWRITES, RewriteRow
from qrag_jax.rollouts.token_episodes import Speech, TokenEpisode

# Of one way of writing: measure → float `[queries]`, NaN where the search failed.
WayScores = Mapping[str, np.ndarray]
Rankings = Sequence[Sequence[str] | None]  # of each query, best first; None: its search failed


def rewrite_evaluation(
    step: int,
    tasks: Sequence[RewriteTask],
    rows: Sequence[RewriteRow],
    *,
    originals: Rankings,
    measures: Sequence[str],
    best_by: str,
) -> Evaluation:
    """Scores the played queries of a training."""
    original, columns = (
        {name: column[~np.isnan(column)] for name, column in measured(tasks, of, measures).items()}
        for of in (originals, rankings_of(rows))
    )
    scores, baselines = bootstrap.means(columns), bootstrap.means(original)
    told = ", ".join(
        f"{name} {scores[name]:.3f} ({baselines[name]:.3f} by the originals)" for name in measures
    )
    scores |= {name: value or 0.0 for name, value in shape_of_rows(tasks, rows).items()}
    scores.pop("readable")
    scores["failed_share"] = sum(row.failed for row in rows) / max(len(rows), 1)
    line = (
        f"step {step}: {told}, {scores['format']:.0%} readable, "
        f"{scores['query_words']:.1f} words{lost_text(scores, {'failed_share': 'failed'})} on "
        f"{len(tasks)} queries"
    )
    kept = sampler(REWRITES, lambda at: [rows[place] for place in at], len(rows))
    found = Evaluation.of(line, scores, best_by, episodes=kept, each=[*columns[best_by]])
    found.baselines.update({f"original/{name}": value for name, value in baselines.items()})
    return found


def rankings_of(rows: Sequence[RewriteRow]) -> list[tuple[str, ...] | None]:
    """What each query found, best first; () if there is no query, None if its search failed."""
    return [None if row.failed else row.ranking for row in rows]


def measured(
    tasks: Sequence[RewriteTask], rankings: Rankings, measures: Sequence[str]
) -> WayScores:
    """Each measure of each query."""
    # Names, since ids of collections may be alike.
    ranked = {f"{n}": ranking for n, ranking in enumerate(rankings) if ranking is not None}
    columns = {name: np.full(len(rankings), np.nan) for name in measures}
    qrels = {name: dict(tasks[int(name)].grades) for name in ranked}
    for measure, column in ranking_columns(ranked, qrels, measures).items() if ranked else ():
        columns[measure][[*map(int, column)]] = [*column.values()]
    return columns


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
    )
    if isinstance(ended, Failed):
        cut_off = turn is None or turn.finish == "length"
        query = read_output(text, form, cut_off=cut_off)[0] if form else ""
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


# ---------------------------------------------------------------- ways beside each other

# A search that failed tells nothing of its query. So a query that failed in one of the ways is left
# out of the means of all, which then are over the same queries; and a difference between two ways
# is over the queries that failed in neither.


def compared(
    ways: Mapping[str, WayScores], main: str, places: Sequence[int], by: str
) -> dict[str, Any]:
    """Compares all ways on some queries.

    Args:
        main: the way that the others are compared with.
        places: numbers of the queries, such as those of one collection.
        by: the measure that says who won.

    Returns:
        numbers of `queries`, of those `scored`, which failed in no way (but for a way in which all
        failed), and of those `failed` by way; `scores`, each measure's mean over the scored ones;
        `gains`, paired differences of the main way to each other; and the `winner`.
    """
    lost = {told: np.isnan(way[by][places]) for told, way in ways.items()}
    usable = {told: way for told, way in ways.items() if not lost[told].all()}

    def at(told: str, kept: np.ndarray) -> dict[str, np.ndarray]:
        return {name: column[places][kept] for name, column in ways[told].items()}

    common = ~np.any([lost[told] for told in usable] or [np.ones(len(places))], axis=0)
    columns = {told: at(told, common) for told in usable} if common.any() else {}
    differences = {}
    for told in ways:
        both = ~(lost[main] | lost[told])
        if told != main and both.any():
            found = bootstrap.gains(at(main, both), at(told, both))
            differences[told] = {"queries": int(both.sum()), **found}
    return {
        "queries": len(places),
        "scored": int(common.sum()),
        "failed": {told: int(each.sum()) for told, each in lost.items()},
        "scores": {told: bootstrap.with_intervals(own) for told, own in columns.items()},
        "gains": differences,
        "winner": _winner({told: own[by] for told, own in columns.items()}, by),
    }


def _winner(columns: Mapping[str, np.ndarray], by: str) -> dict[str, Any] | None:
    if not columns:
        return None
    by_way = {told: float(column.mean()) for told, column in columns.items()}
    best = max(by_way.values())
    first = [told for told, mean in by_way.items() if mean == best]
    second = max(
        (told for told in by_way if told not in first), key=by_way.__getitem__, default=None
    )
    lead = bootstrap.gains({by: columns[first[0]]}, {by: columns[second]})[by] if second else None
    return {"by": by, "ways": first, "mean": best, "next": second, "lead": lead}


def lines(name: str, found: Mapping[str, Any], main: str, by: str) -> list[str]:
    """The table of one collection, who won, and how far the main way is from the others."""
    left_out = found["queries"] - found["scored"]
    told = f"; {left_out} more failed in one of the ways and are left out" if left_out else ""
    text = [f"{name}: {found['scored']} queries{told}"]
    scores = found["scores"]
    measures = [*next(iter(scores.values()), {})]
    rows = ((way, scores.get(way, {}) | {"failed": n}) for way, n in found["failed"].items())
    text += bootstrap.score_table(rows, measures, {"failed": "{failed}"})
    if winner := found["winner"]:
        lead = ""
        if winner["next"]:
            lead = f", {bootstrap.interval_text(winner['lead'], sign=True)} over {winner['next']}"
        won = " and ".join(winner["ways"])
        text.append(f"{name}: won by {won}, {by} {winner['mean']:.3f}{lead}")
    for way, gain in found["gains"].items():
        pairs = f" ({gain['queries']} queries)" if gain["queries"] < found["queries"] else ""
        text.append(f"{main} - {way}, {by}: {bootstrap.interval_text(gain[by], sign=True)}{pairs}")
    return text


def shape_lines(shapes: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """The table of what the queries of each model look like."""
    names = [*next(iter(shapes.values()), {})]
    rows = [["", *names]]
    for told, shape in shapes.items():
        cells = [shape[name] for name in names]
        rows.append([told, *("-" if cell is None else f"{cell:.3g}" for cell in cells)])
    return bootstrap.columns_text(rows)
