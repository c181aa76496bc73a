"""Keeps the tries of a query writer in files, part by part, so that a killed play goes on.

A line is a try. A part is written as a whole; what is behind the last whole part is made again, to
the same bits. Beside the file is a record of all that its tries depend on.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.feedback.tries import Try
from qrag_jax.runtime import bounded_files, bounded_json, hosts
from qrag_jax.runtime.saved_config import read_fields
from qrag_jax.runtime.typed_json import made
from qrag_jax.runtime.whole_files import write_whole

_FIX = "delete the file, and its tries are made again"
_LOST = "bring the file back, or begin a new --workdir"  # what made its tries is gone


@dataclasses.dataclass(frozen=True)
class KeptTries:
    """The tries of one hop of one iteration.

    Attributes:
        path: the file, `….jsonl`.
        record: what the tries depend on, as JSON has it.
        can_be_made: whether the weights that make the tries are there.
    """

    path: Path
    record: dict[str, Any]
    can_be_made: bool = True

    @property
    def fix(self) -> str:
        """What to do about a file that cannot be used."""
        return _FIX if self.can_be_made else _LOST

    def begin(self) -> list[list[Try]]:
        """The parts that are there; writes the record of a new file.

        Raises:
            OSError: the folder cannot be written.
        """
        beside = self.path.with_suffix(".json")
        if self.path.exists():
            old = json.loads(json.dumps(read_fields(beside))) if beside.exists() else {}
            differing = sorted(
                name
                for name in {*old, *self.record}
                if old.get(name) != json.loads(json.dumps(self.record.get(name)))
            )
            if differing:
                raise InputError(
                    f"{self.path} was begun with another {', '.join(differing)}; bring that back, "
                    f"or {self.fix}."
                )
            return self._read()

        def write() -> None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(beside, json.dumps(self.record, indent=2) + "\n")

        hosts.first_does(write)
        return []

    def append(self, part: Sequence[Try]) -> None:
        """Adds a part, and waits until it is on disk; of several hosts the first one writes it.

        Raises:
            OSError: the file cannot be written.
        """
        hosts.first_does(lambda: self._append(part))

    def _append(self, part: Sequence[Try]) -> None:
        lines = [json.dumps(each.to_json(), allow_nan=False) for each in part]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in [*lines, json.dumps({"part": len(part)})]))
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> list[list[Try]]:
        """The whole parts; drops what is behind them."""
        parts, part = list[list[Try]](), list[Try]()
        end = place = 0
        if (opened := bounded_files.to_append(self.path, self.fix)) is None:
            return parts
        with opened as file:
            for number, line in enumerate(bounded_files.lines(file, self.path, self.fix), start=1):
                if not line.endswith(b"\n"):
                    break
                place += len(line)
                row = self._row(line, number)
                if isinstance(row, Try):
                    part.append(row)
                    continue
                if row != len(part):
                    raise InputError(
                        f"{self.path}, line {number}: the part has {len(part)} tries, not {row}; "
                        f"{self.fix}."
                    )
                parts.append(part)
                part, end = [], place
            file.truncate(end)
        return parts

    def _row(self, line: bytes, number: int) -> Try | int:
        try:
            found = bounded_json.parsed(line)
            if isinstance(found, dict) and "part" in found:
                return made(int, found["part"])
            return Try.from_json(found)
        except ValueError as error:
            raise InputError(
                f"{self.path}, line {number}: is no try ({error}); {self.fix}."
            ) from None
