"""Where a training writes: `metrics.jsonl`, `episodes.jsonl`, TensorBoard files; trackers."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

from qrag_jax.errors import InputError
from qrag_jax.runtime.saved_config import TENSORBOARD, LogConfig
from qrag_jax.runtime.whole_files import replacing

METRICS_NAME = "metrics.jsonl"
EPISODES_NAME = "episodes.jsonl"
PATIENCE = 60  # seconds that the end of a training waits for its trackers


class Logged(NamedTuple):
    """Where a training's metrics go, and what trackers get of it."""

    settings: LogConfig = LogConfig()
    config: Mapping[str, Any] = {}
    tell: Callable[[str], None] = print  # takes one sentence for the user


class MetricWriter:
    """Writes scalars per optimizer step; a killed and resumed run has no step twice.

    For one process (the first of a multi-host run), which closes it.

    Args:
        workdir: the run's folder; made if absent.
        resume_step: the step of the checkpoint from which the run resumes. Later lines, and one
            torn by the kill, are dropped; TensorBoard hides later events. None for a new run: old
            files are moved to `metrics.jsonl.old` and `episodes.jsonl.old`.
        logged: where else metrics go. A tracker is first sent the lines that it lacks.
    """

    def __init__(
        self, workdir: Path, resume_step: int | None = None, logged: Logged | None = None
    ) -> None:
        settings, config, tell = logged or Logged()
        workdir.mkdir(parents=True, exist_ok=True)
        path, self._episodes = workdir / METRICS_NAME, workdir / EPISODES_NAME
        for each in (path, self._episodes):
            if resume_step is not None:
                _drop_after(each, resume_step)
            elif each.exists():
                os.replace(each, each.with_name(f"{each.name}.old"))
        # Unbuffered: when `write` returns, the whole line is in the file, even if a kill follows.
        self._file = path.open("ab", buffering=0)
        self._board = None
        if TENSORBOARD in settings.to:
            self._board = _summary_writer()(
                str(workdir / TENSORBOARD),
                purge_step=0 if resume_step is None else resume_step + 1,
                flush_secs=20,
                # File names hold whole seconds; a resume in the same second would overwrite a file.
                filename_suffix=f".{time.time_ns()}",
            )
        self._senders = []
        if settings.trackers:
            from qrag_jax.runtime.trackers import senders

            def earlier() -> Iterator[tuple[int, dict[str, float]]]:
                for record in read_metrics(path):
                    yield int(record.pop("step")), _finite(record)

            self._senders = senders(settings, workdir, config, tell, earlier)

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Adds one line and one TensorBoard scalar per metric; what is not finite is null."""
        scalars = {name: float(value) for name, value in metrics.items()}
        known = _finite(scalars)
        record = {"step": int(step)} | {name: known.get(name) for name in scalars}
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, int(step))
        for sender in self._senders:
            sender.put(int(step), known)

    def write_episodes(
        self, step: int, kind: str, rows: Sequence[Mapping[str, Any]], text: str
    ) -> None:
        """Keeps episodes of an evaluation, in the place of those of its step and later ones.

        Args:
            kind: of the rows, one of `evaluators.evaluation.KINDS`.
            rows: JSON objects with finite numbers; lines of `episodes.jsonl` are
                `{"step", "kind", "row"}`.
            text: the same in Markdown, for TensorBoard and trackers.
        """
        _drop_after(self._episodes, step - 1)  # a resumed run repeats an evaluation
        with self._episodes.open("a", encoding="utf-8") as file:
            for row in rows:
                line = {"step": step, "kind": kind, "row": row}
                file.write(json.dumps(line, allow_nan=False) + "\n")
        if self._board is not None:
            self._board.add_text("episodes", text, int(step))
        for sender in self._senders:
            sender.put(int(step), {"episodes": text})

    def close(self) -> None:
        """Closes the files, and waits for trackers, but not longer than `PATIENCE`."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._senders:
            from qrag_jax.runtime.trackers import close_all

            close_all(self._senders, PATIENCE)


def _finite(scalars: Mapping[str, float]) -> dict[str, float]:
    """What is not finite has no place in a tracker's charts."""
    return {name: value for name, value in scalars.items() if math.isfinite(value)}


def _summary_writer() -> Any:
    """The class, imported without torch.

    tensorboardX imports torch where it is installed. That takes seconds and serves only torch's
    tensors, which are never written here.
    """
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hidden:
            del sys.modules["torch"]
    return SummaryWriter


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Lines of a `metrics.jsonl`, oldest first; null becomes NaN, a torn last line is left out."""
    if not path.is_file():
        raise InputError(f"{path} does not exist: name the folder of a run that has trained")
    return [
        {name: math.nan if value is None else value for name, value in record.items()}
        for _, record in _whole_lines(path)
    ]


def has_evaluation(workdir: Path) -> bool:
    """Whether a run's metrics hold an evaluation of trained weights, and not only of the first."""
    path = workdir / METRICS_NAME
    rows = read_metrics(path) if path.is_file() else []
    return any(row["step"] > 0 and any(name.startswith("eval/") for name in row) for row in rows)


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line, json.loads(line)


def _drop_after(path: Path, step: int) -> None:
    """Drops lines of later steps and a torn one, if there is such a file."""
    if path.exists():
        with replacing(path) as file:
            file.writelines(line for line, found in _whole_lines(path) if found["step"] <= step)
