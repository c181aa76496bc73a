"""What is asked of PubMed, and what each of its answers means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.remote_engines.config import RemoteEngineConfig
from qrag_jax.retrieval.remote_engines.pubmed import PubMed
from qrag_jax.retrieval.remote_engines.sending import POST, Received
from qrag_jax.retrieval.remote_engines.service import Page, Part, Refused
from tests.retrieval.remote_engines.scripted import BACKEND

PART = Part("a AND b", "1970-01-01", "2015-03-31", 3)


def read(body: Any, part: Part = PART) -> Page | Failure:
    text = body if isinstance(body, str) else json.dumps(body)
    return PubMed(RemoteEngineConfig()).read(Received(200, text, {}), part)


def result(**fields: Any) -> dict[str, Any]:
    return {"esearchresult": fields}


def test_the_fields_of_a_request() -> None:
    request = PubMed(RemoteEngineConfig(tool="ours", email="a@b.c")).request(PART)
    assert (request.method, request.path) == (POST, "/esearch.fcgi")
    assert request.fields == {
        "db": "pubmed",
        "term": "a AND b",
        "retmode": "json",
        "retmax": "3",
        "datetype": "pdat",
        "mindate": "1970/01/01",
        "maxdate": "2015/03/31",
        "sort": "relevance",
        "tool": "ours",
        "email": "a@b.c",
    }


def test_both_limits_of_the_date_are_sent_though_one_is_open() -> None:
    plain = PubMed(RemoteEngineConfig(sort="default"))
    fields = plain.request(PART._replace(until="")).fields
    assert (fields["mindate"], fields["maxdate"]) == ("1970/01/01", "3000")
    assert "sort" not in fields
    assert "email" not in fields


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        (result(count="2", idlist=["9", "10"]), ("9", "10")),
        (result(count="700", idlist=["9", "10", "8"]), ("9", "10", "8")),  # three were wanted
        (result(count="0", idlist=[], warninglist={"outputmessages": ["No items found."]}), ()),
        (result(count="1", idlist=["9"], errorlist={"phrasesnotfound": ["b"]}), ("9",)),
        (result(count="0", idlist=[], errorlist={"fieldsnotfound": ["[x]"]}), ()),
    ],
)
def test_a_page(body: Any, ids: tuple[str, ...]) -> None:
    assert read(body) == Page(ids)


def test_a_term_that_is_empty_finds_nothing() -> None:
    body = result(ERROR="Empty term and query_key - nothing todo")
    assert read(body) == Page((), unreadable=True)


@pytest.mark.parametrize("text", [BACKEND, "Search Backend failed: Cannot connect to SOLR", "?"])
def test_an_error_whose_fault_is_not_clear(text: str) -> None:
    assert read(result(ERROR=text)) == Refused("server", text)


def test_an_error_with_a_raw_line_break_is_read() -> None:
    found = read('{"esearchresult": {"ERROR": "Search Backend failed:\nmore"}}')
    assert found == Refused("server", "Search Backend failed: more")


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ({"error": "API rate limit exceeded", "api-key": "1.2.3.4", "count": "4"}, "rate_limit"),
        ({"error": "something else"}, "server"),
        ("<html><body>Sorry</body></html>", "malformed"),
        ('{"esearchresult": {"count": "2", "idlist": ["9", "1', "malformed"),
        ("", "malformed"),
        ("[" * 100_000, "malformed"),
        (["9"], "malformed"),
        ({}, "malformed"),
        ({"esearchresult": None}, "malformed"),
        (result(), "malformed"),
        (result(count="2"), "malformed"),
        (result(idlist=[]), "malformed"),
        (result(count=None, idlist=[]), "malformed"),
        (result(count="many", idlist=[]), "malformed"),
        (result(count="-1", idlist=[]), "malformed"),
        (result(count="2", idlist="9,10"), "malformed"),
        (result(count="2", idlist=[9, 10]), "malformed"),
        (result(count="1", idlist=["NCT1"]), "malformed"),
        (result(count="1", idlist=["²"]), "malformed"),
        (result(count="2", idlist=["9"]), "malformed"),  # half a page
        (result(count="700", idlist=["9", "10"]), "malformed"),
        (result(count="1", idlist=[]), "malformed"),
    ],
)
def test_a_failure(body: Any, cause: str) -> None:
    found = read(body)
    assert isinstance(found, Failure)
    assert not isinstance(found, Refused)
    assert found.cause == cause
    assert "1.2.3.4" not in found.message
