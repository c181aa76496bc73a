"""Sends metrics to one tracker from a thread, so that neither its errors nor its waits reach a run.

What was sent is recorded before it is sent: after a kill a line may be missing in the tracker, but
none is there twice. What is still waiting then is sent by the next start, out of `metrics.jsonl`.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from qrag_jax.runtime import whole_files
from qrag_jax.runtime.trackers import Tracker, without_secrets

MOST_WAITING = 20_000  # lines; a tracker that is away must not fill the memory
_AT_A_TIME = 100  # lines of which the record is written at once
_KEPT = "metrics.jsonl has every line"

Values = Mapping[str, float | str]  # scalars, and texts in Markdown
Line = tuple[int, Values]


@dataclasses.dataclass
class SentRecord:
    """What was sent to a tracker, kept in the run's folder, so that nothing is sent twice.

    Attributes:
        run: what names the run there; "": it has not begun.
        rows: number of rows sent, over all starts.
        steps: the last step sent, by the metric's name. Steps grow, so this says all.
    """

    run: str = ""
    rows: int = 0
    steps: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> SentRecord:
        """That of the file, or a new one if there is none."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def save(self, path: Path) -> None:
        """Writes the file, or raises `OSError`."""
        whole_files.write_whole(path, json.dumps(dataclasses.asdict(self)) + "\n")

    def take(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that were not sent for this step or a later one; they now count as sent."""
        new = {name: value for name, value in values.items() if step > self.steps.get(name, -1)}
        self.steps |= dict.fromkeys(new, step)
        return new


class Sender:
    """Gives lines to a tracker in their order.

    Args:
        name: of the tracker, for what is told.
        begin: begins the run there; called in the thread, with `Tracker.run` of an earlier start.
        path: the record of what was sent.
        tell: takes one sentence for the user.
        earlier: gives the lines of earlier starts; called in the thread.

    Attributes:
        failed: number of lines that could not be sent. The first is told at once.
    """

    def __init__(
        self,
        name: str,
        begin: Callable[[str], Tracker],
        path: Path,
        tell: Callable[[str], None],
        earlier: Callable[[], Iterable[Line]] = tuple,
    ) -> None:
        self._name, self._begin, self._path, self._tell = name, begin, path, tell
        self._earlier = earlier
        self.failed = 0
        self._record = SentRecord.read(path)
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()  # None: the end
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, step: int, values: Values) -> None:
        """Takes a line and returns at once.

        Args:
            step: number of optimizer steps done.
            values: those that are numbers must be finite.
        """
        if not self._thread.is_alive():
            return  # the tracker could not begin, which is told
        if self._lines.qsize() < MOST_WAITING:
            self._lines.put((step, values))
        else:
            self._fail("too many lines are waiting")

    def end(self) -> None:
        """Says that no more lines follow; returns at once."""
        self._lines.put(None)

    def wait(self, seconds: float) -> None:
        """Waits after `end` until all is sent, but only so long; tells what was not sent."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._tell(
                f"{self._name} has not taken all lines after {seconds:.0f} s, and is left; {_KEPT}"
            )
        elif self.failed > 1:
            self._tell(f"{self._name}: {self.failed} lines were not sent; {_KEPT}")

    def _run(self) -> None:
        """The thread. Libraries raise any class of error, and SystemExit, too."""
        try:
            tracker = self._begin(self._record.run)
            self._record.run = tracker.run
            self._record.save(self._path)
            earlier = [*self._earlier()]
        except (Exception, SystemExit) as error:
            self._tell(
                f"{self._name} cannot be used ({_reason(error)}); the training goes on without it, "
                f"{_KEPT}, and the next start sends them"
            )
            return
        for first in range(0, len(earlier), _AT_A_TIME):
            self._send(tracker, earlier[first : first + _AT_A_TIME])
        ended = False
        while not ended:
            lines, ended = self._waiting()
            self._send(tracker, lines)
        try:
            tracker.close()
        except (Exception, SystemExit) as error:
            self._fail(_reason(error))

    def _waiting(self) -> tuple[list[Line], bool]:
        """The next lines, and whether they are the last; waits for one."""
        lines: list[Line] = []
        line = self._lines.get()
        while line is not None:
            lines.append(line)
            if len(lines) == _AT_A_TIME or self._lines.empty():
                return lines, False
            line = self._lines.get()
        return lines, True

    def _send(self, tracker: Tracker, lines: list[Line]) -> None:
        first = self._record.rows
        taken = [(step, self._record.take(step, values)) for step, values in lines]
        taken = [(step, values) for step, values in taken if values]
        self._record.rows += 2 * len(taken)  # a row for scalars, and one for texts
        try:
            if taken:
                self._record.save(self._path)
        except OSError as error:
            # Not sent, because the next start would send them again.
            for _ in taken:
                self._fail(_reason(error))
            return
        for number, (step, values) in enumerate(taken):
            try:
                _write(tracker, first + 2 * number, step, values)
            except (Exception, SystemExit) as error:
                self._fail(_reason(error))

    def _fail(self, why: str) -> None:
        self.failed += 1
        if self.failed == 1:
            self._tell(
                f"{self._name}: a line was not sent ({why}); the training goes on, {_KEPT}, and "
                "further ones are only counted"
            )


def close_all(senders: list[Sender], seconds: float) -> None:
    """Ends all of them at once; waits so long at most."""
    until = time.monotonic() + seconds
    for sender in senders:
        sender.end()
    for sender in senders:
        sender.wait(max(0.0, until - time.monotonic()))


def _write(tracker: Tracker, row: int, step: int, values: Values) -> None:
    scalars = {name: value for name, value in values.items() if not isinstance(value, str)}
    if scalars:
        tracker.write(row, step, scalars)
    for name, value in values.items():
        if isinstance(value, str):
            tracker.write_text(row + 1, step, name, value)


def _reason(error: BaseException) -> str:
    return without_secrets(whole_files.reason(error)).rstrip(".")
