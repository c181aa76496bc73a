"""Where training metrics go: `metrics.jsonl` and TensorBoard files in the work folder."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsFloat

from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_files, bounded_json, typed_json
from qrag_jax.runtime.whole_files import replacing

METRICS_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"


class MetricWriter:
    """Writes scalars per optimizer step; a killed and resumed run has no step twice.

    Use as a context manager, in one process only (the first of a multi-host run).

    Args:
        workdir: the run's folder; made if absent.
        resume_step: the step of the checkpoint from which the run resumes. Lines of later steps
            and a line torn by the kill are dropped. TensorBoard is told to hide events from
            `resume_step + 1` on. None for a new run: an old file is moved to `metrics.jsonl.old`.

    Raises:
        InputError: a whole line of the old `metrics.jsonl` is broken.
    """

    def __init__(self, workdir: Path, resume_step: int | None = None) -> None:
        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / METRICS_NAME
        if path.exists():
            if resume_step is None:
                os.replace(path, path.with_name(METRICS_NAME + ".old"))
            else:
                _drop_after(path, resume_step)
        # Unbuffered: when `write` returns, the whole line is in the file, even if a kill follows.
        self._file = path.open("ab", buffering=0)
        self._board = _summary_writer()(
            str(workdir / TENSORBOARD_NAME),
            purge_step=0 if resume_step is None else resume_step + 1,
            flush_secs=20,
            # File names hold whole seconds; a resume in the same second would overwrite a file.
            filename_suffix=f".{time.time_ns()}",
        )

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Adds one line and one TensorBoard scalar per metric.

        Args:
            step: number of optimizer steps done.
            metrics: maps a name, such as `train/loss`, to a scalar (Python, NumPy or JAX). NaN and
                infinities become null in the JSON line. TensorBoard allows only letters, digits
                and `-_./` in names and shows an underscore for anything else.

        Raises:
            ValueError: a metric is named "step".
        """
        if "step" in metrics:
            raise ValueError('a metric cannot be named "step": that is the line\'s own field')
        scalars = {name: float(value) for name, value in metrics.items()}
        record = {"step": int(step)} | {
            name: value if math.isfinite(value) else None for name, value in scalars.items()
        }
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        for name, value in scalars.items():
            self._board.add_scalar(name, value, int(step))

    def write_text(self, step: int, name: str, text: str) -> None:
        """Adds a text in Markdown to TensorBoard."""
        self._board.add_text(name, text, int(step))

    def close(self) -> None:
        """Flushes and closes the files; `write` must not be called any more."""
        self._file.close()
        self._board.close()

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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
    """Lines of a `metrics.jsonl`, oldest first; null becomes NaN, a torn last line is left out.

    The file is not changed, because it may belong to a run in progress.

    Raises:
        InputError: there is no such file, or a whole line is broken.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist: name the folder of a run that has trained")
    return [
        {name: math.nan if value is None else value for name, value in record.items()}
        for _, record in _whole_lines(path)
    ]


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    with path.open("rb") as file:
        fix = "delete that line"
        for number, line in enumerate(bounded_files.lines(file, path, fix), start=1):
            if not line.endswith(b"\n"):
                return
            place = f"{path}, line {number}"
            try:
                record = typed_json.made(dict[str, float | None], bounded_json.parsed(line))
            except bounded_json.BadJSONError:
                raise InputError(f"{place}: is not valid JSON; delete that line") from None
            except ValueError as error:
                raise InputError(f"{place}: has no numbers ({error}); delete that line") from None
            if not isinstance(record.get("step"), int):
                raise InputError(f"{place}: field 'step' is not an integer; delete that line")
            yield line, record


def _drop_after(path: Path, step: int) -> None:
    with replacing(path) as file:
        file.writelines(line for line, record in _whole_lines(path) if record["step"] <= step)
