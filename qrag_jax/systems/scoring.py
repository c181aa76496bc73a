"""What scoring and prediction share: options, whose questions, logs that go on, the summary.

What takes a `StopSignal` raises `Stopped` when a signal came; the same command then goes on with
its log (`resumable`). What plays raises `FeedbackLost` when too many episodes fail.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from ml_collections import ConfigDict
from tqdm import tqdm

from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.evaluators.log_record import is_free
from qrag_jax.metrics.row_log import RowLog, begin, refuse_other
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.runtime.run import log
from qrag_jax.runtime.saved_config import CONFIG_NAME, flat, read_fields
from qrag_jax.runtime.whole_files import log_locks, write_whole

SUMMARY = "summary.json"
ASKED = ("questions.dev", "questions.bridge_seed")  # fields that say what is evaluated on
NOT_KEPT = "its weights are not kept"
PREDICTED = 2**30  # of the draws; each part has the next

Asked = TypeVar("Asked")
Row = TypeVar("Row")


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """What is scored, and where logs and scores are written."""

    checkpoint: str  # "best" or "last"
    samples: int = 0  # number of questions or queries, 0 for all
    sampled: int = 0  # episodes drawn for a question, for pass@k and vote@k, besides the usual
    retrievers: tuple[str, ...] = ()  # of RLVR's tools; (): the run's own
    out: Path | None = None  # folder; None: `eval` in the run's folder
    restart: bool = False  # throw partial logs away


def resumable(play: Callable[[], object], kept: str) -> int:
    """Plays or scores; returns the exit status of the command."""
    try:
        play()
    except Stopped as stopped:
        print(f"{stopped}: stopped, {kept} is kept; give the same command to go on.")
        return 128 + signal.Signals[str(stopped)]
    except FeedbackLost as error:
        reason = str(error).rstrip(".")
        print(f"error: {reason}. Give the same command to go on.", file=sys.stderr)
        return 1
    return 0


def of_others(workdir: Path, given: ConfigDict, parts: Sequence[str]) -> list[str]:
    """The fields of questions that are not as in the run's config, as `config.FIELD`.

    Args:
        given: the config in use.
        parts: beginnings of the names of fields that say what is asked.
    """
    old, new = flat(read_fields(workdir / CONFIG_NAME)), flat(given.to_dict())
    return [
        f"config.{name}"
        for name in sorted(old.keys() | new.keys())
        if name.startswith(tuple(parts))
        and old.get(name) != new.get(name)
        # A free field that one side lacks is the weight of a source that only the other reads.
        and not (is_free(name) and name in old and name in new)
    ]


def are_others(
    workdir: Path, given: ConfigDict, parts: Sequence[str], out: Path | None, form: str = "FOLDER"
) -> bool:
    """Whether other questions than the run's are asked, which need a place of their own."""
    differing = of_others(workdir, given, parts)
    if differing and out is None:
        raise InputError(
            f"what is asked is not the run's own (not as in its config: {', '.join(differing)}); "
            f"give --out={form} for others, since the usual place in {workdir} is for its own."
        )
    return bool(differing)


def write_summary(out: Path, given: ConfigDict, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a summary with its config and date; returns it."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    whole = {"config": given.to_dict(), "date": now, **summary}
    write_whole(out / SUMMARY, json.dumps(whole, indent=1) + "\n")
    return whole


@dataclasses.dataclass(frozen=True)
class PlayedParts(Generic[Asked, Row]):
    """How something is played part by part into a log, so that a play broken off goes on.

    The draws of a row depend on the numbers of its part and of its place there alone. What is
    computed may depend on all of a part, so a log goes on behind its last whole part.
    """

    rows: RowLog[Row]  # writes and reads the log
    asked: Sequence[Asked]  # all of it
    size: int  # asked of a part
    # (a part, number of its first) → the rows of the part, `draws` of each asked
    play: Callable[[Sequence[Asked], int], Sequence[Row]]
    is_of: Callable[[Row, Asked], bool]  # whether a row is of this
    names: tuple[str, str]  # what is asked, such as ("query", "queries")
    draws: int = 1  # rows of each asked

    def into(
        self, log: Path, record: Mapping[str, Any], stop: StopSignal, *, restart: bool
    ) -> None:
        """Plays all that the log lacks."""
        (unit, units), asked, size = self.names, self.asked, self.size

        def check(row: Row, number: int) -> None:
            place = number // self.draws
            if place >= len(asked) or not self.is_of(row, asked[place]):
                raise InputError(f"{log} has other {units}; give --restart to throw it away.")

        with log_locks(log):
            begin(log, dict(record), restart=restart)
            rows = self.rows.resume(log, size * self.draws, len(asked) * self.draws, check)
            done = rows // self.draws
            with tqdm(total=len(asked), initial=done, unit=unit, desc=log.stem) as bar:
                while done < len(asked):
                    stop.check()
                    part = asked[done : done + size]
                    self.rows.append(log, self.play(part, done))
                    done += len(part)
                    bar.update(len(part))


@dataclasses.dataclass(frozen=True)
class Way(Generic[Row]):
    """One way to write queries."""

    name: str  # of its log, such as "last-2140"
    told: str  # what people are told of it
    play: Callable[[], list[Row] | str]  # plays what is asked; a text says why the way is not here
    by_model: bool = True  # whether a model writes
    by: str = ""  # a digest of the weights or the prompt that writes, where these are known before


@dataclasses.dataclass(frozen=True)
class WayLogs(Generic[Row]):
    """The logs of the ways."""

    folder: Path  # that has them
    rows: RowLog[Row]  # writes them
    # Reads the log of a way, and refuses one of others than are asked
    read: Callable[[Path], list[Row]]
    record: Callable[[Way[Row]], dict[str, Any]]  # all that the rows of a way depend on

    def played(
        self, ways: Sequence[Way[Row]], stop: StopSignal, *, restart: bool
    ) -> tuple[dict[str, list[Row]], list[str]]:
        """The rows of each way by what it is called; and why ways are not here, a sentence each."""
        rows, notes = dict[str, list[Row]](), list[str]()
        for number, way in enumerate(ways, start=1):
            path, record = self.folder / f"{way.name}.jsonl", self.record(way)
            if restart:
                path.unlink(missing_ok=True)
            refuse_other(path, record)
            if not path.exists():
                stop.check()
                log(f"{number} of {len(ways)}: {way.told}")  # one may take minutes
                found = way.play()
                if isinstance(found, str):
                    notes.append(f"{way.told} is not here: {found}")
                    continue
                self.rows.write(path, found, record)
            rows[way.told] = self.read(path)
        return rows, notes
