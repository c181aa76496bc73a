"""Plays what is asked part by part into a log, so that a play that was broken off goes on.

The draws of a row depend on the numbers of its part and of its place there alone. What is computed
may depend on all of a part, so a log goes on behind its last whole part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from qrag_jax.errors import InputError
from qrag_jax.metrics import agent_log
from qrag_jax.metrics.row_log import RowLog
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.locks import log_locks

_PREDICTED = 2**30  # of the draws; each part has the next

Asked = TypeVar("Asked")
Row = TypeVar("Row")


@dataclasses.dataclass(frozen=True)
class PlayedParts(Generic[Asked, Row]):
    """How something is played part by part.

    Attributes:
        rows: writes and reads the log.
        asked: all of it.
        size: asked of a part.
        play: (a part, number of its draws) → a row for each of the part.
        is_of: whether a row is of this.
        names: what is asked, such as ("query", "queries").
    """

    rows: RowLog[Row]
    asked: Sequence[Asked]
    size: int
    play: Callable[[Sequence[Asked], int], list[Row]]
    is_of: Callable[[Row, Asked], bool]
    names: tuple[str, str]

    def into(
        self, log: Path, record: Mapping[str, Any], stop: StopSignal, *, restart: bool
    ) -> list[Row]:
        """Plays all that the log lacks; returns all rows.

        Args:
            log: the file, `….jsonl`; the record is kept beside it, as `….json`.
            record: all that the rows depend on.
            stop: looked at between parts.
            restart: throw the log away instead of going on with it.

        Raises:
            Stopped: a signal came; the same call goes on with the log.
        """
        with log_locks(log):
            agent_log.begin(log, dict(record), restart=restart)
            return self._written(log, stop)

    def _written(self, log: Path, stop: StopSignal) -> list[Row]:
        (unit, units), asked, size = self.names, self.asked, self.size
        rows = self.rows.read_parts(log, size, len(asked))
        if len(rows) > len(asked) or not all(map(self.is_of, rows, asked)):
            raise InputError(f"{log} has other {units}; give --restart to throw it away.")
        with tqdm(total=len(asked), initial=len(rows), unit=unit, desc=log.stem) as bar:
            while len(rows) < len(asked):
                stop.check()
                part = asked[len(rows) : len(rows) + size]
                new = self.play(part, _PREDICTED + len(rows) // size)
                self.rows.append(log, new)
                rows += new
                bar.update(len(new))
        return rows
