"""Files of questions to search for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qrag_jax.data.files.records import SUFFIXES, read_records
from qrag_jax.data.files.text_files import read_text
from qrag_jax.errors import InputError

_FIELDS = ("question", "query", "text")


class Asked(NamedTuple):
    """A question and its id; "": it has none."""

    id: str
    question: str


def read_questions(path: Path) -> Iterator[Asked]:
    """The questions of a file.

    Files named as `records.SUFFIXES` have records with a field `question`, `query` or `text`, and
    perhaps `id` or `_id`. All others have a question a line, as it is or as such a record in JSON.
    """
    if path.name.endswith(SUFFIXES):
        for where, record in read_records(path):
            yield _asked(where, record)
        return
    if path.name.endswith((".tsv", ".tsv.gz")):
        raise InputError(f"{path} is a table; write it as .csv with a column {_FIELDS[0]!r}.")
    # Not `splitlines`, which also splits at U+2028 and others that JSON lets stand in a text.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.lstrip().startswith("{"):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = {}
            yield _asked(f"{path.name}:{number}", record)
        elif line.strip():
            yield Asked("", line.strip())


def _asked(where: str, record: Mapping[str, Any]) -> Asked:
    question = next((record[name] for name in _FIELDS if name in record), None)
    if not isinstance(question, str) or not question.strip():
        raise InputError(
            f"{where}: there is no text in a field {' or '.join(map(repr, _FIELDS))}; write the "
            "question in one."
        )
    name = next((record[key] for key in ("id", "_id") if record.get(key) is not None), "")
    return Asked(str(name), question)
