"""Sums and percentiles, with the client that counts and alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from qrag_jax.llm.outcomes import CAUSES, Answer, Counters, Failure, Latencies, Outcome, Usage


def test_percentiles_are_right_to_one_percent() -> None:
    values = [random.Random(seed).lognormvariate(0, 2) for seed in range(5000)]
    histogram = Latencies()
    for value in values:
        histogram.add(value)
    for percent in (1, 50, 99, 100):
        exact = sorted(values)[int(5000 * percent / 100) - 1]
        assert histogram.percentile(percent) == pytest.approx(exact, rel=0.0101)


def test_what_is_counted() -> None:
    counters = Counters()
    counters.called(Answer("a", usage=Usage(5, 2)), 0.5, 3)
    counters.called(Answer("b", usage=Usage(7, 1)), 0.5, 1)
    counters.called(Failure("timeout", "x", 2), 9.0, 2)
    counters.called(Failure("connection", "x", 0), 0.0, 0)
    metrics = counters.as_metrics()
    assert metrics["llm/latency_p50"] == pytest.approx(0.5, rel=0.01)
    counts = {"calls": 4, "answers": 2, "failures": 2, "failures_timeout": 1, "retries": 3}
    counts |= {"tokens_in": 12, "tokens_out": 3, "failures_server": 0, "failures_connection": 1}
    assert {name: metrics[f"llm/{name}"] for name in counts} == counts


def test_clients_together_are_one_that_did_all() -> None:
    parts, whole = (Counters(), Counters(), Counters()), Counters()
    draw = np.random.default_rng(0)
    for number, seconds in enumerate(draw.lognormal(0, 2, 60).tolist()):
        outcome: Outcome = Answer("a", usage=Usage(number, 3))
        if number % 7 == 0:
            outcome = Failure(CAUSES[number % len(CAUSES)], "x", 1)
        for counters in (parts[number % 2], whole):
            counters.called(outcome, seconds, 1 + number % 3)
            counters.cache_hits += number
            counters.waited_seconds += 0.5
    together = Counters.of_all(each.as_text() for each in parts)
    assert together.as_metrics() == whole.as_metrics()
    together.called(Answer("b"), 1.0, 1)  # goes on as any other
    assert together.calls == 61
