"""Rows of judged queries, a JSON object each, as DeepRetrieval and its remake have them.

DeepRetrieval (arXiv 2503.00223) searches publications for a review. Its rows have `pico`, an object
with the parts P (patient), I (intervention), C (comparison) and O (outcome) of what the review
asks; `publication_pmids`, the ids of the publications that it uses; and `pub_date`, the review's
own date. Rows of the remake have `query` and `relevant_doc_ids`, even if they have a `pico`, too,
and perhaps `answers`. Both may have an `id` and a `pub_date`. Ids are texts or whole numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from qrag_jax.data.files.dates import last_day
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

    Raises:
        InputError: the row is of neither form, a field has the wrong type, there is no text, or a
            date cannot be read; names file, line and field.
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
