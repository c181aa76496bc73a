"""Traces of a few steps: which steps they hold, and that they are written however a loop ends."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.runtime.step_log import PERFETTO_NAME, StepProfile

SQUARE = jax.jit(lambda x: (x @ x).sum())
MATRIX = np.ones((64, 64), np.float32)


def play(folder: Path, traced: int, done: int, until: int, fail_at: int = 0) -> list[str]:
    """A loop as the trainer's, from step `done` + 1 to `until`; the lines said."""
    said: list[str] = []
    running = None
    with StepProfile(folder, traced, done, said.append) as profile:
        for step in range(done + 1, until + 1):
            profile.turn(step, running)
            with profile.step(step):
                running = SQUARE(MATRIX)
                if step == fail_at:
                    raise RuntimeError("broken")
        jax.block_until_ready(running)
    return said


def events(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"plugins/profile/*/{PERFETTO_NAME}")
    found = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event for event in found if "name" in event]


def marked_steps(folder: Path) -> list[int]:
    return sorted(int(e["args"]["step_num"]) for e in events(folder) if e["name"] == "train")


def test_the_steps_after_the_first_two_are_traced(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    (line,) = play(folder, traced=3, done=10, until=20)
    assert marked_steps(folder) == [13, 14, 15]
    assert any("Execute" in event["name"] for event in events(folder))  # on the device
    assert len([*folder.glob("plugins/profile/*/*.xplane.pb")]) == 1  # what TensorBoard reads
    assert line.startswith(f"profile of steps 13 to 15: run tensorboard --logdir={folder}")


def test_an_error_in_a_traced_step_closes_the_trace(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        play(tmp_path, traced=5, done=0, until=9, fail_at=4)
    assert marked_steps(tmp_path) == [3, 4]
    play(tmp_path / "again", traced=1, done=0, until=3)  # JAX traces one thing at a time
    assert marked_steps(tmp_path / "again") == [3]


def test_no_step_to_trace(tmp_path: Path) -> None:
    assert play(tmp_path / "off", traced=0, done=0, until=5) == []
    (line,) = play(tmp_path / "short", traced=3, done=7, until=9)
    assert line.startswith("nothing profiled: ")
    assert not list(tmp_path.iterdir())
