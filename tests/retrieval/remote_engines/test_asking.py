"""A server misbehaves in every way: the right ids or a failure come out, and waits are kept."""

from __future__ import annotations

from typing import Any

import pytest

from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.remote_engines.engine import RemoteEngine, RemoteSearch
from qrag_jax.retrieval.remote_engines.rate_limit import Timing
from tests.retrieval.remote_engines.scripted import (
    BACKEND,
    KEY,
    Call,
    FakeClock,
    Say,
    by,
    pubmed_error,
    pubmed_says,
    quick,
    serving,
    trials_say,
)
from tests.retrieval.remote_engines.searching import RIGHT, failure, ids, one

PUBMED, TRIALS = "pubmed", "clinical_trials"
HTML = "<html><head><title>Sorry</title></head></html>"
HALF = '{"esearchresult": {"count": "3", "idlist": ["30", "1'
# How a service can misbehave, and the cause of the failure if it does so for ever.
WAYS: dict[str, tuple[Say, str]] = {
    "429": (Say({"error": "API rate limit exceeded"}, status=429), "rate_limit"),
    "429, wait": (Say("", status=429, headers={"Retry-After": "0.01"}), "rate_limit"),
    "rate limit in a 200": (Say({"error": "API rate limit exceeded"}), "rate_limit"),
    "500": (Say(HTML, status=500), "server"),
    "503, wait": (Say("", status=503, headers={"Retry-After": "0.01"}), "server"),
    "504": (Say("", status=504), "server"),
    "backend": (pubmed_error("Search Backend failed: Cannot connect to SOLR"), "server"),
    "HTML": (Say(HTML), "malformed"),
    "half a page": (Say(HALF), "malformed"),
    "cut off": (Say('{"esearchresult": {"count": "0", "idlist": []}}', missing=9), "malformed"),
    "a short page": (pubmed_says(["30"], count=3), "malformed"),
    "wrong fields": (Say({"result": {"ids": ["30"]}}), "malformed"),
    "empty": (Say(""), "malformed"),
    "slow": (Say(HTML, drip=0.05), "timeout"),
    "408": (Say("", status=408), "timeout"),
    "closed": (Say(drop=True), "connection"),
}


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCBI_API_KEY", raising=False)


# ------------------------------------------------------------------------------- misbehaviour


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_after_it_misbehaved_the_result_is_that_of_the_last_answer(way: str, times: int) -> None:
    def script(call: Call) -> Say:
        return WAYS[way][0] if call.nth < times else pubmed_says(RIGHT)

    with serving(by("a", script, lambda call: WAYS[way][0])) as server:
        timeout = 0.4 if way == "slow" else 5.0
        assert ids(one(RemoteEngine(quick(server.url, timeout=timeout)))) == RIGHT
        assert server.queries.count("a") == times + 1


@pytest.mark.parametrize("way", WAYS)
def test_if_it_misbehaves_for_ever_there_is_a_failure(way: str) -> None:
    said, cause = WAYS[way]
    with serving(lambda call: said) as server:
        timeout = 0.1 if way == "slow" else 5.0
        engine = RemoteEngine(quick(server.url, timeout=timeout, attempts=3))
        failed = failure(one(engine))
    assert type(failed) is Failure
    assert (failed.cause, failed.attempts) == (cause, 3)
    assert failed.message.startswith("PubMed: ")
    assert server.queries.count("a") == 3
    assert engine.unreadable == 0


def test_a_service_that_is_down_is_a_failure() -> None:
    with serving(lambda call: pubmed_says(RIGHT)) as server:
        engine = RemoteEngine(quick(server.url))
        assert ids(one(engine)) == RIGHT
    failed = failure(one(engine))
    assert (failed.cause, failed.attempts) == ("connection", 4)


