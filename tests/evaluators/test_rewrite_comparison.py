"""Ways to write queries beside each other: failures in pairs, and who won."""

from __future__ import annotations

import numpy as np
import pytest

from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.evaluators.rewrite_comparison import WayScores, compared, lines, way_scores
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.evaluators.rewrite_rows import shape_of_rows

ALL = np.arange(4)


def way(*values: float | None) -> WayScores:
    """None: the search failed."""
    return WayScores(
        {"rr": np.array([value or 0.0 for value in values])},
        np.array([value is None for value in values]),
    )


WAYS = {
    "model": way(1.0, 0.5, None, 0.25),
    "original": way(1.0, 1.0, 0.5, 0.5),
    "expansion": way(None, 0.5, 0.5, 1.0),
}


def test_means_are_over_the_queries_that_failed_in_no_way() -> None:
    found = compared(WAYS, "model", ALL, "rr")
    assert (found["queries"], found["scored"]) == (4, 2)
    assert found["failed"] == {"model": 1, "original": 0, "expansion": 1}
    means = {told: each["rr"]["mean"] for told, each in found["scores"].items()}
    assert means == {"model": 0.375, "original": 0.75, "expansion": 0.75}


def test_differences_are_over_pairs() -> None:
    gains = compared(WAYS, "model", ALL, "rr")["gains"]
    assert [*gains] == ["original", "expansion"]
    assert gains["original"]["queries"] == 3
    assert gains["original"]["rr"]["mean"] == pytest.approx((0 - 0.5 - 0.25) / 3)
    assert gains["expansion"]["queries"] == 2
    assert gains["expansion"]["rr"]["mean"] == pytest.approx((0 - 0.75) / 2)


def test_who_won() -> None:
    """Two are equal."""
    found = compared(WAYS, "model", ALL, "rr")
    winner = found["winner"]
    assert (winner["ways"], winner["next"]) == (["original", "expansion"], "model")
    assert winner["lead"]["mean"] == 0.375
    text = "\n".join(lines("set", found, "model", "rr"))
    assert "set: 2 queries; 2 more failed in one of the ways and are left out" in text
    assert (
        "set: won by original and expansion, rr 0.750, +0.375 [+0.250, +0.500] over model" in text
    )
    assert "model - original, rr: -0.250 [-0.500, +0.000] (3 queries)" in text
    alone = compared(WAYS, "model", np.array([3]), "rr")["winner"]
    assert (alone["ways"], alone["next"], alone["mean"]) == (["expansion"], "original", 1.0)


def test_a_way_in_which_all_failed_does_not_take_the_others_away() -> None:
    ways = {**WAYS, "dead": way(None, None, None, None)}
    found = compared(ways, "model", ALL, "rr")
    assert found["scored"] == 2
    assert "dead" not in found["scores"]
    assert "dead" not in found["gains"]
    assert found["failed"]["dead"] == 4
    assert any(line.split() == ["dead", "-", "4"] for line in lines("set", found, "model", "rr"))


def test_nothing_is_scored() -> None:
    ways = {"model": way(None, 1.0), "original": way(1.0, None)}
    found = compared(ways, "model", np.arange(2), "rr")
    assert (found["scored"], found["scores"], found["gains"], found["winner"]) == (0, {}, {}, None)
    assert lines("set", found, "model", "rr")[0].startswith("set: 0 queries; 2 more failed")


def row(name: str, found: str, outcome: str = "rewritten", **fields: int) -> RewriteRow:
    ids = tuple((each, 1.0) for each in found)
    query = "a b" if outcome == "rewritten" else ""
    return RewriteRow(name, "", "b c", query, outcome, "text", ids, **fields)


TASKS = [RewriteTask.judged("1", "b c", {"g": 1}), RewriteTask.judged("2", "b c", {"h": 1})]


def test_scores_are_measures_of_rankings() -> None:
    found = way_scores(TASKS, [row("1", "xg"), row("2", "", "server")], ["rr", "recall@1"])
    assert found.columns["rr"].tolist() == [0.5, 0.0]
    assert found.columns["recall@1"].tolist() == [0.0, 0.0]
    assert found.failed.tolist() == [False, True]


def test_what_rows_look_like() -> None:
    rows = [row("1", "x", sampled=4), row("2", "", "no_query", sampled=2)]
    found = shape_of_rows(TASKS, rows)
    assert (found["readable"], found["sampled_tokens"]) == (0.5, 3.0)
    assert (found["query_words"], found["kept_words"], found["new_words"]) == (2.0, 0.5, 0.5)
    failed = shape_of_rows(TASKS, [row("1", "", "server"), row("2", "", "no_query", sampled=2)])
    assert (failed["readable"], failed["sampled_tokens"], failed["echo"]) == (0.0, 2.0, None)
