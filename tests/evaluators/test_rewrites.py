"""Query rewriters: measures by hand, shapes of queries, ways beside each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qrag_jax.environments.episode import Document, Failed
from qrag_jax.environments.queries import REWRITTEN, TOO_LONG, UNREADABLE, RewriteTask, Searched
from qrag_jax.evaluators.token_scores import (
    WayScores,
    compared,
    lines,
    measured,
    played_row,
    rankings_of,
    rewrite_evaluation,
    shape_of_rows,
)
from qrag_jax.feedback.rewrite import RewriteReward, RewriteRewardConfig
from qrag_jax.metrics.bootstrap import means
from qrag_jax.metrics.rows import RewriteRow
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.rollouts.trajectories import Turn

# Two collections; the ids of queries and documents are the same in both.
SMALL = RewriteTask.judged(
    "1", "Where was Ada Berg born?", {"a": 1}, answers=("Oslo",), collection="x"
)


GRADED = RewriteTask.judged("1", "rain in Bergen", {"b": 2, "c": 1}, collection="y")


TASKS = [SMALL, GRADED]


MEASURES = ("ndcg@3", "recall@1", "rr@10")


def found(*ids: str) -> tuple[Document, ...]:
    return tuple(Document(each, "", "", False) for each in ids)


def episode(ended: Any, tokens: int = 3) -> TokenEpisode:
    ids, log_probs = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32)
    return TokenEpisode(ended, ((Turn(np.zeros(5, np.int32), ids, log_probs, "stop"),),), 1)


def rewritten(query: str, *ids: str, tokens: int = 3, **more: Any) -> TokenEpisode:
    return episode(
        Searched(answer=query, found=found(*ids), **{"outcome": REWRITTEN, **more}), tokens
    )


def test_measures_by_hand() -> None:
    columns = measured(TASKS, [("z", "a"), ("c", "a", "b")], MEASURES)
    gain = 1 / math.log2(2) + 2 / math.log2(4)
    best = 2 / math.log2(2) + 1 / math.log2(3)
    assert columns["ndcg@3"] == pytest.approx([1 / math.log2(3), gain / best])
    assert [*columns["recall@1"]] == [0.0, 0.5]
    assert [*columns["rr@10"]] == [0.5, 1.0]
    assert means(columns)["rr@10"] == 0.75
    # Queries of two collections with one id are scored apart, also in places of two digits.
    assert [*measured(TASKS[::-1], [("a",), ("a",)], ["rr@10"])["rr@10"]] == [0.0, 1.0]
    many = measured([SMALL, GRADED] * 6, [("a",), ("z",)] * 6, ["rr@10"])
    assert [*many["rr@10"]] == [1.0, 0.0] * 6


def rows_of(tasks: Sequence[RewriteTask], episodes: Sequence[TokenEpisode]) -> list[RewriteRow]:
    speech: Any = SimpleNamespace(text=lambda ids: f"{len(ids)} tokens")
    return [played_row(*each, speech) for each in zip(tasks, episodes, strict=True)]


FAILED = TokenEpisode(Failed("timeout", "no reply"), (), 2)


def test_what_is_no_query_found_nothing() -> None:
    tasks = [SMALL, GRADED, SMALL]
    rows = rows_of(tasks, [rewritten("ada", "b", "a"), rewritten("", outcome=TOO_LONG), FAILED])
    assert rankings_of(rows) == [("b", "a"), (), None]
    # What failed has no score.
    columns = measured(tasks, rankings_of(rows), ["rr@10"])
    np.testing.assert_array_equal(columns["rr@10"], [0.5, 0.0, np.nan])


def test_shapes_are_means_over_what_did_not_fail() -> None:
    episodes = [
        rewritten("Ada Berg Oslo Oslo", tokens=6),
        rewritten("rain Bergen", tokens=4),
        rewritten("", tokens=2, outcome=TOO_LONG),
        FAILED,
    ]
    tasks = [SMALL, GRADED, GRADED, SMALL]
    shapes: Any = shape_of_rows(tasks, rows_of(tasks, episodes))
    assert shapes["format"] == pytest.approx(2 / 3)
    assert shapes["sampled_tokens"] == 4
    # Of those with a query alone.
    assert shapes["query_words"] == 3
    assert shapes["answer_in_query"] == 0.5
    assert shapes["repetition"] == pytest.approx(1 / 4 / 2)
    assert shapes["kept_words"] == pytest.approx((2 / 5 + 2 / 3) / 2)
    assert shapes["new_words"] == pytest.approx((2 / 4 + 0) / 2)
    assert shapes["echo"] == 0


def test_a_query_that_the_search_cannot_read_has_a_format_as_in_the_reward() -> None:
    ended = Searched(answer="(ada berg", outcome=UNREADABLE)
    rows = rows_of([SMALL], [episode(ended)])
    shapes = shape_of_rows([SMALL], rows)
    reward = RewriteReward(RewriteRewardConfig()).of(SMALL, ended, 0.5)
    assert shapes["format"] == reward["format"] == 1
    assert shapes["readable"] == 0
    assert shapes["query_words"] == reward["words"] == 2
    assert rankings_of(rows) == [()]


def test_an_evaluation_is_beside_that_of_the_originals() -> None:
    rows = rows_of(TASKS, [rewritten("ada", "a"), FAILED])
    by: Any = {"measures": MEASURES, "best_by": "recall@1"}
    found = rewrite_evaluation(7, TASKS, rows, originals=[("z", "a"), ("b",)], **by)
    # The failed one is left out.
    assert (found.metrics["eval/rr@10"], [*found.each]) == (1.0, [1.0])
    assert found.metrics["eval/failed_share"] == 0.5
    assert found.baselines["original/rr@10"] == 0.75
    assert found.baselines["untrained/rr@10"] == 1.0
    assert found.score == found.scores["recall@1"] == 1.0


ALL = range(4)


def way(*values: float | None) -> WayScores:
    """None: the search failed."""
    return {"rr": np.array([np.nan if value is None else value for value in values])}


WAYS = {
    "model": way(1.0, 0.5, None, 0.25),
    "original": way(1.0, 1.0, 0.5, 0.5),
    "expansion": way(None, 0.5, 0.5, 1.0),
}


def test_means_and_differences() -> None:
    """Means are over the queries that failed in no way, differences over pairs."""
    found = compared(WAYS, "model", ALL, "rr")
    assert (found["queries"], found["scored"]) == (4, 2)
    assert found["failed"] == {"model": 1, "original": 0, "expansion": 1}
    means = {name: each["rr"]["mean"] for name, each in found["scores"].items()}
    assert means == {"model": 0.375, "original": 0.75, "expansion": 0.75}
    gains = {name: (each["queries"], each["rr"]["mean"]) for name, each in found["gains"].items()}
    assert gains["original"] == (3, pytest.approx((0 - 0.5 - 0.25) / 3))
    assert gains["expansion"] == (2, pytest.approx((0 - 0.75) / 2))


def test_a_way_in_which_all_failed_does_not_take_the_others_away() -> None:
    ways = {**WAYS, "dead": way(None, None, None, None)}
    found = compared(ways, "model", ALL, "rr")
    assert found["scored"] == 2
    assert "dead" not in found["scores"]
    assert "dead" not in found["gains"]
    assert found["failed"]["dead"] == 4
    assert any(line.split() == ["dead", "-", "4"] for line in lines("set", found, "model", "rr"))
    ways = {"model": way(None, 1.0), "original": way(1.0, None)}  # nothing is scored
    found = compared(ways, "model", [0, 1], "rr")
    assert (found["scored"], found["scores"], found["gains"]) == (0, {}, {})