@pytest.mark.parametrize(
    "said",
    [
        Say({"error": "API key invalid"}, status=400),
        Say("", status=403),
        Say("", status=404),
        Say("", status=302, headers={"Location": "https://elsewhere.invalid/?q=a"}),
        Say("", status=302, headers={"Location": "http://[broken"}),
        Say({"esearchresult": {"count": "0", "idlist": []}}, status=400),  # no way to say it
    ],
)
def test_a_refused_request_is_a_failure_at_once(said: Say) -> None:
    with serving(lambda call: said) as server:
        failed = failure(one(RemoteEngine(quick(server.url))))
    assert (failed.cause, failed.attempts, len(server.calls)) == ("request", 1, 1)
    assert f"HTTP {said.status}" in failed.message
    assert "?q" not in failed.message


# --------------------------------------------------------------------- what a service asks for


def timed(server_url: str, clock: FakeClock, **settings: Any) -> RemoteEngine:
    config = quick(server_url, **{"pause": 1.0, "requests_per_second": 4.0} | settings)
    return RemoteEngine(config, Timing(clock.now, clock.sleep))


@pytest.mark.parametrize("status", [429, 503])
def test_a_wait_that_is_asked_for_is_kept_by_all_searches(status: int) -> None:
    clock, sent = FakeClock(), list[tuple[str, float]]()

    def script(call: Call) -> Say:
        sent.append((call.query, clock.time))
        if len(sent) == 1:
            return Say("", status=status, headers={"Retry-After": "20"})
        return pubmed_says(RIGHT)

    with serving(script) as server:
        engine = timed(server.url, clock, at_once=1)
        found = engine.search([RemoteSearch(query, 3) for query in "abc"])
    assert list(map(ids, found)) == [RIGHT] * 3
    assert [query for query, _ in sent] == ["a", "a", "b", "c"]
    assert sent[1][1] - sent[0][1] == pytest.approx(20.0)


def test_a_429_that_names_no_wait_makes_a_pause() -> None:
    clock, sent = FakeClock(), list[float]()

    def script(call: Call) -> Say:
        sent.append(clock.time)
        return pubmed_says(RIGHT) if len(sent) > 2 else WAYS["429"][0]

    with serving(script) as server:
        assert ids(one(timed(server.url, clock))) == RIGHT
    assert 0.5 <= sent[1] - sent[0] <= 1.0
    assert 1.0 <= sent[2] - sent[1] <= 2.0


def test_a_wait_that_is_too_long_ends_all_searches_of_the_call() -> None:
    clock = FakeClock()
    said = Say({"error": "API rate limit exceeded"}, status=429, headers={"Retry-After": "3600"})
    with serving(lambda call: said) as server:
        engine = timed(server.url, clock, at_once=1)
        found = engine.search([RemoteSearch(query, 3) for query in "abc"])
        assert len(server.calls) == 1
        assert sum(clock.slept) < 1.0
        server.script = lambda call: pubmed_says(RIGHT)
        assert ids(one(engine)) == RIGHT  # the next call asks again
    for failed in map(failure, found):
        assert failed.cause == "rate_limit"
        assert "asks to wait 3600 s" in failed.message


def test_pauses_grow_and_differ() -> None:
    clock = FakeClock()
    with serving(lambda call: Say("", status=500)) as server:
        failure(one(timed(server.url, clock, attempts=8, patience=1e6)))
    pauses = [each for each in clock.slept if each >= 0.5]
    assert len(pauses) == 7
    for pause, longest in zip(pauses, (1, 2, 4, 8, 16, 30, 30), strict=True):
        assert longest / 2 <= pause <= longest


def test_patience_bounds_an_outage() -> None:
    clock = FakeClock()
    with serving(lambda call: Say("", status=500)) as server:
        engine = timed(server.url, clock, at_once=1, attempts=4, patience=10.0)
        found = engine.search([RemoteSearch(f"q{number}", 3) for number in range(50)])
        asked = len(server.calls)
        server.script = lambda call: pubmed_says(RIGHT)
        assert ids(one(engine)) == RIGHT
    assert asked < 4 * 50 / 5
    assert clock.time - 1000.0 < 10.0 + 4.0 + 1.0
    assert {failure(each).cause for each in found} == {"server", "connection"}
    assert "config.engine.patience" in failure(found[-1]).message


