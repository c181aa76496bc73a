"""The log that all that is evaluated is written to: a JSON line a row, and a record next to it.

A log grows part by part and goes on after a kill. Its record, `<log>.json`, says what all rows
depend on, so that no log has rows of two evaluations. The kinds of rows are in `metrics.rows`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_json, whole_files
from qrag_jax.runtime.saved_config import flat
from qrag_jax.runtime.whole_files import write_whole

Row = TypeVar("Row", bound=Any)  # a dataclass

_FIX = "give --restart, or delete it, to begin again"
_MOST_NAMED = 8  # most differing settings named in one message


@dataclasses.dataclass(frozen=True)
class RowLog(Generic[Row]):
    name: str  # what rows of this kind are called
    kind: type[Row]

    def write(self, path: Path, rows: Iterable[Row], record: Mapping[str, Any]) -> None:
        """Writes a whole log, and next to it what it depends on."""
        # The record first: a log without one is nobody's.
        write_whole(record_path(path), json.dumps(record, indent=1) + "\n")
        self.rewrite(path, rows)

    def rewrite(self, path: Path, rows: Iterable[Row]) -> None:
        write_whole(path, b"".join(map(self._line, rows)))

    def append(self, path: Path, rows: Iterable[Row]) -> None:
        """Adds rows at the end of a log and waits until they are on disk."""
        lines = b"".join(map(self._line, rows))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())

    def read(self, path: Path) -> list[Row]:
        return [*self.each(path)]

    def each(self, path: Path) -> Iterator[Row]:
        """The rows of a log; a last line without an end is still being written, and left out."""
        try:
            with path.open("rb") as file:
                yield from (row for row, _ in self._rows(file, path))
        except OSError as error:
            raise InputError(
                f"{path} cannot be read ({error.strerror}); give a log of {self.name}."
            ) from None

    def _rows(self, file: BinaryIO, path: Path) -> Iterator[tuple[Row, int]]:
        """The rows of whole lines, and how many bytes each has."""
        for number, line in enumerate(whole_files.bounded_lines(file, path, _FIX), 1):
            if not line.endswith(b"\n"):
                break
            yield self.parsed_row(line, f"{path}, line {number}"), len(line)

    def read_partial(self, path: Path) -> list[Row]:
        """Reads a log, and cuts a last line off that was being written when a kill came."""
        rows = list[Row]()
        self.resume(path, 1, sys.maxsize, rows.append)
        return rows

    def resume(
        self, path: Path, size: int, count: int, see: Callable[[Row], object] = lambda row: None
    ) -> int:
        """How many rows the whole parts of a log have that may have been cut off.

        What is behind them is dropped. `see` is shown each row. A part has `size`
        rows; the last one of a finished log, which has `count` rows, may be smaller.
        """
        if not path.exists():
            return 0
        try:
            opened = path.open("rb+")
        except OSError as error:
            raise InputError(f"{path} cannot be opened ({error.strerror}); {_FIX}.") from None
        ends = [0]  # bytes up to the end of each line
        with opened as file:
            for row, size_of_row in self._rows(file, path):
                see(row)
                ends.append(ends[-1] + size_of_row)
            rows = len(ends) - 1
            whole = min(rows if rows >= count else rows // size * size, count)
            file.truncate(ends[whole])
            os.fsync(file.fileno())
        return whole

    def parsed_row(self, line: Any, place: str) -> Row:
        """The row that a line, or what JSON makes of it, holds."""
        try:
            return bounded_json.typed(self.kind, line)
        except ValueError as error:
            raise InputError(f"{place}: is no row of this log ({error}); {_FIX}.") from None

    def to_json(self, row: Row) -> dict[str, Any]:
        return {
            field.metadata.get("alias", field.name): value
            for field, value in zip(dataclasses.fields(row), dataclasses.asdict(row).values())
        }

    def _line(self, row: Row) -> bytes:
        return bounded_json.dumped(self.to_json(row), allow_nan=False) + b"\n"


# ---------------------------------------------------------------------------- records


def record_path(log: Path) -> Path:
    """The file that says what the log was made with: `<log>.json` of `<log>.jsonl`."""
    return log.with_name(f"{log.name.removesuffix('.jsonl')}.json")


def read_record(log: Path) -> dict[str, Any]:
    """What the log was made with; {} if nothing says that."""
    return object_in(record_path(log))


def object_in(path: Path) -> dict[str, Any]:
    try:
        return bounded_json.typed(dict[str, Any], bounded_json.content(path))
    except (OSError, ValueError):
        return {}


def begin(log: Path, record: Mapping[str, Any], *, restart: bool = False) -> None:
    """Keeps the record next to the log, and refuses a log of another one."""
    if restart:
        log.unlink(missing_ok=True)
    _refuse(log, differing(read_record(log), record))
    write_whole(record_path(log), json.dumps(record, indent=1) + "\n")


def refuse_other(log: Path, part: Mapping[str, Any]) -> list[str]:
    """Refuses a log whose record differs in one of these fields; see `begin`.

    Of a log without rows, it returns the differences.
    """
    kept = read_record(log)
    fields = differing({name: kept[name] for name in part if name in kept}, part)
    _refuse(log, fields)
    return fields


def differing(kept: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """Names and values of the fields in which two records differ."""
    # By JSON, so that tuples are lists.
    old, new = (flat(json.loads(json.dumps(r))) for r in (kept, record))
    return [
        f"{name} (was {bounded_json.shown(old.get(name))}, now {bounded_json.shown(new.get(name))})"
        for name in sorted({*old, *new})
        if name not in old or name not in new or old[name] != new[name]
    ]


def _refuse(log: Path, fields: list[str]) -> None:
    if not fields or not log.exists() or not log.stat().st_size:
        return
    why = ", ".join(fields[:_MOST_NAMED]) + ", …" * (len(fields) > _MOST_NAMED)
    if not record_path(log).exists():
        why = f"it has rows, but {record_path(log).name} is missing next to it"
    raise InputError(
        f"{log} was begun with other settings, data or weights: {why}; give --restart or --out."
    )
