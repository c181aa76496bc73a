"""A run whose numbers are not finite does not end as if it had learned."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.runtime.run import Run
from qrag_jax.runtime.saved_config import TrainConfig
from qrag_jax.runtime.step_log import PERFETTO_NAME, LogText, NotFinite, StepLog, StepProfile
from tests.entry_points import SHARED, Commands, metric_lines, refusal, saved_state


def test_a_run_that_cannot_learn_stops_and_keeps_what_is_good(
    commands: Commands, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    # The first update moves every weight by about 1e30: no loss is finite from then on.
    result = commands.run(
        "train",
        *SHARED,
        f"--workdir={workdir}",
        "--config.optimizer.learning_rate=1e30",
        "--config.train.max_skipped_steps=6",
    )
    text = refusal(result, status=1)
    assert "not finite in 6 steps in a row, the last of them step 7 (questions " in text
    assert "lower --config.optimizer.learning_rate" in text
    assert result.stdout.count("nothing is learned") == 1
    lines = [line for line in metric_lines(workdir) if "train/loss" in line]
    assert [line["step"] for line in lines][:7] == [*range(1, 8)]
    for line in lines[:7]:
        skipped = line["step"] - 1
        assert line["train/skipped_steps"] == line["train/skipped_in_a_row"] == skipped
        assert (line["train/loss"] is None) == bool(skipped)
        assert line["train/env_steps"] == line["step"] * 16  # time goes on
    # Saved once, at the first checkpoint after the update; the last of them would say no more.
    (saved,) = (workdir / "checkpoints/last").iterdir()
    assert saved.name == "4"
    state = saved_state(workdir, 4)
    assert state["step"] == 4
    assert all(np.isfinite(leaf).all() for leaf in state.values())
    assert max(np.abs(leaf).max() for name, leaf in state.items() if "params" in name) > 1e29
    (best,) = (workdir / "checkpoints/best").iterdir()
    assert best.name == "0"  # what was wrecked is not the best by chance


class Episodes:
    """What the log reads of an experience."""

    waited: ClassVar = {"input": 0.0}
    samples = np.stack([np.arange(11), np.zeros(11, int)], axis=1)

    def counts(self) -> dict[str, float]:
        return {}


@contextlib.contextmanager
def step_log(folder: Path, train: TrainConfig, advice: str = "") -> Iterator[StepLog]:
    told = LogText(lambda numbers: [f"q{n}" for n in numbers], {"loss": ".1f"}, advice)
    with Run.open(folder, 0.0) as run, StepLog(run, train, 0, Episodes(), told) as log:
        yield log


def metrics(skipped: bool) -> dict[str, jnp.ndarray]:
    loss = jnp.float32("nan") if skipped else jnp.float32(1)
    return {"loss": loss, "skipped": jnp.float32(skipped), "env_steps": jnp.float32(1)}


@pytest.mark.parametrize(("steps", "limit", "stops_at"), [(6, 10, 6), (100, 0, None), (100, 3, 3)])
def test_skipped_steps_in_a_row_stop_a_run(
    steps: int, limit: int, stops_at: int | None, tmp_path: Path
) -> None:
    """A short run of nothing but skipped steps stops, too; it is told once, and then flushed."""
    train = TrainConfig(steps=steps, max_skipped_steps=limit, log_every=1000)
    with step_log(tmp_path, train) as log:
        for step in range(1, 15):
            if stops_at is not None and step == stops_at + 1:
                with pytest.raises(NotFinite, match=f"in {stops_at} steps in a row"):
                    log.step(step, metrics(skipped=True))
                log.finish()
                return
            log.step(step, metrics(skipped=True))
        log.finish()
        assert stops_at is None


# ---------------------------------------------------------------------- traces


SQUARE = jax.jit(lambda x: (x @ x).sum())
MATRIX = np.ones((64, 64), np.float32)


def play(folder: Path, traced: int, done: int, until: int, fail_at: int = 0) -> list[str]:
    """A loop as the trainer's, from step `done` + 1 to `until`; the lines said."""
    said: list[str] = []
    running = None
    with contextlib.closing(StepProfile(folder, traced, done, said.append)) as profile:
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
