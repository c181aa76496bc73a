"""Dates: every usual form gives the same day, and what is none is refused."""

from __future__ import annotations

import calendar
import datetime

import pytest

from qrag_jax.data.files.dates import last_day


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
