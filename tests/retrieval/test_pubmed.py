"""Searches of PubMed and ClinicalTrials.gov against a real server on this machine.

The right ids or a failure, never less.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval import pubmed
from qrag_jax.retrieval.pubmed import (
    Page,
    Part,
    Refused,
    RemoteEngine,
    RemoteEngineConfig,
    RemoteSearch,
    read_pubmed,
    read_trials,
)
from tests.retrieval.web_service import (
    BACKEND,
    KEY,
    Call,
    Say,
    pubmed_error,
    pubmed_says,
    quick,
    serving,
    study,
    trials_say,
)

PUBMED, TRIALS = "pubmed", "clinical_trials"
HTML = "<html><head><title>Sorry</title></head></html>"
RIGHT = ("30", "1", "200")
ONE, TWO = "NCT00000001", "NCT00000002"
PART = Part("a AND b", "1970-01-01", "2015-03-31", 3)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCBI_API_KEY", raising=False)


def one(engine: RemoteEngine, query: str = "a", most: int = 3, until: str = "") -> Any:
    (found,) = engine.search([RemoteSearch(query, most, until)])
    return found


# ---------------------------------------------------------------------- what is asked


def test_the_fields_of_pubmed() -> None:
    with serving(lambda call: pubmed_says(RIGHT)) as server:
        settings = {"tool": "ours", "email": "a@b.c", "first_year": 1985}
        assert one(RemoteEngine(quick(server.url, **settings)), "a AND b", 3, "2015-03-31") == RIGHT
        assert one(RemoteEngine(quick(server.url, sort="default"))) == RIGHT
    first, second = server.calls
    assert (first.method, first.target) == ("POST", "/esearch.fcgi")
    assert first.fields == {
        "db": "pubmed",
        "term": "a AND b",
        "retmode": "json",
        "retmax": "3",
        "datetype": "pdat",
        "mindate": "1985/01/01",
        "maxdate": "2015/03/31",
        "sort": "relevance",
        "tool": "ours",
        "email": "a@b.c",
    }
    assert (second.fields["mindate"], second.fields["maxdate"]) == ("1970/01/01", "3000")
    assert "sort" not in second.fields
    assert "email" not in second.fields


def test_the_fields_of_clinical_trials() -> None:
    with serving(lambda call: trials_say([study(TWO), study(ONE)])) as server:
        engine = RemoteEngine(quick(server.url, service=TRIALS))
        assert one(engine, "a OR b", 9, "2015-03-31") == (TWO, ONE)
    (call,) = server.calls
    assert (call.method, call.path) == ("GET", "/studies")
    assert call.fields == {
        "query.term": "a OR b",
        "filter.advanced": "AREA[StartDate]RANGE[1970-01-01,2015-03-31]",
        "fields": "NCTId,StartDate",
        "format": "json",
        "pageSize": "9",
        "sort": "@relevance",
    }


@pytest.mark.parametrize("service", [PUBMED, TRIALS])
def test_a_query_arrives_as_it_is_and_changes_no_other_field(service: str) -> None:
    queries = ["a&retmax=0#", "b&pageSize=1&term=c", '50% + "é"\r\n[tiab]', "half \ud83d of it"]
    nothing = ["", "  \n", '() "" -']  # is not sent
    said = pubmed_says([]) if service == PUBMED else trials_say([])
    with serving(lambda call: said) as server:
        engine = RemoteEngine(quick(server.url, service=service, at_once=1))
        found = engine.search([RemoteSearch(query, 5) for query in [*queries, *nothing]])
        assert engine.search([]) == []
        assert one(engine, until="1969-12-31") == ()  # before the first year
    assert found == [()] * 7
    assert server.queries == [*queries[:3], "half \ufffd of it"]
    size = "retmax" if service == PUBMED else "pageSize"
    assert {call.fields[size] for call in server.calls} == {"5"}


def test_equal_queries_are_asked_once_with_the_largest_number() -> None:
    def script(call: Call) -> Say:
        return pubmed_says([f"{n + 1}" for n in range(int(call.fields["retmax"]))], count=1000)

    asked = [("a", 2, ""), ("b", 1, ""), ("a", 5, ""), ("a", 3, "2010-01-01"), ("a", 9999, "")]
    with serving(script) as server:
        found = RemoteEngine(quick(server.url, most=40)).search([RemoteSearch(*s) for s in asked])
    assert [len(each) for each in found] == [2, 1, 5, 3, 40]  # type: ignore[arg-type]
    assert len(server.calls) == 3


def test_searches_run_side_by_side_and_one_of_them_fails() -> None:
    together = threading.Barrier(3)

    def script(call: Call) -> Say:
        if call.nth == 0:
            together.wait(5.0)  # breaks if they come one after the other
        return Say(HTML) if call.query == "b" else pubmed_says(["9", call.query * 0 + "9", "1"])

    with serving(script) as server:
        engine = RemoteEngine(quick(server.url, at_once=3))
        first, second, third = engine.search([RemoteSearch(query, 3) for query in "abc"])
    assert first == third == ("9", "1")
    assert isinstance(second, Failure)
    assert second.cause == "malformed"


# ---------------------------------------------------------------------- pages


class Registry:
    """Studies in one order, given page by page as ClinicalTrials.gov does."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.studies = [study(f"NCT{number:08d}") for number in numbers]

    def __call__(self, call: Call) -> Say:
        begin = int(call.fields.get("pageToken", "t0")[1:])
        end = begin + int(call.fields["pageSize"])
        return trials_say(self.studies[begin:end], f"t{end}" if end < len(self.studies) else "")


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    small = pubmed.SERVICES[TRIALS]._replace(page=10)
    monkeypatch.setitem(pubmed.SERVICES, TRIALS, small)