def test_answers_renew_the_patience() -> None:
    clock = FakeClock()

    def script(call: Call) -> Say:
        return pubmed_says(RIGHT) if call.nth else Say("", status=500)

    with serving(script) as server:
        engine = timed(server.url, clock, at_once=1, patience=10.0)
        found = engine.search([RemoteSearch(f"q{number}", 3) for number in range(40)])
    assert clock.time - 1000.0 > 20.0
    assert list(map(ids, found)) == [RIGHT] * 40


def test_the_rate_is_that_of_the_service_with_and_without_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(service: str, **settings: Any) -> float:
        clock = FakeClock()
        said = pubmed_says(RIGHT) if service == PUBMED else trials_say([])
        with serving(lambda call: said) as server:
            engine = timed(server.url, clock, service=service, **settings)
            engine.search([RemoteSearch(f"q{number}", 3) for number in range(5)])
        return clock.time - 1000.0

    # Threads that sleep side by side move this clock side by side, so one search at a time.
    own: dict[str, Any] = {"requests_per_second": 0.0, "at_once": 1}
    assert seconds(PUBMED, **own) == pytest.approx(4 / 3)
    assert seconds(TRIALS, **own) == pytest.approx(4 / 0.8)
    monkeypatch.setenv("NCBI_API_KEY", KEY)
    assert seconds(PUBMED, **own) == pytest.approx(4 / 10)
    assert seconds(PUBMED, **own | {"requests_per_second": 2.0}) == pytest.approx(4 / 2)


# ------------------------------------------------------------------- whose fault an error is


OPEN = "((a OR b"


def test_a_query_that_the_service_alone_refuses_finds_nothing() -> None:
    with serving(
        by(OPEN, lambda call: pubmed_error(BACKEND), lambda call: pubmed_says(["7"], count=9))
    ) as server:
        engine = RemoteEngine(quick(server.url))
        assert ids(one(engine, OPEN)) == ()
    # Between refusals, another query was answered each time.
    assert server.queries == [OPEN, "cancer", OPEN, "cancer", OPEN]
    assert engine.unreadable == 1


def test_the_same_error_in_an_outage_is_a_failure() -> None:
    with serving(lambda call: pubmed_error(BACKEND)) as server:
        engine = RemoteEngine(quick(server.url))
        failed = failure(one(engine, OPEN))
    assert (failed.cause, engine.unreadable) == ("server", 0)
    assert server.queries.count(OPEN) == 4


def test_an_outage_that_ends_after_two_refusals_has_the_right_result() -> None:
    def script(call: Call) -> Say:
        return pubmed_error(BACKEND) if call.nth < 2 else pubmed_says(RIGHT)

    with serving(by("a", script, lambda call: pubmed_says(["7"]))) as server:
        assert ids(one(RemoteEngine(quick(server.url)))) == RIGHT


def test_with_two_attempts_a_refusal_is_never_held_to_be_the_query_s() -> None:
    with serving(
        by(OPEN, lambda call: pubmed_error(BACKEND), lambda call: pubmed_says(["7"]))
    ) as server:
        engine = RemoteEngine(quick(server.url, attempts=2))
        assert failure(one(engine, OPEN)).cause == "server"


def test_trials_tell_of_a_bad_query() -> None:
    bad = Say("Error parsing query in Other terms: missing ')' at '<EOF>'", status=400)
    with serving(lambda call: bad) as server:
        engine = RemoteEngine(quick(server.url, service=TRIALS))
        assert ids(one(engine, "a AND (b")) == ()
    assert (len(server.calls), engine.unreadable) == (1, 1)
