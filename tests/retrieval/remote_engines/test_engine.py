"""Whole searches: queries, pages, dates, the key; the right ids or a failure, never less."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.remote_engines import engine as engines
from qrag_jax.retrieval.remote_engines.clinical_trials import ClinicalTrials
from qrag_jax.retrieval.remote_engines.config import RemoteEngineConfig
from qrag_jax.retrieval.remote_engines.engine import RemoteEngine, RemoteSearch
from tests.retrieval.remote_engines.scripted import (
    KEY,
    Call,
    Say,
    by,
    pubmed_error,
    pubmed_says,
    quick,
    serving,
    study,
    trials_say,
)
from tests.retrieval.remote_engines.searching import RIGHT, failure, ids, one

PUBMED, TRIALS = "pubmed", "clinical_trials"
HTML = "<html><head><title>Sorry</title></head></html>"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCBI_API_KEY", raising=False)


@pytest.mark.parametrize("service", [PUBMED, TRIALS])
@pytest.mark.parametrize("query", ["", "  \n", '() "" -'])
def test_a_query_without_words_finds_nothing_and_is_not_sent(service: str, query: str) -> None:
    with serving(lambda call: trials_say([study("NCT00000001")])) as server:
        assert ids(one(RemoteEngine(quick(server.url, service=service)), query)) == ()
    assert server.calls == []


# ------------------------------------------------------------------------ queries and results


@pytest.mark.parametrize("service", [PUBMED, TRIALS])
def test_a_query_arrives_as_it_is_and_changes_no_other_field(service: str) -> None:
    queries = ["a&retmax=0#", "b&pageSize=1&term=c", '50% + "é"\r\n[tiab]', "half \ud83d of it"]
    said = pubmed_says([]) if service == PUBMED else trials_say([])
    with serving(lambda call: said) as server:
        engine = RemoteEngine(quick(server.url, service=service, at_once=1))
        engine.search([RemoteSearch(query, 5) for query in queries])
    assert server.queries == [*queries[:3], "half \ufffd of it"]
    size = "retmax" if service == PUBMED else "pageSize"
    assert {call.fields[size] for call in server.calls} == {"5"}
    assert len({frozenset(call.fields) for call in server.calls}) == 1


def test_the_order_is_kept_and_repeated_ids_are_dropped() -> None:
    with serving(lambda call: pubmed_says(["9", "30", "9", "1", "30", "2"])) as server:
        engine = RemoteEngine(quick(server.url))
        assert ids(one(engine, most=6)) == ("9", "30", "1", "2")
        assert ids(one(engine, most=2)) == ("9", "30")


def test_equal_queries_are_asked_once_with_the_largest_number() -> None:
    def script(call: Call) -> Say:
        wanted = int(call.fields["retmax"])
        return pubmed_says([f"{number + 1}" for number in range(wanted)], count=1000)

    asked = [("a", 2, ""), ("b", 1, ""), ("a", 5, ""), ("a", 3, "2010-01-01"), ("a", 9999, "")]
    with serving(script) as server:
        engine = RemoteEngine(quick(server.url, most=40))
        found = engine.search([RemoteSearch(*each) for each in asked])
    assert [len(ids(each)) for each in found] == [2, 1, 5, 3, 40]
    sent = {(c.query, c.fields["retmax"], c.fields["maxdate"]) for c in server.calls}
    assert sent == {("a", "40", "3000"), ("b", "1", "3000"), ("a", "3", "2010/01/01")}
    assert len(server.calls) == 3


def test_searches_run_side_by_side_and_answers_are_in_order() -> None:
    together = threading.Barrier(3)

    def script(call: Call) -> Say:
        together.wait(5.0)  # breaks if they come one after the other
        return pubmed_says([str(ord(call.query))])

    with serving(script) as server:
        engine = RemoteEngine(quick(server.url, at_once=3))
        found = engine.search([RemoteSearch(query, 1) for query in "cab"])
    assert list(map(ids, found)) == [("99",), ("97",), ("98",)]


def test_one_of_three_searches_fails() -> None:
    with serving(by("b", lambda call: Say(HTML), lambda call: pubmed_says(RIGHT))) as server:
        engine = RemoteEngine(quick(server.url))
        first, second, third = engine.search([RemoteSearch(query, 3) for query in "abc"])
    assert ids(first) == ids(third) == RIGHT
    assert failure(second).cause == "malformed"


def test_no_searches_are_no_requests() -> None:
    with serving(lambda call: Say(HTML)) as server:
        assert RemoteEngine(quick(server.url)).search([]) == []
    assert server.calls == []


# --------------------------------------------------------------------------------------- pages


class Registry:
    """Studies in one order, given page by page as ClinicalTrials.gov does."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.studies = [study(f"NCT{number:08d}") for number in numbers]

    def __call__(self, call: Call) -> Say:
        begin = int(call.fields.get("pageToken", "t0")[1:])
        end = begin + int(call.fields["pageSize"])
        return trials_say(self.studies[begin:end], f"t{end}" if end < len(self.studies) else "")


