"""Rows of judged queries, a JSON object each, as DeepRetrieval and its remake have them.

DeepRetrieval (arXiv 2503.00223) searches publications for a review. Its rows have `pico`, an object
with the parts P (patient), I (intervention), C (comparison) and O (outcome) of what the review
asks; `publication_pmids`, the ids of the publications that it uses; and `pub_date`, the review's
own date. Rows of the remake have `query` and `relevant_doc_ids`, even if they have a `pico`, too,
and perhaps `answers`. Both may have an `id` and a `pub_date`. Ids are texts or whole numbers.
"""

from __future__ import annotations

import calendar
import datetime
import hashlib
import re
from collections.abc import Mapping
from typing import Any

from qrag_jax.data.judged_query import JudgedQuery
from qrag_jax.errors import InputError
from qrag_jax.runtime.bounded_json import shown

PARTS = {"P": "Patient", "I": "Intervention", "C": "Comparison", "O": "Outcome"}
_DIGITS = 8  # of the hash, in hex


def judged_row(where: str, row: Mapping[str, Any]) -> JudgedQuery:
    """One row as a query; its grades are () if it has no relevant document.

    The text of a PICO row is its parts with their names, such as "Patient: adults; Outcome: pain";
    parts that are empty are left out. Where there is only the year or month of a review, documents
    may be found until its end. A row without an id gets one from its place and content.

    Args:
        where: the row's place, such as "train.jsonl:17".
        row: the object.
    """
    if "query" in row:
        text, field = _text(where, "query", row["query"]), "relevant_doc_ids"
    elif "pico" in row:
        text, field = _pico(where, row["pico"]), "publication_pmids"
    else:
        raise InputError(
            f"{where}: there is neither a field 'query' nor a field 'pico'; write query and "
            "relevant_doc_ids, or pico and publication_pmids."
        )
    if field not in row:
        raise InputError(f"{where}: field {field!r} is missing; write the ids of documents.")
    listed = _list(where, field, row[field])
    documents = tuple(dict.fromkeys(_id(where, field, each) for each in listed))
    return JudgedQuery(
        _own_id(where, row, text, documents),
        text,
        tuple((document, 1) for document in documents),
        _answers(where, row),
        _until(where, row),
    )


def _pico(where: str, pico: Any) -> str:
    if not isinstance(pico, dict) or not pico.keys() <= PARTS.keys():
        raise InputError(
            f"{where}: field 'pico' is {shown(pico)}; write an object with {', '.join(PARTS)}."
        )
    parts = {key: _text(where, key, pico[key]) for key in PARTS if pico.get(key) not in (None, "")}
    if not parts:
        raise InputError(f"{where}: field 'pico' has no part; write one, or drop the row.")
    return "; ".join(f"{PARTS[key]}: {text.rstrip(' .;')}" for key, text in parts.items())


def _text(where: str, field: str, value: Any) -> str:
    """The value in one line."""
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: field {field!r} is {shown(value)}; write a text with words.")
    return _checked(where, field, " ".join(value.split()))


def _list(where: str, field: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{where}: field {field!r} is {shown(value)}; write a list.")
    return value


def _id(where: str, field: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise InputError(
            f"{where}: field {field!r} has the id {shown(value)}; write a text or a whole number."
        )
    return _checked(where, field, value)


def _own_id(where: str, row: Mapping[str, Any], text: str, documents: tuple[str, ...]) -> str:
    if row.get("id") is not None:
        return _id(where, "id", row["id"])
    content = "\0".join((where, text, *documents))
    digest = hashlib.blake2b(content.encode(), digest_size=_DIGITS // 2).hexdigest()
    return f"row-{where.rpartition(':')[2]}-{digest}"


def _answers(where: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    value = row.get("answers")
    listed = [] if value is None else _list(where, "answers", value)
    return tuple(dict.fromkeys(_text(where, "answers", each) for each in listed))


def _until(where: str, row: Mapping[str, Any]) -> str:
    value = row.get("pub_date")
    if value is None:
        return ""
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        return last_day(str(value))  # a year may be a number
    except ValueError:
        raise InputError(
            f"{where}: field 'pub_date' is {shown(value)}, no date that can be read; write it as "
            "YYYY-MM-DD."
        ) from None


def _checked(where: str, field: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{where}: field {field!r} has half a surrogate pair; write valid Unicode."
        ) from None
    return text


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
