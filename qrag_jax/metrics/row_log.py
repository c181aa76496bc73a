"""The log that all that is evaluated is written to: a JSON line a row, and a record next to it.

A log grows part by part and goes on after a kill. Its record, `<log>.json`, says what all rows
depend on, so that no log has rows of two evaluations. A row has `failed` if the infrastructure did,
so that nobody knows what the model would have done.
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
from qrag_jax.metrics.answers import INFRASTRUCTURE
from qrag_jax.runtime import bounded_json, whole_files
from qrag_jax.runtime.config_fields import flat
from qrag_jax.runtime.whole_files import write_whole

R = TypeVar("R", bound=Any)  # a dataclass

_FIX = "give --restart, or delete it, to begin again"
_MOST_NAMED = 8  # most differing settings named in one message


@dataclasses.dataclass(frozen=True)
class RowLog(Generic[R]):
    name: str  # what rows of this kind are called
    kind: type[R]

    def write(self, path: Path, rows: Iterable[R], record: Mapping[str, Any]) -> None:
        """Writes a whole log, and next to it what it depends on."""
        # The record first: a log without one is nobody's.
        write_whole(record_path(path), json.dumps(record, indent=1) + "\n")
        self.rewrite(path, rows)

    def rewrite(self, path: Path, rows: Iterable[R]) -> None:
        write_whole(path, b"".join(map(self._line, rows)))

    def append(self, path: Path, rows: Iterable[R]) -> None:
        """Adds rows at the end of a log and waits until they are on disk."""
        lines = b"".join(map(self._line, rows))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())

    def read(self, path: Path) -> list[R]:
        return [*self.each(path)]

    def each(self, path: Path) -> Iterator[R]:
        """The rows of a log; a last line without an end is still being written, and left out."""
        try:
            with path.open("rb") as file:
                yield from (row for row, _ in self._rows(file, path))
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror}); give a log.") from None

    def _rows(self, file: BinaryIO, path: Path) -> Iterator[tuple[R, int]]:
        """The rows of whole lines, and how many bytes each has."""
        for number, line in enumerate(whole_files.bounded_lines(file, path, _FIX), 1):
            if not line.endswith(b"\n"):
                break
            yield self.parsed_row(line, f"{path}, line {number}"), len(line)

    def read_partial(self, path: Path) -> list[R]:
        """Reads a log, and cuts a last line off that was being written when a kill came."""
        rows = list[R]()
        self.resume(path, 1, sys.maxsize, rows.append)
        return rows

    def resume(
        self, path: Path, size: int, count: int, see: Callable[[R], object] = lambda row: None
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

    def parsed_row(self, line: Any, place: str) -> R:
        """The row that a line, or what JSON makes of it, holds."""
        try:
            return bounded_json.typed(self.kind, line)
        except ValueError as error:
            raise InputError(f"{place}: is no row of this log ({error}); {_FIX}.") from None

    def to_json(self, row: R) -> dict[str, Any]:
        return {
            field.metadata.get("alias", field.name): value
            for field, value in zip(dataclasses.fields(row), dataclasses.asdict(row).values())
        }

    def _line(self, row: R) -> bytes:
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
    raise InputError(f"{log} has other settings, data or weights: {why}; give --restart or --out.")


# ---------------------------------------------------------------- kinds of rows


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What a retriever of chunks did on one sample: a row of a retrieval log."""

    id: str
    question: str
    answer: str
    sf_idx: list[int]  # indices of the supporting facts in the document; empty if nobody knows them
    pred_idx: list[int]  # indices of the chunks taken, in the order taken; may be empty
    q_values: list[float]  # of each at its step; empty if they were not played (the filter `gt`)
    sf_texts: list[str]
    pred_texts: list[str]
    # discounted return; None: it would be that of the facts
    ret: float | None = dataclasses.field(default=None, metadata={"alias": "return"})
    text_len: int = 0
    f1: float | None = None
    em: float | None = None
    # Other right answers, or the other values that are asked for
    aliases: list[str] = dataclasses.field(default_factory=list)
    source: str = ""  # see `Sample`; "" if nobody knows it


RETRIEVALS = RowLog("chunks", Row)


def log_name(seed: int, num_chunks: int | None = None) -> str:
    return f"eval_seed{seed}{'' if num_chunks is None else f'_ns{num_chunks}'}.jsonl"


def read_retrievals(path: Path, *, needs_facts: bool = True) -> list[Row]:
    """The rows, one at least, of a retrieval log that a user names."""
    rows = RETRIEVALS.read(path)
    if not rows:
        raise InputError(f"{path} holds no row; give a log of `qrag evaluate`.")
    for number, row in enumerate(rows, start=1):
        if needs_facts and not row.sf_idx:
            raise InputError(f"{path}, line {number}: 'sf_idx' is empty; facts are needed.")
    return rows


# ---------------------------------------------------------------------------- answers


@dataclasses.dataclass(frozen=True)
class AnswerRow:
    id: str
    question: str
    answers: list[str]
    prediction: str  # the answer extracted from `text`
    text: str  # the model's whole text
    em: float
    f1: float
    rule: str
    chunks: list[int]  # indices of the chunks for the prompt, in its order, cut ones included
    cut_chunks: int  # number of chunks, from the first on, that were left out whole
    cut_characters: int
    version: str  # version of the model's weights, "" if unknown
    finish_reason: str  # as the server reported it
    hops: int  # number of facts that the answer needs
    type: str


