"""Files of questions to search for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from qrag_jax.data.files.text_files import read_text
from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_json


class Asked(NamedTuple):
    """A question and its id; "": it has none."""

    id: str
    question: str


def read_questions(path: Path) -> Iterator[Asked]:
    """The questions of a file, one a line: as they are, or in JSON as `question` or `text`.

    Raises:
        InputError: the file cannot be read, or a line is a JSON object without a question.
    """
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            yield Asked("", line.strip())
            continue
        try:
            record = bounded_json.parsed(line)
            question = record["question"] if "question" in record else record["text"]
        except (ValueError, KeyError, TypeError):
            question = None
        if not isinstance(question, str) or not question.strip():
            raise InputError(
                f'{path}, line {number}: is no JSON object with a text in the field "question" or '
                '"text"; write one, or the question alone.'
            )
        yield Asked(str(record.get("id", record.get("_id", ""))), question)
