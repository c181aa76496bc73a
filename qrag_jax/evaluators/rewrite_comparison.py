"""Compares ways to write queries: their means, paired differences, and who won.

A search that failed tells nothing of its query. So a query that failed in one of the ways is left
out of the means of all, which then are over the same queries; and a difference between two ways is
over the queries that failed in neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qrag_jax.environments.queries import RewriteTask
from qrag_jax.evaluators.rewrite_scores import measured
from qrag_jax.metrics.bootstrap import (
    columns_text,
    gains,
    interval_cells,
    interval_text,
    with_intervals,
)
from qrag_jax.metrics.rows import RewriteRow


@dataclasses.dataclass(frozen=True)
class WayScores:
    """Scores of one way.

    Attributes:
        columns: measure → float `[queries]`, 0 where the query failed.
        failed: bool `[queries]`.
    """

    columns: Mapping[str, np.ndarray]
    failed: np.ndarray


def way_scores(
    tasks: Sequence[RewriteTask], rows: Sequence[RewriteRow], measures: Sequence[str]
) -> WayScores:
    """Scores the rows of one way, one for each query."""
    columns = measured(tasks, [row.ranking for row in rows], measures)
    return WayScores(
        {name: np.array(values) for name, values in columns.items()},
        np.array([row.failed for row in rows]),
    )


def compared(
    ways: Mapping[str, WayScores], main: str, places: np.ndarray, by: str
) -> dict[str, Any]:
    """Compares all ways on some queries.

    Args:
        ways: what each is called → its scores.
        main: the one that the others are compared with.
        places: numbers of the queries, such as those of one collection.
        by: the measure that says who won.

    Returns:
        `queries`, their number; `scored`, how many of them failed in no way (a way in which all
        failed does not count); `failed`, how many in each way; `scores`, of each way each measure's
        mean with its 95 % bootstrap interval over the scored ones; `gains`, of each other way the
        paired differences, the main one's less its own, with `queries`; and `winner`: `ways`, those
        with the highest mean, `next`, the best of the others, and `lead`, the difference of the
        two; None if nothing is scored.
    """
    usable = {told: way for told, way in ways.items() if not way.failed[places].all()}
    common = [n for n in places if not any(way.failed[n] for way in usable.values())]
    scores = {told: with_intervals(_at(way, common)) for told, way in usable.items() if common}
    return {
        "queries": len(places),
        "scored": len(common),
        "failed": {told: int(way.failed[places].sum()) for told, way in ways.items()},
        "scores": scores,
        "gains": {
            told: found
            for told, way in ways.items()
            if told != main and (found := _gains(ways[main], way, places))
        },
        "winner": _winner(usable, common, by),
    }


def _gains(main: WayScores, other: WayScores, places: np.ndarray) -> dict[str, Any]:
    """{} if no query is left."""
    pairs = places[~(main.failed | other.failed)[places]]
    if not len(pairs):
        return {}
    return {"queries": len(pairs)} | gains(_at(main, pairs), _at(other, pairs))


def _at(way: WayScores, places: Any) -> dict[str, np.ndarray]:
    return {name: column[places] for name, column in way.columns.items()}


def _winner(ways: Mapping[str, WayScores], common: list[int], by: str) -> dict[str, Any] | None:
    if not ways or not common:
        return None
    means = {told: float(way.columns[by][common].mean()) for told, way in ways.items()}
    best = max(means.values())
    first = [told for told, mean in means.items() if mean == best]
    others = {told: mean for told, mean in means.items() if mean < best}
    found: dict[str, Any] = {"by": by, "ways": first, "mean": best, "next": None, "lead": None}
    if others:
        found["next"] = max(others, key=lambda told: others[told])
        one, other = (_at(ways[each], common) for each in (first[0], found["next"]))
        found["lead"] = gains({by: one[by]}, other)[by]
    return found


def lines(name: str, found: Mapping[str, Any], main: str, by: str) -> list[str]:
    """The table of one collection, who won, and how far the main way is from the others."""
    left_out = found["queries"] - found["scored"]
    told = f"; {left_out} more failed in one of the ways and are left out" if left_out else ""
    text = [f"{name}: {found['scored']} queries{told}"]
    scores = found["scores"]
    measures = [*next(iter(scores.values()), {})]
    rows = [["", *measures, "failed"]]
    for way, failed in found["failed"].items():
        cells = interval_cells(scores.get(way, {}), measures)
        rows.append([way, *cells, str(failed)])
    text += columns_text(rows)
    if winner := found["winner"]:
        lead = ""
        if winner["next"]:
            lead = f", {interval_text(winner['lead'], sign=True)} over {winner['next']}"
        won = " and ".join(winner["ways"])
        text.append(f"{name}: won by {won}, {by} {winner['mean']:.3f}{lead}")
    for way, gain in found["gains"].items():
        pairs = f" ({gain['queries']} queries)" if gain["queries"] < found["queries"] else ""
        text.append(f"{main} - {way}, {by}: {interval_text(gain[by], sign=True)}{pairs}")
    return text


def shape_lines(shapes: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """The table of what the queries of each model look like."""
    names = [*next(iter(shapes.values()), {})]
    rows = [["", *names]]
    for told, shape in shapes.items():
        cells = [shape[name] for name in names]
        rows.append([told, *("-" if cell is None else f"{cell:.3g}" for cell in cells)])
    return columns_text(rows)