@pytest.mark.usefixtures("small_pages")
def test_pages_make_up_the_ranking() -> None:
    numbers = [*range(50, 15, -1)]
    registry = Registry(numbers)
    with serving(registry) as server:
        engine = RemoteEngine(quick(server.url, service=TRIALS))
        for most in (1, 10, 11, 35, 100):
            server.calls.clear()
            wanted = tuple(f"NCT{number:08d}" for number in numbers[:most])
            assert one(engine, most=most) == wanted
            assert len(server.calls) == -(-min(most, 35) // 10)
        # A page that fails is asked for again; one that always does makes no shorter list.
        server.script = lambda call: Say(HTML) if call.nth == 0 else registry(call)
        assert one(engine, "b", 35) == tuple(f"NCT{number:08d}" for number in numbers)
        server.script = lambda call: (
            Say(HTML) if call.fields.get("pageToken") == "t20" else registry(call)
        )
        assert one(engine, "c", 35).cause == "malformed"


def test_empty_pages_and_pages_without_end() -> None:
    def script(call: Call) -> Say:
        last = "pageToken" in call.fields
        return trials_say([study(ONE)]) if last else trials_say([], "t")

    with serving(script) as server:
        engine = RemoteEngine(quick(server.url, service=TRIALS))
        assert one(engine, most=10) == (ONE,)
        server.script = lambda call: trials_say([study(ONE)], f"t{call.nth}")
        assert one(engine, "b", 10).cause == "malformed"


# ---------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"count": "2", "idlist": ["9", "10"]}, ("9", "10")),
        ({"count": "700", "idlist": ["9", "10", "8"]}, ("9", "10", "8")),  # three were wanted
        ({"count": "0", "idlist": [], "errorlist": {"fieldsnotfound": ["[x]"]}}, ()),
        ({"count": "1", "idlist": ["9"], "errorlist": {"phrasesnotfound": ["b"]}}, ("9",)),
        ({"ERROR": "Empty term and query_key - nothing todo"}, ()),
    ],
)
def test_pages_of_pubmed(fields: dict[str, Any], ids: tuple[str, ...]) -> None:
    assert read_pubmed(200, json.dumps({"esearchresult": fields}), PART) == Page(ids)


@pytest.mark.parametrize(
    ("status", "body", "cause"),
    [
        (200, {"error": "API rate limit exceeded", "api-key": "1.2.3.4"}, "rate_limit"),
        (200, {"error": "something else"}, "server"),
        (400, {"error": "something else"}, "request"),
        (400, {"esearchresult": {"count": "0", "idlist": []}}, "request"),
        (200, '{"esearchresult": {"count": "2", "idlist": ["9", "1', "malformed"),
        (200, "[" * 100_000, "malformed"),
        (200, ["9"], "malformed"),
        (200, {"esearchresult": None}, "malformed"),
        (200, {"esearchresult": {"count": "2"}}, "malformed"),
        (200, {"esearchresult": {"count": "-1", "idlist": []}}, "malformed"),
        (200, {"esearchresult": {"count": "2", "idlist": [9, 10]}}, "malformed"),
        (200, {"esearchresult": {"count": "1", "idlist": ["²"]}}, "malformed"),
        (200, {"esearchresult": {"count": "2", "idlist": ["9"]}}, "malformed"),  # half a page
    ],
)
def test_failures_of_pubmed(status: int, body: Any, cause: str) -> None:
    found = read_pubmed(status, body if isinstance(body, str) else json.dumps(body), PART)
    assert isinstance(found, Failure)
    assert not isinstance(found, Refused)
    assert found.cause == cause
    assert "1.2.3.4" not in found.message


