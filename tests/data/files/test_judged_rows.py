"""Rows of judged queries: both forms, and every field that can be wrong."""

from __future__ import annotations

import calendar
import datetime
import re
from typing import Any

import pytest

from qrag_jax.data.files.judged_rows import judged_row, last_day
from qrag_jax.data.judged_query import JudgedQuery
from qrag_jax.errors import InputError

QUERY = {"query": "Does it help?", "relevant_doc_ids": ["d1", 7, "d1"], "id": "q1"}
PICO = {
    "id": 12,
    "pico": {"P": "adults with pain.", "I": "rest", "C": "", "O": "less  pain"},
    "publication_pmids": ["101", "102"],
    "pub_date": "2015/10/07",
    "origin": {"pmid": "9"},
}
PLACE = "train.jsonl:17"


def test_a_row_of_the_remake() -> None:
    grades = (("d1", 1), ("7", 1))
    assert judged_row(PLACE, QUERY) == JudgedQuery("q1", "Does it help?", grades)
    answered = judged_row(PLACE, QUERY | {"answers": ["yes", "Yes", "yes"]})
    assert answered.answers == ("yes", "Yes")
    assert judged_row(PLACE, QUERY | {"answers": None, "query": " a\n b "}).text == "a b"
    assert judged_row(PLACE, QUERY | {"relevant_doc_ids": []}).grades == ()


def test_a_row_of_deepretrieval() -> None:
    assert judged_row(PLACE, PICO) == JudgedQuery(
        "12",
        "Patient: adults with pain; Intervention: rest; Outcome: less pain",
        (("101", 1), ("102", 1)),
        until="2015-10-07",
    )
    assert judged_row(PLACE, PICO | {"pub_date": 2015}).until == "2015-12-31"
    assert judged_row(PLACE, PICO | {"pub_date": None}).until == ""
    assert judged_row(PLACE, PICO | QUERY).text == "Does it help?"
    assert judged_row(PLACE, PICO | QUERY).until == "2015-10-07"
    assert judged_row(PLACE, PICO | {"pico": {"C": "none"}}).text == "Comparison: none"


def test_rows_without_an_id_get_one_from_place_and_content() -> None:
    bare = {key: value for key, value in QUERY.items() if key != "id"}
    name = judged_row(PLACE, bare).id
    assert re.fullmatch(r"row-17-[0-9a-f]{8}", name)
    assert judged_row(PLACE, bare).id == name
    others = [
        judged_row("train.jsonl:18", bare).id,
        judged_row("dev.jsonl:17", bare).id,
        judged_row(PLACE, bare | {"query": "Does it harm?"}).id,
        judged_row(PLACE, bare | {"relevant_doc_ids": ["d2"]}).id,
        judged_row(PLACE, bare | {"id": None, "relevant_doc_ids": ["d3"]}).id,
    ]
    assert len({name, *others}) == 6


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"text": "t"}, "there is neither a field 'query' nor a field 'pico'; write"),
        ({"query": "q"}, "field 'relevant_doc_ids' is missing; write the ids"),
        ({"pico": {"P": "p"}}, "field 'publication_pmids' is missing"),
        (QUERY | {"query": 3}, "field 'query' is 3; write a text with words."),
        (QUERY | {"query": " "}, "field 'query' is \" \"; write a text with words."),
        (QUERY | {"query": "\ud800"}, "field 'query' has half a surrogate pair"),
        (QUERY | {"relevant_doc_ids": "d1"}, "field 'relevant_doc_ids' is \"d1\"; write a list."),
        (QUERY | {"relevant_doc_ids": None}, "field 'relevant_doc_ids' is null; write a list."),
        (QUERY | {"relevant_doc_ids": [1.5]}, "field 'relevant_doc_ids' has the id 1.5; write"),
        (QUERY | {"relevant_doc_ids": [True]}, "field 'relevant_doc_ids' has the id true; write"),
        (QUERY | {"id": ""}, "field 'id' has the id \"\"; write"),
        (QUERY | {"id": ["q"]}, "field 'id' has the id [\"q\"]; write"),
        (QUERY | {"answers": "yes"}, "field 'answers' is \"yes\"; write a list."),
        (QUERY | {"answers": [1]}, "field 'answers' is 1; write a text with words."),
        (PICO | {"pico": "P"}, "field 'pico' is \"P\"; write an object with P, I, C, O."),
        (PICO | {"pico": {"p": "x"}}, 'field \'pico\' is {"p": "x"}; write an object'),
        (PICO | {"pico": {"P": 1}}, "field 'P' is 1; write a text with words."),
        (PICO | {"pico": {"P": "", "I": None}}, "field 'pico' has no part; write one"),
        (PICO | {"publication_pmids": {}}, "field 'publication_pmids' is {}; write a list."),
        (PICO | {"pub_date": "7/10/2015"}, "field 'pub_date' is \"7/10/2015\", no date"),
        (PICO | {"pub_date": 1444176000000}, "field 'pub_date' is 1444176000000, no date"),
        (PICO | {"pub_date": [2015]}, "field 'pub_date' is [2015], no date that can be read"),
    ],
)
def test_rows_that_are_refused(row: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        judged_row(PLACE, row)
    message = str(caught.value)
    assert message.startswith(f"{PLACE}: {told}")
    assert message.endswith(".")
    assert ". " not in message


@pytest.mark.parametrize(
    "text",
    [
        "2015-10-07",
        "2015/10/07",
        "2015.10.7",
        "2015-10-7",
        "20151007",
        "2015-10-07T08:30:00Z",
        "2015-10-07 08:30:00",
        "2015 Oct 7",
        "2015 Oct 07",
        "2015-Oct-07",
        "7 October 2015",
        "07-Oct-2015",
        "7th Oct. 2015",
        "October 7, 2015",
        "oct 7 2015",
        " Oct.  7th, 2015 ",
    ],
)
def test_a_day_in_every_form(text: str) -> None:
    assert last_day(text) == "2015-10-07"


@pytest.mark.parametrize(
    ("text", "day"),
    [
        ("2015", "2015-12-31"),
        ("2015-02", "2015-02-28"),
        ("2016/02", "2016-02-29"),
        ("2015 Sept", "2015-09-30"),
        ("June 2015", "2015-06-30"),
        ("May, 2015", "2015-05-31"),
    ],
)
def test_a_month_or_year_lasts_until_its_last_day(text: str, day: str) -> None:
    assert last_day(text) == day


def test_every_month_has_its_names() -> None:
    for number in range(1, 13):
        name, short = calendar.month_name[number], calendar.month_abbr[number]
        day = datetime.date(1999, number, 3).isoformat()
        assert last_day(f"3 {name} 1999") == last_day(f"1999 {short} 3") == day


@pytest.mark.parametrize(
    "text",
    [
        *("", "soon", "7/10/2015", "15", "2015-13", "2015-02-30", "2015-1/2", "2015 Foo"),
        *("2015-00-01", "2015-01-00", "0215-01-01", "201510", "2015-10-07T", "Ju 2015"),
        *("20151301", "2015 Oct-Dec", "1444176000000"),
    ],
)
def test_what_is_no_date(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        last_day(text)
