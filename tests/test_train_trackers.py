"""Trackers in a training: refused before anything is computed, or never in its way."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.entry_points import SHARED, STEPS, Commands, metric_lines, refusal

pytestmark = pytest.mark.long


def test_a_tracker_that_cannot_be_used_is_refused(commands: Commands, tmp_path: Path) -> None:
    environment = {
        name: value for name, value in commands.environment.items() if "WANDB" not in name
    } | {"NETRC": str(tmp_path / "none")}
    workdir = tmp_path / "run"
    words = (*SHARED, f"--workdir={workdir}", "--config.log.to=tensorboard,wandb")
    text = refusal(commands.run("train", *words, env=environment))
    installed = importlib.util.find_spec("wandb") is not None
    assert ("set the environment variable WANDB_API_KEY" in text) == installed
    assert ("run pip install 'qrag_jax[wandb]'" in text) != installed
    assert not workdir.exists()


def test_without_tensorboard(finished_run: Path, commands: Commands, tmp_path: Path) -> None:
    """The section may change when a run goes on, and nothing else changes with it."""
    workdir = tmp_path / "run"
    short = [word for word in SHARED if "train.steps" not in word]
    words = (*short, "--config.train.steps=4", f"--workdir={workdir}")
    commands.succeed("train", *words, "--config.log.to=()")
    assert not (workdir / "tensorboard").exists()
    assert [line["step"] for line in metric_lines(workdir) if "train/loss" in line] == [1, 2, 3, 4]
    commands.succeed("train", *words, "--config.log.project=other")
    assert (workdir / "tensorboard").exists()
    assert STEPS > 4  # the shared run is longer, and has the folder by default
    assert (finished_run / "tensorboard").exists()
