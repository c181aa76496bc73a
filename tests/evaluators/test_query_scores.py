"""Scores of hops, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from qrag_jax.environments.query_writing.state import EMPTY, SEARCHED, STOPPED, TOO_LONG
from qrag_jax.evaluators.query_scores import HopRow, QueryScores, hop_scores
from qrag_jax.feedback.tries import Try
from qrag_jax.runtime.interrupt import StopSignal
from tests.environments.query_writing.trying import LATER, STATE


def row(outcome: str, recall: float, ap: float, *, tokens: int = 2, read: int = 10) -> HopRow:
    scores = {"recall": recall, "ap": ap, "all_gold": float(recall == 1)}
    made = None
    if outcome:
        scored = outcome in (SEARCHED, STOPPED)
        made = Try(
            0, 1, 0, 0, 0, "q", (5,) * tokens, (-1.0,) * tokens, "stop", outcome,
            scores=scores if scored else {}, reward=ap if scored else None,
        )  # fmt: skip
    return HopRow(scores, "q", STATE, LATER, made, read if outcome else 0, outcome)


HOPS = [
    [row(SEARCHED, 0.5, 0.5), row(TOO_LONG, 0.0, 0.0, tokens=8), row(STOPPED, 0.5, 0.25)],
    [row(SEARCHED, 1.0, 1.0), row(EMPTY, 0.0, 0.0, tokens=1), row("", 0.5, 0.25)],
]


def test_means_are_over_all_questions() -> None:
    found = hop_scores(HOPS)
    assert found["hop1/recall"] == pytest.approx(1 / 3)
    assert found["hop2/ap"] == pytest.approx(1.25 / 3)
    assert found["hop2/all_gold"] == pytest.approx(1 / 3)


def test_shares_are_of_the_queries_that_were_asked_for() -> None:
    found = hop_scores([*HOPS[:1], [*HOPS[1][:2], row("timeout", 0.5, 0.25, tokens=0)]])
    assert found["empty_share"] == found["too_long_share"] == found["stopped_share"] == 1 / 6
    assert found["failed_share"] == pytest.approx(1 / 6)
    assert hop_scores(HOPS)["empty_share"] == 1 / 5  # one search had ended
    assert hop_scores(HOPS)["failed_share"] == pytest.approx(0)


def test_tokens_are_of_a_question() -> None:
    found = hop_scores(HOPS)
    assert found["read_tokens"] == 50 / 3
    assert found["sampled_tokens"] == (2 + 8 + 2 + 2 + 1) / 3


def test_what_no_model_writes_has_no_shares() -> None:
    found = hop_scores([[row("", 0.5, 0.25)]])
    assert (found["failed_share"], found["sampled_tokens"], found["hop1/ap"]) == (0, 0, 0.25)


def test_an_evaluation() -> None:
    asked: list[Any] = []

    def play(*given: Any) -> Any:
        asked.append(given)
        return HOPS

    stop = StopSignal()
    found = QueryScores(play, "recall").evaluate("weights", 7, stop)
    assert asked == [("weights", 7, stop)]
    assert found.score == found.scores["hop2/recall"] == pytest.approx(0.5)
    assert found.metrics["eval/hop1/recall"] == found.baselines["untrained/hop1/recall"]
    assert found.line == (
        "step 7: hop 1: recall 0.333, AP 0.250, all gold 0.000; hop 2: recall 0.500, AP 0.417, "
        "all gold 0.333; 40.0% without a query; 3 questions"
    )
