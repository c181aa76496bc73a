"""Logs of one JSON line for each row of a dataclass, which grow part by part."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_files, bounded_json, typed_json
from qrag_jax.runtime.whole_files import write_whole

Row = TypeVar("Row", bound=Any)  # a dataclass


@dataclasses.dataclass(frozen=True)
class RowLog(Generic[Row]):
    """Logs of one kind of rows.

    Attributes:
        kind: the dataclass; its fields are annotated as `typed_json.made` knows them.
        fix: what people should do with a damaged log.
        lost: what they should do if there is no log to read; "": the same.
        ascii: escape all else, so that half surrogate pairs, which models do write, survive.
    """

    kind: type[Row]
    fix: str
    lost: str = ""
    ascii: bool = False

    def write(self, path: Path, rows: Iterable[Row], record: Mapping[str, Any]) -> None:
        """Writes a whole log, and beside it what it depends on.

        Raises:
            OSError: a file cannot be written.
        """
        # The record first: a log without one is nobody's.
        write_whole(path.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
        write_whole(path, "".join(map(self._line, rows)))

    def append(self, path: Path, rows: Iterable[Row]) -> None:
        """Adds rows at the end of a log and waits until they are on disk.

        Raises:
            OSError: the file cannot be written.
        """
        append_lines(path, "".join(map(self._line, rows)).encode())

    def read(self, path: Path) -> list[Row]:
        """Reads a whole log."""
        try:
            with path.open("rb") as file:
                return [
                    self.parsed_row(line, f"{path}, line {number}")
                    for number, line in enumerate(bounded_files.lines(file, path, self.fix), 1)
                ]
        except OSError as error:
            raise InputError(
                f"{path} cannot be read ({error.strerror}); {self.lost or self.fix}."
            ) from None

    def read_parts(self, path: Path, size: int, count: int) -> list[Row]:
        """The rows of the whole parts of a log that may have been cut off; see `resume`."""
        rows = list[Row]()
        return rows[: self.resume(path, size, count, lambda row, number: rows.append(row))]

    def resume(self, path: Path, size: int, count: int, see: Callable[[Row, int], object]) -> int:
        """How many rows the whole parts of a log have that may have been cut off.

        What is behind these is dropped.

        Args:
            size: rows of a part.
            count: rows of a finished log, whose last part may be smaller.
            see: is shown each row and its number; rows are not all in memory.
        """
        if (opened := bounded_files.to_append(path, self.fix)) is None:
            return 0
        ends = [0]  # bytes up to the end of each line
        with opened as file:
            for number, line in enumerate(bounded_files.lines(file, path, self.fix)):
                if not line.endswith(b"\n"):
                    break
                see(self.parsed_row(line, f"{path}, line {number + 1}"), number)
                ends.append(ends[-1] + len(line))
            rows = len(ends) - 1
            whole = rows if rows >= count else rows // size * size
            file.truncate(ends[whole])
        return whole

    def parsed_row(self, line: bytes, place: str) -> Row:
        """One row.

        Args:
            place: file and line, for the error.
        """
        return parsed_row(self.kind, line, place, f"{self.fix}.")

    def _line(self, row: Row) -> str:
        fields = dataclasses.asdict(row)
        return json.dumps(fields, ensure_ascii=self.ascii, allow_nan=False) + "\n"


def append_lines(path: Path, lines: bytes) -> None:
    """Adds lines at the end of a file and waits until they are on disk.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def parsed_row(kind: type[Row], line: bytes, place: str, fix: str) -> Row:
    """One row.

    Args:
        kind: the dataclass.
        place: file and line, for the error.
        fix: says in the error what the user can do.
    """
    try:
        return typed_json.made(kind, bounded_json.parsed(line))
    except ValueError as error:
        raise InputError(f"{place}: is no row of this log ({error}); {fix}") from None


def read_partial(path: Path, parse: Callable[[bytes, str], Row], fix: str) -> list[Row]:
    """Reads a file that may have been cut off, and makes it fit to be appended to.

    A last line without a newline was being written when the process was killed. It is dropped, and
    the file is truncated. If there is no file, there are no rows.

    Args:
        parse: makes a row of a line and its place.
    """
    if (opened := bounded_files.to_append(path, fix)) is None:
        return []
    rows, whole = list[Row](), 0
    with opened as file:
        for number, line in enumerate(bounded_files.lines(file, path, fix), start=1):
            if not line.endswith(b"\n"):
                break
            rows.append(parse(line, f"{path}, line {number}"))
            whole += len(line)
        file.truncate(whole)
        file.flush()
        os.fsync(file.fileno())
    return rows
