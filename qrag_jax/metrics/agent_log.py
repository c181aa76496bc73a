"""The log of an agent's episodes: one JSON line per question, resumable after a kill."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.metrics.answers import INFRASTRUCTURE
from qrag_jax.metrics.bootstrap import mean_interval
from qrag_jax.metrics.row_log import RowLog
from qrag_jax.runtime.saved_config import read_fields
from qrag_jax.runtime.whole_files import write_whole

_RESTART = "pass --restart, or delete the log, to begin anew"


@dataclasses.dataclass(frozen=True)
class AgentRow:
    """How one question was answered.

    Attributes:
        id, question: of the data set.
        golds: right answers.
        answer: the agent's; "" if it gave up or broke.
        broken: why the episode has no answer; "": it has one.
        em, f1: of the answer; 0 if there is none. Where the episode `failed`, they tell nothing.
        recall: share of the gold passages that were found; None: the corpus lacks some.
        searches: `[hop]`, each with `query`, `names` and `status`.
        right: of several sampled episodes, how many answers are exactly right; None: there was one,
            searched greedily.
        sampled: number of these episodes that have not failed.
    """

    id: str
    question: str
    golds: tuple[str, ...]
    answer: str
    broken: str
    em: float
    f1: float
    recall: float | None
    searches: tuple[Mapping[str, Any], ...]
    right: int | None = None
    sampled: int = 0

    @property
    def failed(self) -> bool:
        """Whether the infrastructure broke the episode, so that nobody knows its answer."""
        return self.broken in INFRASTRUCTURE


LOG = RowLog(AgentRow, _RESTART)


def begin(log: Path, record: dict[str, Any], *, restart: bool) -> None:
    """Keeps the record beside the log, and refuses a log of another one.

    Args:
        log: named `….jsonl`.
        record: all that the log's rows depend on, as JSON has it.
        restart: throw the log away.

    Raises:
        OSError: the folder cannot be written.
    """
    if restart:
        log.unlink(missing_ok=True)
    refuse_other(log, record)
    log.parent.mkdir(parents=True, exist_ok=True)
    write_whole(log.with_suffix(".json"), json.dumps(record, indent=2) + "\n")


def refuse_other(log: Path, part: dict[str, Any]) -> None:
    """Refuses a log whose record differs in one of these fields; see `begin`."""
    if log.exists() and not has_record(log, part):
        raise InputError(
            f"{log} was begun with other settings, data or weights; give --restart to throw "
            "it away, or another --out."
        )


def has_record(log: Path, part: dict[str, Any]) -> bool:
    """Whether the record beside the log, which may be absent yet, has these fields."""
    beside = log.with_suffix(".json")
    kept = json.loads(json.dumps(read_fields(beside))) if beside.exists() else {}
    return all(name in kept and kept[name] == value for name, value in part.items())


def append(path: Path, rows: Iterable[AgentRow]) -> None:
    """Adds rows at the end of the log and waits until they are on disk.

    Raises:
        ValueError: a number is not finite; nothing is written.
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    LOG.append(path, rows)


def read_partial(path: Path) -> list[AgentRow]:
    """Reads a log that may have been cut off, and makes it fit to be appended to."""
    return LOG.read_parts(path, 1, sys.maxsize)


def summarised(rows: Sequence[AgentRow]) -> dict[str, Any]:
    """Means with 95 % bootstrap intervals over the questions.

    What the model broke has EM and F1 0 and is counted as `broken`; what `failed` is left out and
    counted. Recall is of those whose gold passages are all in the corpus.
    """
    kept = [row for row in rows if not row.failed]
    columns: dict[str, list[float]] = {
        "em": [row.em for row in kept],
        "f1": [row.f1 for row in kept],
        "recall": [row.recall for row in kept if row.recall is not None],
        "hops": [float(len(row.searches)) for row in kept],
    }
    counts = {"broken": sum(bool(row.broken) for row in kept), "failed": len(rows) - len(kept)}
    summary: dict[str, Any] = {"questions": len(rows), **counts}
    summary |= {f"{name}_share": count / max(len(rows), 1) for name, count in counts.items()}
    for name, values in columns.items():
        if values:
            mean, low, high = mean_interval(values)
            summary[name] = {"mean": mean, "low": low, "high": high}
    return summary


def pass_at(k: int, right: int, sampled: int) -> float:
    """The chance that one of k episodes is right, estimated without bias from `sampled` of them.

    `1 − C(n − c, k) / C(n, k)` (Chen et al., arXiv 2107.03374, eq. 1).

    Raises:
        ValueError: fewer than k were sampled.
    """
    if sampled < k:
        raise ValueError(f"pass@{k} needs {k} episodes, not {sampled}")
    missed = 1.0
    for i in range(k):
        missed *= max(sampled - right - i, 0) / (sampled - i)
    return 1.0 - missed