@pytest.mark.parametrize("most", [1, 9, 10, 11, 25, 34, 35, 36, 100])
def test_pages_make_up_the_ranking(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClinicalTrials, "page_size", 10)
    numbers = [*range(50, 15, -1)]
    with serving(Registry(numbers)) as server:
        found = ids(one(RemoteEngine(quick(server.url, service=TRIALS)), most=most))
    assert found == tuple(f"NCT{number:08d}" for number in numbers[:most])
    assert len(server.calls) == -(-min(most, 35) // 10)
    same = [{**c.fields, "pageSize": 0, "pageToken": 0} for c in server.calls]
    assert all(each == same[0] for each in same)  # the registry demands it


def test_a_page_that_fails_is_asked_for_again_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ClinicalTrials, "page_size", 10)
    registry = Registry(range(1, 36))

    def script(call: Call) -> Say:
        wrong = [study("NCT99999999"), {"protocolSection": None}]
        return trials_say(wrong, "t30") if call.nth == 0 else registry(call)

    with serving(script) as server:
        found = ids(one(RemoteEngine(quick(server.url, service=TRIALS)), most=35))
    assert found == tuple(f"NCT{number:08d}" for number in range(1, 36))
    tokens = [call.fields.get("pageToken", "") for call in server.calls]
    assert tokens == ["", "", "t10", "t10", "t20", "t20", "t30", "t30"]


def test_a_page_that_fails_for_ever_makes_no_shorter_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClinicalTrials, "page_size", 10)
    registry = Registry(range(1, 36))

    def script(call: Call) -> Say:
        return Say(HTML) if call.fields.get("pageToken") == "t20" else registry(call)

    with serving(script) as server:
        engine = RemoteEngine(quick(server.url, service=TRIALS))
        assert failure(one(engine, most=35)).cause == "malformed"
        assert len(ids(one(engine, most=20))) == 20


def test_pages_without_end_are_a_failure() -> None:
    with serving(lambda call: trials_say([study("NCT00000001")], f"t{call.nth}")) as server:
        engine = RemoteEngine(quick(server.url, service=TRIALS))
        assert failure(one(engine, most=10)).cause == "malformed"
    assert len(server.calls) <= engines._SPARE_PAGES


def test_an_empty_page_is_not_the_end() -> None:
    def script(call: Call) -> Say:
        last = "pageToken" in call.fields
        return trials_say([study("NCT00000001")]) if last else trials_say([], "t")

    with serving(script) as server:
        found = one(RemoteEngine(quick(server.url, service=TRIALS)), most=10)
    assert ids(found) == ("NCT00000001",)


# --------------------------------------------------------------------------------------- dates


