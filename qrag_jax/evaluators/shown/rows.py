"""Reads logs of any kind for people: a broken line is skipped and counted, and stops nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.evaluators import rewrite_log
from qrag_jax.evaluators.episode_sample import AGENTS, CHUNKS, HOPS, REWRITES, TOKENS
from qrag_jax.metrics import agent_log, hop_log, predictions, retrieval_log
from qrag_jax.runtime import bounded_files, bounded_json

SAMPLE, METRICS = "sample", "metrics"  # what else a file may be
_FIX = "name another file"
# Fields that a line of each kind has; the first kind that fits is it.
_FIELDS: dict[str, set[str]] = {
    CHUNKS: {"id", "sf_idx", "pred_idx"},
    TOKENS: {"id", "turns", "trajectory"},
    HOPS: {"id", "pages", "hops"},
    AGENTS: {"id", "golds", "searches"},
    REWRITES: {"id", "original", "outcome"},
    SAMPLE: {"step", "kind", "row"},
    METRICS: {"step"},
}
_PARSERS: dict[str, Callable[[bytes, str], Any]] = {
    CHUNKS: retrieval_log.parsed_row,
    TOKENS: predictions.parsed_row,
    HOPS: hop_log.LOG.parsed_row,
    AGENTS: agent_log.LOG.parsed_row,
    REWRITES: rewrite_log.LOG.parsed_row,
}


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a log holds.

    Attributes:
        kind: one of `episode_sample.KINDS`.
        rows: of the log's class.
        broken: lines that are no row.
        step: of a sample of a training's evaluations: the step; None: the log is no such one.
    """

    kind: str
    rows: list[Any]
    broken: int
    step: int | None = None


def kind_of(path: Path) -> str | None:
    """What a file is, by its first lines: a kind of episodes, `SAMPLE` or `METRICS` or None."""
    for number, line in enumerate(_lines(path)):
        if number == 100:
            break
        record = _object(line)
        for kind, fields in _FIELDS.items():
            if record is not None and fields <= record.keys():
                return kind
    return None


def read_rows(path: Path, kind: str) -> Rows:
    """The rows of a log of this kind; a last line that is still being written is left out."""
    rows, broken = [], 0
    for number, line in enumerate(_lines(path), start=1):
        row = _row(kind, line, f"{path}, line {number}")
        if row is not None:
            rows.append(row)
        elif line.endswith(b"\n"):
            broken += 1
    return Rows(kind, rows, broken)


def read_sample(path: Path) -> list[Rows]:
    """The evaluations in an `episodes.jsonl`, by their steps; broken lines count for the last."""
    found: dict[tuple[int, str], list[Any]] = {}
    broken = 0
    for number, line in enumerate(_lines(path), start=1):
        record = _object(line) or {}
        step, kind, row = record.get("step"), record.get("kind"), None
        if isinstance(step, int) and isinstance(kind, str) and kind in _PARSERS:
            text = bounded_json.as_line(record.get("row"))
            row = _row(kind, text, f"{path}, line {number}")
            if row is not None:
                found.setdefault((step, kind), []).append(row)
        if row is None:
            broken += line.endswith(b"\n")
    groups = sorted(found)
    return [
        Rows(kind, found[step, kind], broken if (step, kind) == groups[-1] else 0, step)
        for step, kind in groups
    ]


def read_lines(path: Path) -> tuple[list[dict[str, float]], int]:
    """The lines of a `metrics.jsonl` with their finite numbers, and how many lines are broken."""
    found: list[dict[str, float]] = []
    broken = 0
    for line in _lines(path):
        record = _object(line)
        if record is None or type(record.get("step")) is not int:
            broken += line.endswith(b"\n")
            continue
        found.append({k: v for k, v in record.items() if type(v) in (int, float)})
    return found, broken


def _row(kind: str, line: bytes, place: str) -> Any | None:
    try:
        return _PARSERS[kind](line, place)
    except InputError:
        return None


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        record = bounded_json.parsed(line)
    except bounded_json.BadJSONError:
        return None
    return record if isinstance(record, dict) else None


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from bounded_files.lines(file, path, _FIX)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); {_FIX}.") from None
