"""The ways that a run is compared with, each with a log, and what questions they are asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.metrics import agent_log
from qrag_jax.metrics.row_log import RowLog
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import log
from qrag_jax.runtime.saved_config import CONFIG_NAME, flat, read_fields

ASKED = ("questions.dev", "questions.bridge_seed")  # fields that say what is evaluated on


def of_others(workdir: Path, given: ConfigDict, parts: Sequence[str]) -> list[str]:
    """The fields of questions that are not as in the run's config, as `config.FIELD`.

    Args:
        given: the config in use.
        parts: beginnings of the names of fields that say what is asked.
    """
    old, new = flat(read_fields(workdir / CONFIG_NAME)), flat(given.to_dict())
    return [
        f"config.{name}"
        for name in sorted(new)
        if name.startswith(tuple(parts)) and old.get(name) != new[name]
    ]


def check_own_questions(workdir: Path, given: ConfigDict, parts: Sequence[str]) -> None:
    """Refuses other questions than the run's; see `of_others`."""
    if differing := of_others(workdir, given, parts):
        raise InputError(
            f"the questions are not the run's own (not as in its config: {', '.join(differing)}); "
            f"give --out=FOLDER for scores on others, since {workdir / 'eval'} is for its own."
        )


def are_others(workdir: Path, given: ConfigDict, parts: Sequence[str], *, out: Path | None) -> bool:
    """Whether other questions than the run's are scored; see `of_others`.

    Args:
        out: the folder that is named for the scores; None: none is.
    """
    if out is None:
        check_own_questions(workdir, given, parts)
        return False
    return bool(of_others(workdir, given, parts))


NOT_KEPT = "its weights are not kept"

Row = TypeVar("Row")


@dataclasses.dataclass(frozen=True)
class WayOptions:
    """What is scored, and where logs and scores are written.

    Attributes:
        checkpoint: "best" or "last".
        samples: number of questions or queries, 0 for all.
        out: folder; None: `eval` in the run's folder.
        restart: throw logs away.
    """

    checkpoint: str
    samples: int = 0
    out: Path | None = None
    restart: bool = False


@dataclasses.dataclass(frozen=True)
class Way(Generic[Row]):
    """One way to write queries.

    Attributes:
        name: of its log, such as "last-2140".
        told: what people are told of it.
        play: plays what is asked; a text says why the way is not here.
        by_model: whether a model writes.
        by: a digest of the weights or the prompt that writes, where these are known before.
    """

    name: str
    told: str
    play: Callable[[], list[Row] | str]
    by_model: bool = True
    by: str = ""


@dataclasses.dataclass(frozen=True)
class WayLogs(Generic[Row]):
    """The logs of the ways.

    Attributes:
        folder: that has them.
        rows: writes them.
        read: reads the log of a way, and refuses one of others than are asked.
        record: all that the rows of a way depend on.
    """

    folder: Path
    rows: RowLog[Row]
    read: Callable[[Path, Way[Row]], list[Row]]
    record: Callable[[Way[Row]], dict[str, Any]]

    def played(
        self, ways: Sequence[Way[Row]], stop: StopSignal, *, restart: bool
    ) -> tuple[dict[str, list[Row]], list[str]]:
        """The rows of each way by what it is called; and why ways are not here, a sentence each.

        Args:
            restart: throw logs away; else what has one is not played again.

        Raises:
            Stopped: a signal came; logs that are finished stay.
        """
        rows, notes = dict[str, list[Row]](), list[str]()
        for number, way in enumerate(ways, start=1):
            path, record = self.folder / f"{way.name}.jsonl", self.record(way)
            if restart:
                path.unlink(missing_ok=True)
            agent_log.refuse_other(path, record)
            if not path.exists():
                stop.check()
                log(f"{number} of {len(ways)}: {way.told}")  # one may take minutes
                found = way.play()
                if isinstance(found, str):
                    notes.append(f"{way.told} is not here: {found}")
                    continue
                self.rows.write(path, found, record)
            rows[way.told] = self.read(path, way)
        return rows, notes