def test_the_limits_of_the_date_are_sent() -> None:
    with serving(lambda call: pubmed_says(RIGHT)) as server:
        one(RemoteEngine(quick(server.url, first_year=1985)), until="2015-03-31")
    fields = server.calls[0].fields
    assert (fields["mindate"], fields["maxdate"]) == ("1985/01/01", "2015/03/31")
    assert fields["datetype"] == "pdat"
    with serving(lambda call: trials_say([study("NCT00000001")])) as server:
        one(RemoteEngine(quick(server.url, service=TRIALS)), until="2015-03-31")
    assert server.calls[0].fields["filter.advanced"].endswith("RANGE[1970-01-01,2015-03-31]")


def test_a_last_day_before_the_first_year_leaves_nothing() -> None:
    with serving(lambda call: pubmed_says(RIGHT)) as server:
        assert ids(one(RemoteEngine(quick(server.url)), until="1969-12-31")) == ()
    assert server.calls == []


@pytest.mark.parametrize("until", ["2015", "2015-02-30", "2015/01/01", "2015-01-01]", "20150101"])
def test_a_last_day_that_is_none_is_refused(until: str) -> None:
    with serving(lambda call: pubmed_says(RIGHT)) as server:
        engine = RemoteEngine(quick(server.url))
        with pytest.raises(InputError, match=f"'a' is {re.escape(repr(until))}"):
            one(engine, until=until)
        with pytest.raises(InputError, match="0"):
            one(engine, most=0)
    assert server.calls == []


# ------------------------------------------------------------------------------ key and digest


def test_the_key_is_sent_and_is_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NCBI_API_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    told = [
        Say({"error": "API key invalid", "api-key": KEY}, status=400),
        Say({"error": f"the key {KEY} is bad"}, status=400),
        Say({"error": f"rate limit of {KEY}"}, status=429),
        Say(f"<html>{'x' * 280} {KEY}</html>"),  # cut in the middle of it
        pubmed_error(f"Search Backend failed: /api/search/?api_key={KEY}"),
        Say({"esearchresult": {"count": KEY, "idlist": [KEY]}}),
        Say("", status=302, headers={"Location": f"http://{KEY}.invalid/{KEY}"}),
        Say(drop=True),
    ]
    with serving(lambda call: told[0]) as server:
        engine = RemoteEngine(quick(server.url, attempts=2))
        for said in told:
            server.script = lambda call, said=said: said
            message = repr(failure(one(engine)))
            assert not any(KEY[:length] in message for length in (8, len(KEY)))
        assert {call.fields["api_key"] for call in server.calls} == {KEY}
        assert not any(KEY in call.target or KEY in str(call.headers) for call in server.calls)
    shown = (repr(engine), engine.digest, caplog.text, repr(engine.config), repr(vars(engine)))
    assert not any(KEY in each for each in shown)


def test_trials_get_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCBI_API_KEY", KEY)
    with serving(lambda call: trials_say([])) as server:
        one(RemoteEngine(quick(server.url, service=TRIALS)))
    (call,) = server.calls
    assert KEY not in call.target + str(call.headers) + str(call.fields)


def test_a_key_that_is_none_is_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key in ("two words of a key that is none", KEY[:9]):
        monkeypatch.setenv("NCBI_API_KEY", key)
        with pytest.raises(InputError) as told:
            RemoteEngine(RemoteEngineConfig())
        assert key not in str(told.value)


def test_the_digest_names_what_decides_the_results() -> None:
    digest = RemoteEngine(RemoteEngineConfig()).digest
    assert digest == (
        "pubmed client=1 url=https://eutils.ncbi.nlm.nih.gov/entrez/eutils sort=relevance "
        "date=pdat since=1970-01-01 most=3000"
    )
    for same in ({"timeout": 1.0}, {"email": "a@b.c"}, {"attempts": 9}):
        assert RemoteEngine(RemoteEngineConfig(**same)).digest == digest  # type: ignore[arg-type]
    changes: list[dict[str, Any]] = [
        {"service": TRIALS},
        {"url": "http://127.0.0.1:8/x"},
        {"sort": "default"},
        {"first_year": 1971},
        {"most": 10},
    ]
    others = {RemoteEngine(RemoteEngineConfig(**change)).digest for change in changes}
    assert len(others | {digest}) == 6