@pytest.mark.parametrize(
    ("began", "until", "within"),
    [
        ("2015-03-31", "2015-03-31", True),
        ("2015-04-01", "2015-03-31", False),
        ("2015-03", "2015-03-01", True),  # a month is its first day
        ("2015-03", "2015-02-28", False),
        ("1969-12-31", "", False),
        ("2999-01-01", "", True),
        ("", "", False),
    ],
)
def test_studies_outside_of_the_limits_are_dropped(began: str, until: str, within: bool) -> None:
    """The service ignores its filter where the query is a list of NCT numbers."""
    part = PART._replace(query=f"{ONE}, {TWO}", until=until)
    body = json.dumps({"studies": [study(ONE, began), study(TWO, "1970-01-01")]})
    assert read_trials(200, body, part) == Page((ONE, TWO) if within else (TWO,))


@pytest.mark.parametrize(
    ("status", "body", "cause"),
    [
        (400, "Error parsing query in filter.advanced: mismatched input", "request"),
        (400, '{"studies": []}', "request"),
        (200, '{"studies": [{"protocolSection": {"ident', "malformed"),
        (200, {"studies": {"a": 1}}, "malformed"),
        (200, {"studies": [study(ONE)], "nextPageToken": 3}, "malformed"),
        (200, {"studies": [{}]}, "malformed"),
        (200, {"studies": [study("12345678")]}, "malformed"),
        (200, {"studies": [study(ONE, 1999)]}, "malformed"),  # type: ignore[arg-type]
        (200, {"studies": [study(ONE, ""), study(TWO, "")]}, "malformed"),  # all would be dropped
    ],
)
def test_failures_of_clinical_trials(status: int, body: Any, cause: str) -> None:
    found = read_trials(status, body if isinstance(body, str) else json.dumps(body), PART)
    assert isinstance(found, Failure)
    assert found.cause == cause


def test_a_bad_query_finds_nothing_and_an_outage_is_a_failure() -> None:
    text = "Error parsing query in Other terms: no viable alternative at input 'b'\nmissing ')'"
    assert read_trials(400, text, PART) == Page(())

    def bad_query(call: Call) -> Say:
        return pubmed_says(["1"]) if call.query == "cancer" else pubmed_error(BACKEND)

    with serving(bad_query) as server:
        assert one(RemoteEngine(quick(server.url)), "((a") == ()
        server.script = lambda call: pubmed_error("Search Backend failed:\nmore")
        assert one(RemoteEngine(quick(server.url)), "((b").cause == "server"


# ---------------------------------------------------------------------- a service that misbehaves


@pytest.mark.parametrize(
    ("says", "cause"),
    [
        (Say(drop=True), "connection"),
        (Say(HTML, status=503), "server"),
        (Say({"esearchresult": {"count": "5", "idlist": ["1"]}}), "malformed"),
        (Say("", status=429, headers={"Retry-After": "0.01"}), "rate_limit"),
        (Say("", status=408), "timeout"),
        (Say("<html>", drip=0.2), "timeout"),
        (Say(pubmed_says(RIGHT).body, missing=5), "malformed"),
        (Say(pubmed_says(RIGHT).body, headers={"Content-Encoding": "gzip"}), "malformed"),
    ],
)
def test_what_passes_is_asked_again(says: Say, cause: str) -> None:
    with serving(lambda call: says if call.nth < 2 else pubmed_says(RIGHT)) as server:
        engine = RemoteEngine(quick(server.url, timeout=0.6, attempts=3))
        assert one(engine) == RIGHT
        server.script = lambda call: says
        found = one(engine, "b")
    assert (found.cause, found.attempts) == (cause, 3)
    assert found.message.startswith("PubMed: ")


@pytest.mark.parametrize(
    "says",
    [
        Say("", status=302, headers={"Location": "http://127.0.0.1:1/"}),
        Say("no", status=403),
        Say("", status=429, headers={"Retry-After": "3600"}),
    ],
)
def test_what_does_not_pass_is_asked_once(says: Say) -> None:
    with serving(lambda call: says) as server:
        assert one(RemoteEngine(quick(server.url))).attempts == 1
    assert len(server.calls) == 1


