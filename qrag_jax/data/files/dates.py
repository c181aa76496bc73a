"""Dates as people and databases write them, as days."""

from __future__ import annotations

import calendar
import datetime
import re

# Not those of `calendar`, which are in the language of the machine.
_NAMES = "january february march april may june july august september october november december"
_MONTHS = _NAMES.split()
_YEAR = r"(?P<year>[12]\d{3})"
_DAY = r"(?P<day>\d{1,2})"
_NAME = r"(?P<name>[A-Za-z]{3,9})\.?"
_FORMS = tuple(
    re.compile(form)
    for form in (
        # 2015, 2015-10, 2015/10/07, 2015.10.7, 2015-10-07T08:30:00Z
        rf"{_YEAR}(?:(?P<mark>[-/.])(?P<month>\d{{1,2}})(?:(?P=mark){_DAY}(?:[T ]\d\d:.*)?)?)?",
        r"(?P<year>[12]\d{3})(?P<month>\d\d)(?P<day>\d\d)",  # 20151007
        rf"{_YEAR}[ /-]{_NAME}(?:[ /-]{_DAY})?",  # 2015 Oct 7, 2015-Oct, as PubMed has it
        rf"(?:{_DAY}(?:st|nd|rd|th)?[ /-])?{_NAME},?[ /-]{_YEAR}",  # 7 October 2015, Oct 2015
        rf"{_NAME} {_DAY}(?:st|nd|rd|th)?,? {_YEAR}",  # October 7, 2015
    )
)


def last_day(text: str) -> str:
    """The day of a date, or the last day of a month or year, as YYYY-MM-DD.

    The year comes first where the month is a number: of 7/10/2015 nobody knows what it means.

    Raises:
        ValueError: it is of no known form, or there is no such day.
    """
    for form in _FORMS:
        if found := form.fullmatch(" ".join(text.split())):
            parts = found.groupdict()
            return _day(int(parts["year"]), _month(parts), parts.get("day"))
    raise ValueError(f"{text!r} is no date such as 2015-10-07")


def _month(parts: dict[str, str | None]) -> int:
    if name := parts.get("name"):
        # "Sept" is usual, too. A name of three letters fits one month at most.
        for number, month in enumerate(_MONTHS, 1):
            if month.startswith(name.lower()):
                return number
        raise ValueError(f"{name!r} is no month")
    return int(parts.get("month") or 12)


def _day(year: int, month: int, day: str | None) -> str:
    if day is None and 1 <= month <= 12:
        day = str(calendar.monthrange(year, month)[1])
    return datetime.date(year, month, int(day or 1)).isoformat()
