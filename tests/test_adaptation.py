"""A run with adapters, trained, resumed, scored and exported; and one of another family."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from qrag_jax.models.files.stored_tensors import read_safetensors
from qrag_jax.models.pretrained import load_encoder, with_adapters
from tests.entry_points import Commands, assert_same_state, losses, refusal, saved_state

TINY = (
    "--config=configs/hotpotqa.py:tiny",
    "--config.train.steps=3",
    "--config.train.log_every=1",
    "--config.train.checkpoint_every=1",
    "--config.encoder.length_buckets=1",
    "--config.encoder.block_sizes=1",
    "--config.encoder.lora.rank=4",
    "--config.encoder.lora.dropout=0.2",
)


@pytest.fixture(scope="module")
def trained_adapters(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("lora") / "run"
    commands.succeed("train", *TINY, f"--workdir={workdir}")
    return workdir


def test_a_run_saves_adapters_alone(trained_adapters: Path) -> None:
    run = trained_adapters
    assert [step for step, _ in losses(run)] == [1, 2, 3]
    assert np.isfinite([loss for _, loss in losses(run)]).all()
    state = saved_state(run, 3)
    arrays = {name for name, array in state.items() if array.ndim > 0 and name != "key"}
    assert all(name.endswith(("lora_a", "lora_b")) for name in arrays)
    of_params = {name: state[name] for name in arrays if name.startswith("params/")}
    assert len(of_params) == 6 * 2  # BERT's linear maps
    # They have moved from where the run's folder keeps the first ones.
    first = with_adapters(load_encoder(run / "encoder"), run / "encoder" / "adapter")
    for name, array in of_params.items():
        _, _, module, leaf = name.split("/")
        start = first.adapters["layers"][module][leaf]
        assert array.shape == (2, *start.shape)
        assert np.abs(array - start).max() > 1e-5, name


def test_a_run_is_resumed_and_scored_without_dropout(
    trained_adapters: Path, commands: Commands, tmp_path: Path
) -> None:
    again = Path(shutil.copytree(trained_adapters, tmp_path / "run"))
    shutil.rmtree(again / "checkpoints" / "last" / "3")
    assert "at step 2" in commands.succeed("train", *TINY, f"--workdir={again}")
    assert_same_state(again, trained_adapters, 3)
    logs = []
    for out in (tmp_path / "once", tmp_path / "twice"):  # nothing is dropped, nothing drawn
        score = [f"--workdir={again}", "--checkpoint=last", "--samples=4", f"--out={out}"]
        commands.succeed("evaluate", *score)
        logs.append({p.relative_to(out): p.read_text() for p in out.glob("*/*.jsonl")})
    assert logs[0] == logs[1]
    assert len(logs[0]) == 4  # trained or not, in several steps or one
    base, kept = (
        read_safetensors(run / "encoder" / "model.safetensors") for run in (trained_adapters, again)
    )
    jax.tree.map(np.testing.assert_array_equal, kept, base)
    # A folder of adapters is a start for another run, of the same widths.
    start = f"--config.encoder.lora.path={again / 'encoder' / 'adapter'}"
    fresh = ["train", *TINY, start, f"--workdir={tmp_path / 'other'}"]
    assert "encoder.layer.0." in refusal(commands.run(*fresh, "--config.encoder.scratch.hidden=48"))
    wider = refusal(commands.run(*fresh, "--config.encoder.lora.rank=5"))
    assert "config.encoder.lora.rank" in wider