def test_a_dead_service_ends_all_searches() -> None:
    with serving(lambda call: Say("", status=500)) as server:
        engine = RemoteEngine(quick(server.url, patience=0.2, pause=0.1, attempts=50))
        began = time.monotonic()
        found = engine.search([RemoteSearch(f"q{n}", 1) for n in range(30)])
    assert time.monotonic() - began < 10
    assert {each.cause for each in found if isinstance(each, Failure)} == {"connection"}


def test_requests_keep_their_distance() -> None:
    with serving(lambda call: pubmed_says(RIGHT)) as server:
        engine = RemoteEngine(quick(server.url, requests_per_second=20.0))
        began = time.monotonic()
        engine.search([RemoteSearch(f"q{n}", 1) for n in range(7)])
        assert time.monotonic() - began > 6 / 20


# ---------------------------------------------------------------------- key, digest, settings


def test_the_key_is_sent_and_is_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NCBI_API_KEY", KEY)
    caplog.set_level("INFO")
    answers = [
        Say({"error": "API key invalid", "api-key": KEY}, status=400),
        Say({"error": f"rate limit of {KEY}"}, status=429),
        Say(f"<html>{'x' * 280} {KEY}</html>"),  # cut in the middle of it
        pubmed_error(f"Search Backend failed: /api/search/?api_key={KEY}"),
        Say("", status=302, headers={"Location": f"http://{KEY}.invalid/{KEY}"}),
        Say(drop=True),
    ]
    with serving(lambda call: answers[0]) as server:
        engine = RemoteEngine(quick(server.url, attempts=2))
        for says in answers:
            server.script = lambda call, says=says: says
            message = repr(one(engine))
            assert not any(KEY[:length] in message for length in (8, len(KEY)))
        assert {call.fields["api_key"] for call in server.calls} == {KEY}
        assert not any(KEY in call.target or KEY in str(call.headers) for call in server.calls)
        assert KEY not in repr(engine) + engine.digest + caplog.text.replace(server.url, "")
        server.script, server.calls[:] = lambda call: trials_say([]), []
        one(RemoteEngine(quick(server.url, service=TRIALS)))
        assert KEY not in server.calls[0].target + str(server.calls[0].headers)
    for key in ("two words of a key that is none", KEY[:9]):
        monkeypatch.setenv("NCBI_API_KEY", key)
        with pytest.raises(InputError) as error:
            RemoteEngine(RemoteEngineConfig())
        assert key not in str(error.value)
    monkeypatch.setenv("NCBI_API_KEY", KEY)
    with pytest.raises(InputError, match="https"):
        RemoteEngine(RemoteEngineConfig(url="http://example.invalid"))


def test_the_digest_names_what_decides_the_results() -> None:
    digest = RemoteEngine(RemoteEngineConfig()).digest
    assert digest == (
        "pubmed client=1 url=https://eutils.ncbi.nlm.nih.gov/entrez/eutils sort=relevance "
        "date=pdat since=1970-01-01 most=3000"
    )
    assert RemoteEngine(RemoteEngineConfig(timeout=1.0, email="a@b.c")).digest == digest
    for change in ({"service": TRIALS}, {"sort": "default"}, {"first_year": 1971}, {"most": 10}):
        assert RemoteEngine(RemoteEngineConfig(**change)).digest != digest  # type: ignore[arg-type]


@pytest.mark.parametrize("until", ["2015", "2015-02-30", "2015/01/01", "2015-01-01]", "20150101"])
def test_a_last_day_that_is_none_is_refused(until: str) -> None:
    engine = RemoteEngine(quick("http://127.0.0.1:1"))
    with pytest.raises(InputError, match=re.escape(repr(until))):
        one(engine, until=until)
    with pytest.raises(InputError, match="0"):
        one(engine, most=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("service", "google"),
        ("url", "http://me:secret-key-here@a"),
        ("requests_per_second", float("nan")),
        ("at_once", 0),
        ("most", 10_000),
        ("sort", "date"),
        ("first_year", 999),
        ("first_year", 10_000),
        ("timeout", 0.0),
        ("attempts", 0),
        ("patience", float("nan")),
        ("tool", "our tool"),
        ("email", "a@b.c\r\nHost: x"),
    ],
)
def test_a_field_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^config.engine.{field} ") as error:
        RemoteEngineConfig(**{field: value})
    assert "secret-key-here" not in str(error.value)
