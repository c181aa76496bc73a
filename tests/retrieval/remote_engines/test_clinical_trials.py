"""What is asked of ClinicalTrials.gov, and what each of its answers means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.remote_engines.clinical_trials import ClinicalTrials
from qrag_jax.retrieval.remote_engines.config import RemoteEngineConfig
from qrag_jax.retrieval.remote_engines.sending import GET, Received
from qrag_jax.retrieval.remote_engines.service import Page, Part
from tests.retrieval.remote_engines.scripted import study

PART = Part("a OR b", "1970-01-01", "2015-03-31", 1000)
ONE, TWO = "NCT00000001", "NCT00000002"


def read(body: Any, part: Part = PART, status: int = 200) -> Page | Failure:
    text = body if isinstance(body, str) else json.dumps(body)
    service = ClinicalTrials(RemoteEngineConfig(service="clinical_trials"))
    return service.read(Received(status, text, {}), part)


def test_the_fields_of_a_request() -> None:
    service = ClinicalTrials(RemoteEngineConfig(service="clinical_trials"))
    request = service.request(PART)
    assert (request.method, request.path) == (GET, "/studies")
    assert request.fields == {
        "query.term": "a OR b",
        "filter.advanced": "AREA[StartDate]RANGE[1970-01-01,2015-03-31]",
        "fields": "NCTId,StartDate",
        "format": "json",
        "pageSize": "1000",
        "sort": "@relevance",
    }
    following = service.request(PART._replace(until="", size=5, cursor="t&k=1")).fields
    assert following["filter.advanced"] == "AREA[StartDate]RANGE[1970-01-01,MAX]"
    assert (following["pageToken"], following["pageSize"]) == ("t&k=1", "5")


def test_a_page_and_the_way_to_the_next() -> None:
    studies = [study(TWO), study(ONE)]
    assert read({"studies": studies, "nextPageToken": "t"}) == Page((TWO, ONE), "t")
    assert read({"studies": studies}) == Page((TWO, ONE))
    assert read({"studies": [], "nextPageToken": "t"}) == Page((), "t")  # there may be such pages
    assert read({"studies": []}) == Page(())


@pytest.mark.parametrize(
    ("began", "until", "within"),
    [
        ("2015-03-31", "2015-03-31", True),
        ("2015-04-01", "2015-03-31", False),
        ("2015-03", "2015-03-01", True),  # a month is its first day
        ("2015-03", "2015-02-28", False),
        ("1970-01-01", "", True),
        ("1970-01", "", True),
        ("1969-12-31", "", False),
        ("2999-01-01", "", True),
        ("", "", False),
    ],
)
def test_studies_outside_of_the_limits_are_dropped(began: str, until: str, within: bool) -> None:
    """The service ignores its filter where the query is a list of NCT numbers."""
    part = PART._replace(query=f"{ONE}, {TWO}", until=until)
    found = read({"studies": [study(ONE, began), study(TWO, "1970-01-01")]}, part)
    assert found == Page((ONE, TWO) if within else (TWO,))


def test_a_query_that_cannot_be_read_finds_nothing() -> None:
    text = "Error parsing query in Other terms: no viable alternative at input 'b'\nmissing ')'"
    assert read(text, status=400) == Page((), unreadable=True)


@pytest.mark.parametrize(
    "text",
    [
        "Error parsing query in filter.advanced: mismatched input",
        "`pageToken` is wrong",
        "",
        '{"studies": []}',
    ],
)
def test_another_bad_request_is_a_failure(text: str) -> None:
    found = read(text, status=400)
    assert isinstance(found, Failure)
    assert found.cause == "request"


@pytest.mark.parametrize(
    "body",
    [
        "<html></html>",
        '{"studies": [{"protocolSection": {"ident',
        {},
        {"studies": None},
        {"studies": {"a": 1}},
        {"studies": [study(ONE)], "nextPageToken": 3},
        {"studies": [{}]},
        {"studies": [None]},
        {"studies": [study("12345678")]},
        {"studies": [study(ONE), {"protocolSection": {"statusModule": None}}]},
        {"studies": [{"protocolSection": study(ONE)["protocolSection"] | {"statusModule": []}}]},
        {"studies": [study(ONE, 1999)]},  # type: ignore[arg-type]
        {"studies": [study(ONE, ""), study(TWO, "")]},  # all would be dropped
    ],
)
def test_a_failure(body: Any) -> None:
    found = read(body)
    assert isinstance(found, Failure)
    assert found.cause == "malformed"


def test_a_study_without_number_is_a_failure_though_its_date_is_outside() -> None:
    outside = {"protocolSection": {"statusModule": {"startDateStruct": {"date": "2020-01-01"}}}}
    assert isinstance(read({"studies": [outside]}), Failure)
