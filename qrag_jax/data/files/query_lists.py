"""Reads lists of queries that shall be rewritten; they need no judgements.

- A text file, `.txt`: a query a line, whose id is the line's number. Blank lines are left out.
- A file of rows, in one of the forms of `data.files.records`: `query` or `pico` as judged rows have
  them (`data.files.judged_rows`), or `_id` and `text` as BEIR has them. A row may name the
  `collection` that is searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qrag_jax.data.files.judged_rows import judged_row
from qrag_jax.data.files.records import SUFFIXES, read_records
from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_files
from qrag_jax.runtime.bounded_json import shown

TEXT = ".txt"


class ListedQuery(NamedTuple):
    """One query.

    Attributes:
        id: unique among those of its collection.
        text: in one line.
        until: the last day of publication of what it may find, as YYYY-MM-DD; "": any.
        collection: "" if the row names none.
    """

    id: str
    text: str
    until: str = ""
    collection: str = ""


def read_query_list(path: Path) -> list[ListedQuery]:
    """The queries of a file, in its order."""
    if path.name.endswith(TEXT):
        rows = _texts(path)
    elif path.name.endswith(SUFFIXES):
        rows = ((where, _listed(where, row)) for where, row in read_records(path))
    else:
        raise InputError(
            f"the name of {path} ends in none of {TEXT}, {', '.join(SUFFIXES)}; rename the file of "
            "queries."
        )
    found: dict[tuple[str, str], ListedQuery] = {}
    for where, query in rows:
        key = query.collection, query.id
        if key in found:
            raise InputError(
                f"{where}: there is a query {query.id!r} before; give each its own id."
            )
        found[key] = query
    if not found:
        raise InputError(f"{path} holds no query; write one a line.")
    return [*found.values()]


def _texts(path: Path) -> Iterator[tuple[str, ListedQuery]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(bounded_files.lines(file, path, "split it"), 1):
                where = f"{path.name}:{number}"
                try:
                    text = " ".join(line.decode("utf-8-sig").split())
                except UnicodeDecodeError:
                    raise InputError(f"{where}: is not UTF-8; save the file as UTF-8.") from None
                if text:
                    yield where, ListedQuery(str(number), text)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); give a file of queries."
        ) from None


def _listed(where: str, row: Mapping[str, Any]) -> ListedQuery:
    own = dict(row)
    if "query" not in own and "pico" not in own:
        if "text" not in own:
            raise InputError(
                f"{where}: there is no field 'query', 'pico' or 'text'; write the query in one."
            )
        own["query"] = own["text"]
    if "_id" in own:
        own.setdefault("id", own["_id"])
    # What is relevant is not asked for here, so it may be missing, or of any form.
    read = judged_row(where, own | {"relevant_doc_ids": [], "publication_pmids": [], "answers": []})
    collection = own.get("collection", "")
    if not isinstance(collection, str):
        raise InputError(
            f"{where}: field 'collection' is {shown(collection)}; write its name, or leave it out."
        )
    return ListedQuery(read.id, read.text, read.until, collection)
