"""Files of answers, of verdicts on them, and of other rows: JSON lines, resumable after a kill."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from qrag_jax.metrics import row_log
from qrag_jax.metrics.answers import INFRASTRUCTURE
from qrag_jax.runtime import bounded_files
from qrag_jax.runtime.whole_files import write_whole

_BEGIN_ANEW = "pass --restart, or delete the file, to begin anew"


@dataclasses.dataclass(frozen=True)
class AnswerRow:
    """What a model answered to one question.

    Attributes:
        id, question: id and question of the sample.
        answers: the gold answers.
        prediction: the answer extracted from `text`.
        text: the model's whole text.
        em, f1: scores of the prediction.
        rule: the rule that gave these scores.
        chunks: indices in the document of the chunks for the prompt, in the prompt's order; chunks
            that were cut are included.
        cut_chunks: number of chunks, from the first on, that were left out whole because they did
            not fit.
        cut_characters: number of characters left out in all.
        version: version of the model's weights, "" if unknown.
        finish_reason: as the server reported it.
        hops: number of facts that the answer needs.
        type: type of the question, "" if unknown.
    """

    id: str
    question: str
    answers: list[str]
    prediction: str
    text: str
    em: float
    f1: float
    rule: str
    chunks: list[int]
    cut_chunks: int
    cut_characters: int
    version: str
    finish_reason: str
    hops: int
    type: str


@dataclasses.dataclass(frozen=True)
class VerdictRow:
    """The judge's verdict on one prediction: whether it is right, and the judge's text."""

    id: str
    prediction: str
    right: bool
    text: str
    version: str


@dataclasses.dataclass(frozen=True)
class Miss:
    """A question without an answer, or an answer without a verdict.

    Attributes:
        cause: a short word; misses are counted by cause.
        message: one sentence.
        attempts: how often the server was asked.
        hops, type: as in `AnswerRow`.
    """

    id: str
    cause: str
    message: str
    attempts: int
    hops: int
    type: str

    @property
    def failed(self) -> bool:
        """Whether the infrastructure failed; else the model gave no answer, which scores 0."""
        return self.cause in INFRASTRUCTURE


Record = TypeVar("Record")  # a dataclass


def append(path: Path, rows: Iterable[Any]) -> None:
    """Adds rows at the end of the file and waits until they are on disk.

    Raises:
        OSError: the file cannot be written.
    """
    row_log.append_lines(path, encoded(rows))


def write_misses(path: Path, misses: Iterable[Miss]) -> None:
    """Replaces the file; if there are no misses, deletes it."""
    if lines := encoded(misses):
        write_whole(path, lines)
    else:
        path.unlink(missing_ok=True)


def read_partial(path: Path, kind: type[Record]) -> list[Record]:
    """Reads a file that may have been cut off, and makes it fit to be appended to.

    A last line without a newline was being written when the process was killed. It is dropped, and
    the file is truncated. If there is no file, there are no rows.
    """
    return row_log.read_partial(
        path, lambda line, place: row_log.parsed_row(kind, line, place, _BEGIN_ANEW), _BEGIN_ANEW
    )


def read_lines(
    file: BinaryIO, path: Path, kind: type[Record], fix: str
) -> tuple[list[Record], int]:
    """The rows of an open file up to its last newline, and how many bytes these have.

    Args:
        path: the file's path, for the error.
        fix: says in the error what the user can do.
    """
    rows: list[Record] = []
    whole = 0
    for row, length in each_line(file, path, kind, fix):
        rows.append(row)
        whole += length
    return rows, whole


def each_line(
    file: BinaryIO, path: Path, kind: type[Record], fix: str
) -> Iterator[tuple[Record, int]]:
    """The rows up to the last newline, one at a time, each with its bytes; see `read_lines`."""
    for number, line in enumerate(bounded_files.lines(file, path, fix), start=1):
        if not line.endswith(b"\n"):
            break
        yield row_log.parsed_row(kind, line, f"{path}, line {number}", fix), len(line)


def encoded(rows: Iterable[Any]) -> bytes:
    """The lines of rows, which are dataclasses."""
    lines = (json.dumps(dataclasses.asdict(row), allow_nan=False) + "\n" for row in rows)
    return "".join(lines).encode()
