"""The episodes of evaluations that a run keeps to be looked at: `episodes.jsonl` in its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qrag_jax.runtime import bounded_files, bounded_json
from qrag_jax.runtime.whole_files import replacing

EPISODES_NAME = "episodes.jsonl"
_FIX = "delete that line"


class EpisodeFile:
    """Writes lines `{"step", "kind", "row"}`; no step is in the file twice, resumed or not.

    Args:
        workdir: the run's folder.
        resume_step: the step of the checkpoint from which the run goes on: lines of later steps,
            and lines that are broken, are dropped. None: a new run; an old file is deleted.
    """

    def __init__(self, workdir: Path, resume_step: int | None = None) -> None:
        self._path = workdir / EPISODES_NAME
        self._last = -1  # the newest step in the file
        if resume_step is None:
            self._path.unlink(missing_ok=True)
        elif self._path.exists():
            self._keep_until(resume_step)

    def write(self, step: int, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds the episodes of an evaluation, in the place of those of its step and later ones.

        Args:
            step: number of optimizer steps done.
            kind: of the rows, one of `evaluators.episode_views.KINDS`.
            rows: JSON objects with finite numbers.

        Raises:
            OSError: the file cannot be written.
        """
        if step <= self._last:  # an evaluation that a resumed run repeats
            self._keep_until(step - 1)
        lines = [
            json.dumps({"step": step, "kind": kind, "row": row}, allow_nan=False) + "\n"
            for row in rows
        ]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        self._last = step

    def _keep_until(self, step: int) -> None:
        kept: list[bytes] = []
        self._last = -1
        for line, found in _whole_lines(self._path):
            if found <= step:
                kept.append(line)
                self._last = max(self._last, found)
        with replacing(self._path) as file:
            file.writelines(kept)


def _whole_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """The lines that are whole, each with its step; this file is of no account, so none stops."""
    with path.open("rb") as file:
        for line in bounded_files.lines(file, path, _FIX):
            try:
                record = bounded_json.parsed(line)
            except bounded_json.BadJSONError:
                continue
            step = record.get("step") if isinstance(record, dict) else None
            if isinstance(step, int) and line.endswith(b"\n"):
                yield line, step
