"""Searches of PubMed and ClinicalTrials.gov against a real server on this machine.

The right ids or a failure, never less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval import pubmed
from qrag_jax.retrieval.pubmed import RemoteEngine, RemoteEngineConfig
from tests.retrieval.web_service import Call, Say, pubmed_says, quick, serving

PUBMED, TRIALS = "pubmed", "clinical_trials"
KEY = "0123456789abcdef0123456789abcdef0123"  # as long as NCBI's
HTML = "<html><head><title>Sorry</title></head></html>"
RIGHT = ("30", "1", "200")
ONE, TWO = "NCT00000001", "NCT00000002"
# What ESearch says both in an outage and where parentheses stay open.
BACKEND = "Search Backend failed: Search is temporarily unavailable. Please try again later."


@pytest.fixture(autouse=True)
def no_key_and_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCBI_API_KEY", raising=False)
    monkeypatch.setattr(pubmed, "PAUSE", 0.001)


def pubmed_error(text: str) -> Say:
    """As ESearch does."""
    return Say({"esearchresult": {"ERROR": text}})


def study(number: str, began: str = "2001-02-03") -> dict[str, Any]:
    """As the registry has it; began "": the date is not known."""
    status = {"startDateStruct": {"date": began}} if began else {}
    section = {"identificationModule": {"nctId": number}, "statusModule": status}
    return {"protocolSection": section}


def trials_say(studies: Sequence[Mapping[str, Any]], following: str = "") -> Say:
    """As the registry does."""
    more = {"nextPageToken": following} if following else {}
    return Say({"studies": list(studies), **more})


def one(engine: RemoteEngine, query: str = "a", most: int = 3, until: str = "") -> Any:
    (found,) = engine.search([(query, most, until)])
    return found


# ---------------------------------------------------------------------- what is sent


def test_the_fields_of_pubmed() -> None:
    with serving(lambda call: pubmed_says(RIGHT)) as server:
        settings = {"email": "a@b.c", "first_year": 1985}
        assert one(RemoteEngine(quick(server.url, **settings)), "a AND b", 3, "2015-03-31") == RIGHT
        assert one(RemoteEngine(quick(server.url))) == RIGHT
    first, second = server.calls
    fields = {"db": "pubmed", "term": "a AND b", "retmode": "json", "retmax": "3"}
    fields |= {"datetype": "pdat", "mindate": "1985/01/01", "maxdate": "2015/03/31"}
    assert first.fields == fields | {"sort": "relevance", "tool": "qrag_jax", "email": "a@b.c"}
    assert (second.fields["mindate"], second.fields["maxdate"]) == ("1970/01/01", "3000")
    assert "email" not in second.fields


@pytest.mark.parametrize("service", [PUBMED, TRIALS])
def test_a_query_arrives_as_it_is_and_changes_no_other_field(service: str) -> None:
    queries = ["a&retmax=0#", "b&pageSize=1&term=c", '50% + "é"\r\n[tiab]', "half \ud83d of it"]
    nothing = ["  \n", '() "" -']  # is not sent
    reply = pubmed_says([]) if service == PUBMED else trials_say([])
    with serving(lambda call: reply) as server:
        engine = RemoteEngine(quick(server.url, service=service))
        found = engine.search([(query, 5, "") for query in [*queries, *nothing]])
        assert one(engine, until="1969-12-31") == ()  # before the first year
    assert found == [()] * 6
    assert {call.query for call in server.calls} == {*queries[:3], "half \ufffd of it"}
    size = "retmax" if service == PUBMED else "pageSize"
    assert {call.fields[size] for call in server.calls} == {"5"}


def test_pages_make_up_the_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of which a page fails is tried again; pages without end make no shorter list."""
    monkeypatch.setattr(pubmed, "TRIALS_PAGE", 10)
    names = [f"NCT{number:08d}" for number in range(50, 15, -1)]

    def registry(call: Call) -> Say:
        begin = int(call.fields.get("pageToken", "t0")[1:])
        end = begin + int(call.fields["pageSize"])
        return trials_say(list(map(study, names[begin:end])), f"t{end}" if end < 35 else "")

    with serving(registry) as server:
        engine = RemoteEngine(quick(server.url, service=TRIALS))
        for most in (10, 11, 100):
            server.calls.clear()
            assert one(engine, most=most) == tuple(names[:most])
            assert len(server.calls) == -(-min(most, 35) // 10)
        second = {"pageToken": "t10"}
        server.script = lambda call: (
            Say(HTML) if call.nth == 0 and second.items() <= call.fields.items() else registry(call)
        )
        assert one(engine, "b", 35) == tuple(names)
        server.script = lambda call: trials_say([study(ONE)], f"t{call.nth}")
        assert one(engine, "e", 10).cause == "malformed"


# ---------------------------------------------------------------------- answers


def read(service: str, status: int, body: Any, until: str = "2015-03-31") -> Any:
    with serving(lambda call: Say(body, status=status)) as server:
        return one(RemoteEngine(quick(server.url, service=service)), "a AND b", 3, until)


def test_studies_outside_of_the_limits_are_dropped() -> None:
    """The service ignores its filter where the query is a list of NCT numbers."""
    for began, until, within in (
        ("2015-03-31", "2015-03-31", True),
        ("2015-04-01", "2015-03-31", False),
        ("2015-03", "2015-02-28", False),  # its first day
        *(("1969-12-31", "", False), ("2999-01-01", "", True), ("", "", False)),
    ):
        body = {"studies": [study(ONE, began), study(TWO, "1970-01-01")]}
        assert read(TRIALS, 200, body, until) == ((ONE, TWO) if within else (TWO,))


def test_answers_that_are_failures() -> None:
    wrong_ids = {"esearchresult": {"count": "2", "idlist": ["9"]}}
    for service, status, body, cause in (
        (PUBMED, 200, {"error": "rate limit exceeded", "api-key": "1.2.3.4"}, "rate_limit"),
        (PUBMED, 400, {"esearchresult": {"count": "0", "idlist": []}}, "request"),
        *((PUBMED, 200, body, "malformed") for body in ("[" * 100_000, ["9"], wrong_ids)),
        (TRIALS, 400, "Error parsing query in filter.advanced: mismatched input", "request"),
        (TRIALS, 200, {"studies": [{}]}, "malformed"),
    ):
        found = read(service, status, body)
        assert isinstance(found, Failure), body
        assert found.cause == cause
        assert "1.2.3.4" not in found.message


def test_a_bad_query_finds_nothing_and_an_outage_is_a_failure() -> None:
    text = "Error parsing query in Other terms: no viable alternative at input 'b'\nmissing ')'"
    assert read(TRIALS, 400, text) == ()

    def bad_query(call: Call) -> Say:
        return pubmed_says(["1"]) if call.query == "cancer" else pubmed_error(BACKEND)

    with serving(bad_query) as server:
        assert one(RemoteEngine(quick(server.url)), "((a") == ()
        server.script = lambda call: pubmed_error("Search Backend failed:\nmore")
        assert one(RemoteEngine(quick(server.url)), "((b").cause == "server"


def test_what_passes_is_requested_again_once() -> None:
    elsewhere = {"Location": "http://127.0.0.1:1/"}
    for says, cause in (
        (Say(drop=True), "connection"),
        (Say(HTML, status=503), "server"),
        (Say("", status=429, headers={"Retry-After": "0.01"}), "rate_limit"),
        (Say("<html>", drip=1.0), "timeout"),
        (Say("", status=302, headers=elsewhere), ""),  # does not pass
    ):
        with serving(
            lambda call, says=says: says if call.nth < 1 else pubmed_says(RIGHT)
        ) as server:
            engine = RemoteEngine(quick(server.url, timeout=0.6))
            assert (one(engine) == RIGHT) == bool(cause)
            server.script = lambda call, says=says: says
            found = one(engine, "b")
        assert found.attempts == (2 if cause else 1)
        assert not cause or found.cause == cause


# ---------------------------------------------------------------------- the key


def test_the_key_is_sent_and_is_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NCBI_API_KEY", KEY)
    caplog.set_level("INFO")
    answers = [
        Say({"error": "API key invalid", "api-key": KEY}, status=400),
        Say(f"<html>{'x' * 280} {KEY}</html>"),  # cut in the middle of it
        pubmed_error(f"Search Backend failed: /api/search/?api_key={KEY}"),
        Say("", status=302, headers={"Location": f"http://{KEY}.invalid/{KEY}"}),
    ]
    with serving(lambda call: answers[0]) as server:
        engine = RemoteEngine(quick(server.url))
        for says in answers:
            server.script = lambda call, says=says: says
            message = repr(one(engine))
            assert not any(KEY[:length] in message for length in (8, len(KEY)))
        assert {call.fields["api_key"] for call in server.calls} == {KEY}
        assert not any(KEY in call.target or KEY in str(call.headers) for call in server.calls)
        assert KEY not in engine.digest + caplog.text.replace(server.url, "")
        server.script, server.calls[:] = lambda call: trials_say([]), []
        one(RemoteEngine(quick(server.url, service=TRIALS)))
        assert KEY not in server.calls[0].target + str(server.calls[0].headers)
    with pytest.raises(InputError, match="https"):
        RemoteEngine(RemoteEngineConfig(url="http://example.invalid"))
    with pytest.raises(InputError, match=r"config\.engine\.url") as error:
        RemoteEngineConfig(url="http://me:secret-key-here@a")
    assert "secret-key-here" not in str(error.value)
