"""Where a training writes: `metrics.jsonl`, `episodes.jsonl`, TensorBoard files; trackers."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

from qrag_jax.errors import InputError
from qrag_jax.runtime import trackers
from qrag_jax.runtime.trackers import Sender, close_all
from qrag_jax.runtime.train_config import TENSORBOARD, LogConfig
from qrag_jax.runtime.whole_files import replacing

METRICS_NAME = "metrics.jsonl"
EPISODES_NAME = "episodes.jsonl"
TENSORBOARD_NAME = "tensorboard"
PATIENCE = 60  # seconds that the end of a training waits for its trackers


@dataclasses.dataclass(frozen=True)
class Logged:
    """Where a training's metrics go, and what trackers are told of it."""

    settings: LogConfig = dataclasses.field(default_factory=LogConfig)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the experiment
    tell: Callable[[str], None] = print  # takes one sentence for the user


class MetricWriter:
    """Writes scalars per optimizer step; a killed and resumed run has no step twice.

    Use as a context manager, in one process only (the first of a multi-host run).

    Args:
        workdir: the run's folder; made if absent.
        resume_step: the step of the checkpoint from which the run resumes. Later lines, and one
            torn by the kill, are dropped; TensorBoard hides later events. None for a new run: an
            old file is moved to `metrics.jsonl.old`.
        logged: where else metrics go. A tracker is first sent the lines that it lacks.
    """

    def __init__(
        self, workdir: Path, resume_step: int | None = None, logged: Logged | None = None
    ) -> None:
        logged = logged or Logged()
        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / METRICS_NAME
        if path.exists():
            if resume_step is None:
                os.replace(path, path.with_name(METRICS_NAME + ".old"))
            else:
                _drop_after(path, resume_step)
        # Unbuffered: when `write` returns, the whole line is in the file, even if a kill follows.
        self._file = path.open("ab", buffering=0)
        self._board = None
        if TENSORBOARD in logged.settings.to:
            self._board = _summary_writer()(
                str(workdir / TENSORBOARD_NAME),
                purge_step=0 if resume_step is None else resume_step + 1,
                flush_secs=20,
                # File names hold whole seconds; a resume in the same second would overwrite a file.
                filename_suffix=f".{time.time_ns()}",
            )
        self._senders = [_sender(name, workdir, logged) for name in logged.settings.trackers]

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Adds one line and one TensorBoard scalar per metric; what is not finite is null.

        Args:
            step: number of optimizer steps done.
            metrics: by names such as `train/loss`; none is "step".
        """
        scalars = {name: float(value) for name, value in metrics.items()}
        record = {"step": int(step)} | {
            name: value if math.isfinite(value) else None for name, value in scalars.items()
        }
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, int(step))
        for sender in self._senders:
            sender.put(int(step), _finite(scalars))

    def write_text(self, step: int, name: str, text: str) -> None:
        """Adds a text in Markdown to TensorBoard and to trackers."""
        if self._board is not None:
            self._board.add_text(name, text, int(step))
        for sender in self._senders:
            sender.put(int(step), {name: text})

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the files, and waits for trackers, but not longer than `PATIENCE`."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        close_all(self._senders, PATIENCE)


def _sender(name: str, workdir: Path, logged: Logged) -> Sender:
    settings, path = logged.settings, workdir / METRICS_NAME
    title, config = settings.name or workdir.resolve().name, trackers.clean(logged.config)

    def begin(kept: str) -> trackers.Tracker:
        return trackers.begin(name, trackers.Start(workdir, settings.project, title, config, kept))

    def earlier() -> Iterator[tuple[int, dict[str, float]]]:
        for record in read_metrics(path):
            yield int(record.pop("step")), _finite(record)

    return Sender(name, begin, workdir / trackers.FOLDER / f"{name}.json", logged.tell, earlier)


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


class EpisodeFile:
    """The episodes of evaluations that a run keeps to be looked at: `episodes.jsonl`.

    Its lines are `{"step", "kind", "row"}`; no step is in the file twice, resumed or not.

    Args:
        workdir: the run's folder.
        resume_step: as `MetricWriter` has it; of a new run an old file is deleted.
    """

    def __init__(self, workdir: Path, resume_step: int | None = None) -> None:
        self._path = workdir / EPISODES_NAME
        self._last = -1  # the newest step in the file
        if resume_step is None:
            self._path.unlink(missing_ok=True)
        elif self._path.exists():
            self._last = _drop_after(self._path, resume_step)

    def write(self, step: int, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds the episodes of an evaluation, in the place of those of its step and later ones.

        Args:
            kind: of the rows, one of `evaluators.evaluation.KINDS`.
            rows: JSON objects with finite numbers.
        """
        if step <= self._last:  # an evaluation that a resumed run repeats
            _drop_after(self._path, step - 1)
        lines = [
            json.dumps({"step": step, "kind": kind, "row": row}, allow_nan=False) + "\n"
            for row in rows
        ]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        self._last = step


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line, json.loads(line)


def _drop_after(path: Path, step: int) -> int:
    """Drops lines of later steps and a torn one; returns the last step that is left, or -1."""
    last = -1
    with replacing(path) as file:
        for line, record in _whole_lines(path):
            if record["step"] <= step:
                file.write(line)
                last = max(last, record["step"])
    return last
