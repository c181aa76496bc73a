"""RLVR by the commands: a run that is killed and goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from tests.entry_points import Commands, losses, metric_lines, saved_state

pytestmark = pytest.mark.long

TINY = (
    "--config=configs/rlvr.py:tiny",
    "--config.model.tiny.layers=1",
    "--config.model.tiny.copies=False",
    "--config.model.tiny.hidden=32",
    "--config.model.tiny.intermediate=32",
    "--config.tools.turn_tokens=12",
    "--config.train.checkpoint_every=1",
)


@pytest.fixture(scope="module")
def run(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("rlvr") / "run"
    out = commands.succeed("train", *TINY, f"--workdir={workdir}")
    assert "6 steps of imitating 4 scripted demonstrations, then 4 steps of GRPO" in out
    return workdir


def test_what_a_run_leaves(run: Path) -> None:
    lines = metric_lines(run)
    assert [line["step"] for line in lines if "eval/em" in line] == [0, 5, 10]
    assert len(losses(run)) == 10
    returns = [line["step"] for line in lines if "train/return" in line]
    assert returns == [7, 8, 9, 10]
    assert (run / "learning_curve.png").stat().st_size > 10_000
    assert (run / "model" / "tokenizer.json").exists()


def test_a_dry_run_names_the_update_of_each_stage(commands: Commands) -> None:
    out = commands.succeed("train", *TINY, "--dry_run")
    assert "  update by StageSFTConfig: " in out
    assert "  update by TokenGRPOConfig: " in out
    assert "2 programs, each compiled once" in out


@pytest.mark.parametrize(("staleness", "after"), [(0, 4), (1, 7)])
def test_killed_and_gone_on(
    staleness: int, after: int, commands: Commands, run: Path, tmp_path: Path
) -> None:
    """Killed in the stage of imitation, and while episodes are played; the same to the last bit."""
    given = (*TINY, f"--config.tools.staleness={staleness}")
    whole = run
    if staleness:
        whole = tmp_path / "whole"
        commands.succeed("train", *given, f"--workdir={whole}")
    workdir = tmp_path / "killed"
    process = commands.start("train", *given, f"--workdir={workdir}")
    while process.poll() is None and len(losses(workdir)) < after:
        pass
    process.kill()
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    out = commands.succeed("train", *given, f"--workdir={workdir}")
    assert f"resumed {workdir} at step" in out
    one, other = saved_state(workdir, 10), saved_state(whole, 10)
    assert one.keys() == other.keys()
    for name, value in other.items():
        np.testing.assert_array_equal(one[name], value, err_msg=name)
