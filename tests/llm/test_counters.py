"""Sums and percentiles, with the client that counts and alone."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from qrag_jax.llm.counters import Counters, Latencies
from qrag_jax.llm.outcomes import CAUSES, Answer, Failure, Outcome, Usage
from tests.llm.asking import MakeClient, chat
from tests.llm.model_server import ModelServer, Reply


@pytest.mark.parametrize("percent", [1, 50, 90, 99, 100])
def test_percentiles_are_right_to_one_percent(percent: float) -> None:
    values = [random.Random(seed).lognormvariate(0, 2) for seed in range(5000)]
    histogram = Latencies()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[int(5000 * percent / 100) - 1]
    assert histogram.percentile(percent) == pytest.approx(exact, rel=0.0101)


def test_what_is_counted() -> None:
    counters = Counters()
    counters.called(Answer("a", usage=Usage(5, 2)), 0.5, 3)
    counters.called(Answer("b", usage=Usage(7, 1)), 0.5, 1)
    counters.called(Failure("timeout", "x", 2), 9.0, 2)
    counters.called(Failure("connection", "x", 0), 0.0, 0)
    counters.cache_hits, counters.cache_skipped, counters.shared = 4, 3, 1
    counters.unread, counters.unmarked, counters.waited_seconds = 2, 1, 1.5
    before = copy.deepcopy(counters)
    counters.called(Answer("c"), 0.5, 1)
    metrics = before.as_metrics()
    assert set(map(type, metrics.values())) == {float}
    assert metrics.pop("llm/latency_p50") == pytest.approx(0.5, rel=0.01)
    assert metrics.pop("llm/latency_p90") == pytest.approx(0.5, rel=0.01)
    assert metrics.pop("llm/latency_p99") == pytest.approx(0.5, rel=0.01)
    failures = {f"llm/failures_{cause}": 0 for cause in CAUSES}
    assert metrics == failures | {
        "llm/calls": 4,
        "llm/answers": 2,
        "llm/failures": 2,
        "llm/failures_timeout": 1,
        "llm/failures_connection": 1,
        "llm/retries": 3,
        "llm/tokens_in": 12,
        "llm/tokens_out": 3,
        "llm/cache_hits": 4,
        "llm/cache_skipped": 3,
        "llm/shared": 1,
        "llm/unread": 2,
        "llm/unmarked": 1,
        "llm/waited_seconds": 1.5,
    }
    assert counters.calls == 5


def test_the_client_counts_tokens_and_latency(server: ModelServer, make_client: MakeClient) -> None:
    server.script = lambda call: Reply(delay=0.2)
    client = make_client(concurrency=2)
    client.ask_blocking([chat("three words here"), chat("one"), chat("two words"), chat("more")])
    counters = client.counters()
    assert (counters.tokens_in, counters.tokens_out) == (3 + 1 + 2 + 1, 8)
    # Of the call alone, not of the wait for its turn.
    assert 0.19 < counters.latency.percentile(50) < 2.0


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