@dataclasses.dataclass(frozen=True)
class VerdictRow:
    id: str
    prediction: str
    right: bool
    text: str  # the judge's
    version: str


@dataclasses.dataclass(frozen=True)
class Miss:
    """A question without an answer, or an answer without a verdict."""

    id: str
    cause: str  # a short word; misses are counted by cause
    message: str
    attempts: int
    hops: int
    type: str

    @property
    def failed(self) -> bool:
        return self.cause in INFRASTRUCTURE


ANSWERS = RowLog("answers", AnswerRow)
VERDICTS = RowLog("verdicts", VerdictRow)
MISSES = RowLog("misses", Miss)


# ---------------------------------------------------------------------------- agents


@dataclasses.dataclass(frozen=True)
class AgentRow:
    """How an agent answered one question."""

    id: str
    question: str
    golds: tuple[str, ...]
    answer: str  # the agent's; "" if it gave up or broke
    broken: str  # why the episode has no answer; "": it has one
    em: float  # 0 without an answer; nothing if the episode `failed`
    f1: float
    recall: float | None  # share of the gold passages that were found; None: the corpus lacks some
    searches: tuple[Mapping[str, Any], ...]  # `[hop]`, each with `query`, `names` and `status`
    right: int | None = None  # exactly right ones of the sampled episodes; None: one, greedily
    sampled: int = 0

    @property
    def failed(self) -> bool:
        return self.broken in INFRASTRUCTURE


@dataclasses.dataclass(frozen=True)
class RewardRow:
    """The rewards of an agent's episodes of one training question."""

    id: str
    question: str
    mean: float | None  # of the rewards; None if there is none
    std: float | None  # their standard deviation, that of n and not of n − 1; None if there is none
    rewards: list[float | None]  # of each episode; None: it broke, or could not be scored
    scored: int
    broken: list[str]  # why the others have none, in their order
    kept: bool  # whether `std` is above the threshold


AGENTS = RowLog("agents", AgentRow)
REWARDS = RowLog("rewards", RewardRow)  # of `qrag filter_data`


# ---------------------------------------------------------------------------- query writers


@dataclasses.dataclass(frozen=True)
class Hop:
    query: str  # "" if there was none
    outcome: str  # what came of it, or the cause of a failure; "" if no model wrote it
    pool: tuple[str, ...]  # ids of the passages found so far, in the pool's order
    scores: Mapping[str, float]  # of this pool
    read: int = 0
    sampled: int = 0
    found: tuple[tuple[str, float], ...] = ()  # passages of a model's query and scores, best first


@dataclasses.dataclass(frozen=True)
class Searched:
    """How one question was searched for."""

    id: str
    question: str
    answers: tuple[str, ...]
    pages: tuple[str, ...]  # keys of its gold pages
    hops: tuple[Hop, ...]  # as many, with the same scores, in all rows of a log
    source: str = ""
    gold: tuple[str, ...] = ()  # a passage of each gold page: found first, or the first of all
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of these and the last pool

    @property
    def failed(self) -> bool:
        return any(hop.outcome in INFRASTRUCTURE for hop in self.hops)


@dataclasses.dataclass(frozen=True)
class RewriteRow:
    """One query, rewritten in one way."""

    id: str  # unique within its collection
    collection: str  # "" where there is one without a name
    original: str
    query: str  # what was searched for; "" if there is none
    outcome: str = ""  # of `queries.REWRITE_OUTCOMES`, or why it failed; "": no model wrote it
    text: str = ""  # what the model wrote
    found: tuple[tuple[str, float], ...] | None = ()
    sampled: int = 0
    grades: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of judged documents

    @property
    def failed(self) -> bool:
        return self.outcome in INFRASTRUCTURE

    @property
    def ranking(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.found or ())


HOPS = RowLog("hops", Searched)
REWRITES = RowLog("rewrites", RewriteRow)


# ---------------------------------------------------------------------------- token policies

TOOL_EPISODES = "predictions of episodes with tools"  # `kind` in the record of such a file
# Parts of a reward and counts that every scored episode has.
OF_PARTS = ("em", "f1", "recall", "precision", "citation", "citation_precision", "format")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One episode of a language model with tools, with all of its tokens."""

    id: str
    question: str
    answers: list[str]
    hops: int
    draw: int  # number of the episode among those of its question, from 0
    prediction: str
    reward: float | None  # None: the episode failed, so it has no reward
    # Of each turn of the model, `segment` (its number), `observed` (the text before it), `sampled`
    # (what it said), and the texts of the tokens of both, `observed_tokens` and `sampled_tokens`
    turns: list[dict]
    trajectory: dict  # of `rollouts.trajectories.TokenTrajectory.to_json`

    @property
    def parts(self) -> Mapping[str, float]:
        return self.trajectory["parts"]


PREDICTIONS = RowLog("tokens", Prediction)


def scored_episodes(path: Path) -> list[Prediction]:
    """The episodes of a file, with what scores need alone: files of all tokens are large."""
    rows = list[Prediction]()
    for row in PREDICTIONS.each(path):
        kept = {name: row.trajectory[name] for name in ("status", "parts")}
        kept["facts"] = {"tally": row.trajectory["facts"]["tally"]}
        rows.append(dataclasses.replace(row, turns=[], trajectory=kept))
    return rows
