"""Scores of a query rewriter: measures worked out by hand, shares, and what failed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from qrag_jax.environments.query_rewriting.output import TOO_LONG, UNREADABLE
from qrag_jax.environments.query_rewriting.task import RewriteTask, Rewritten
from qrag_jax.environments.tools.episode import Document, Failed
from qrag_jax.errors import InputError
from qrag_jax.evaluators.rewrite_scores import (
    RewriteScores,
    means,
    measured,
    rankings_of,
    shape_of_queries,
)
from qrag_jax.feedback.rewrite_reward import RewriteReward, RewriteRewardConfig
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.rollouts.trajectories import Turn
from qrag_jax.runtime.interrupt import Stopped, StopSignal

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
    return episode(Rewritten(answer=query, found=found(*ids), **more), tokens)


def test_measures_by_hand() -> None:
    columns = measured(TASKS, [("z", "a"), ("c", "a", "b")], MEASURES)
    gain = 1 / math.log2(2) + 2 / math.log2(4)
    best = 2 / math.log2(2) + 1 / math.log2(3)
    assert columns["ndcg@3"] == pytest.approx([1 / math.log2(3), gain / best])
    assert columns["recall@1"] == [0.0, 0.5]
    assert columns["rr@10"] == [0.5, 1.0]
    assert means(columns)["rr@10"] == 0.75


def test_queries_of_two_collections_with_one_id_are_scored_apart() -> None:
    assert measured(TASKS, [("a",), ("a",)], ["rr@10"])["rr@10"] == [1.0, 0.0]
    assert measured(TASKS[::-1], [("a",), ("a",)], ["rr@10"])["rr@10"] == [0.0, 1.0]
    many = [SMALL, GRADED] * 6  # places of two digits are in order, too
    assert measured(many, [("a",), ("z",)] * 6, ["rr@10"])["rr@10"] == [1.0, 0.0] * 6


def test_an_unknown_measure_is_refused() -> None:
    with pytest.raises(InputError, match="'luck'"):
        measured(TASKS, [(), ()], ["luck"])


def test_what_is_no_query_found_nothing() -> None:
    failed = TokenEpisode(Failed("timeout", "no reply"), (), 2)
    assert rankings_of([rewritten("ada", "b", "a"), rewritten("", outcome=TOO_LONG), failed]) == [
        ("b", "a"),
        (),
        None,
    ]
    columns = measured([SMALL, GRADED, SMALL], [("b", "a"), (), None], ["rr@10"])
    assert columns == {"rr@10": [0.5, 0.0]}  # what failed has no score


def test_shapes_are_means_over_what_did_not_fail() -> None:
    episodes = [
        rewritten("Ada Berg Oslo Oslo", tokens=6),
        rewritten("rain Bergen", tokens=4),
        rewritten("", tokens=2, outcome=TOO_LONG),
        TokenEpisode(Failed("timeout", "no reply"), (), 2),
    ]
    shapes = shape_of_queries([SMALL, GRADED, GRADED, SMALL], episodes)
    assert shapes["failed_share"] == 0.25
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
    ended = Rewritten(answer="(ada berg", outcome=UNREADABLE)
    shapes = shape_of_queries([SMALL], [episode(ended)])
    reward = RewriteReward(RewriteRewardConfig()).of(SMALL, ended, 0.5)
    assert shapes["format"] == reward["format"] == 1
    assert shapes["query_words"] == reward["words"] == 2
    assert rankings_of([episode(ended)]) == [()]


def test_where_all_failed_shapes_are_0() -> None:
    shapes = shape_of_queries([SMALL], [TokenEpisode(Failed("timeout", "no reply"), (), 2)])
    assert shapes.pop("failed_share") == 1
    assert set(shapes.values()) == {0.0}


def scores_of(
    episodes: Sequence[TokenEpisode], originals: Sequence[Sequence[str]], calls: list[Any]
) -> RewriteScores:
    def play(params: Any, stop: StopSignal) -> Sequence[TokenEpisode]:
        calls.append(params)
        return episodes

    def search(stop: StopSignal) -> Sequence[Sequence[str]]:
        stop.check()
        return originals

    return RewriteScores(TASKS, play, search, MEASURES, "recall@1")


def test_an_evaluation_is_beside_that_of_the_originals() -> None:
    calls: list[Any] = []
    episodes = [rewritten("ada", "a"), TokenEpisode(Failed("timeout", "no reply"), (), 2)]
    scores = scores_of(episodes, [("z", "a"), ("b",)], calls)
    given = scores.evaluate("weights", 7, StopSignal())
    assert calls == ["weights"]
    assert given.metrics["eval/rr@10"] == 1.0  # the failed one is left out
    assert [*given.each] == [1.0]
    assert given.metrics["eval/failed_share"] == 0.5
    assert given.baselines["original/rr@10"] == 0.75
    assert given.baselines["original/recall@1"] == 0.25
    assert given.baselines["untrained/rr@10"] == 1.0
    assert given.score == given.scores["recall@1"] == 1.0
    assert {name.removeprefix("eval/") for name in given.metrics} == set(given.scores)


def test_an_evaluation_can_be_stopped() -> None:
    stop = StopSignal()
    stop.requested = True
    with pytest.raises(Stopped):
        scores_of([rewritten("ada", "a")] * 2, [(), ()], []).evaluate(None, 0, stop)
