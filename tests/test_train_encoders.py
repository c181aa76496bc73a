"""A few Q-RAG steps with each further encoder by the user's command, from a folder of its kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qrag_jax.models.pretrained import load_encoder
from tests.entry_points import Commands, losses, saved_state
from tests.support.small_models import training_texts, write_trainable_model

pytestmark = pytest.mark.long

FIELDS = (
    "--config=configs/hotpotqa.py:tiny",
    "--config.train.steps=3",
    "--config.train.log_every=1",
    "--config.train.checkpoint_every=3",
    "--config.encoder.length_buckets=1",
    "--config.encoder.block_sizes=1",
    "--config.encoder.scale=0.1",
)


@pytest.mark.parametrize("family", ["modernbert", "mpnet", "nomic_bert"])
def test_a_few_steps_change_every_parameter(
    family: str, commands: Commands, tmp_path: Path
) -> None:
    folder = write_trainable_model(family, tmp_path / "model", training_texts())
    workdir = tmp_path / "run"
    commands.succeed("train", *FIELDS, f"--config.encoder.path={folder}", f"--workdir={workdir}")
    steps = dict(losses(workdir))
    assert list(steps) == [1, 2, 3]
    assert np.isfinite([*steps.values()]).all()
    start = load_encoder(workdir / "encoder").params
    moved = {}
    for name, array in saved_state(workdir, 3).items():
        if name.startswith("params/"):
            first = start
            for key in name.split("/")[1:]:
                first = first[key]
            moved[name] = np.abs(array - first).max()
    assert moved
    moved.pop("params/layers/key/bias", None)  # it adds the same to all scores of a query
    assert {name for name, change in moved.items() if not change > 1e-6} == set()
