"""A run with adapters, by its commands: trained, resumed, scored; and the settings refused."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from configs import hotpotqa
from qrag_jax.errors import InputError
from qrag_jax.models.adapters import LoraConfig
from qrag_jax.models.compute.lora import Adapted, merge
from qrag_jax.models.files.model_folder import read_safetensors
from qrag_jax.models.pretrained import FAMILIES, load_encoder, with_adapters
from qrag_jax.systems.q_rag_config import QRagConfig
from qrag_jax.systems.towers_export import scaled_norm
from tests.entry_points import Commands, losses, refusal, saved_state

pytestmark = pytest.mark.long

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
def trained(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("lora") / "run"
    commands.succeed("train", *TINY, f"--workdir={workdir}")
    return workdir


def test_a_run_saves_adapters_alone(trained: Path) -> None:
    steps = dict(losses(trained))
    assert list(steps) == [1, 2, 3]
    assert np.isfinite([*steps.values()]).all()
    state = saved_state(trained, 3)
    arrays = {name for name, array in state.items() if array.ndim > 0 and name != "key"}
    assert arrays
    assert all(name.endswith(("lora_a", "lora_b")) for name in arrays)
    of_params = {name: state[name] for name in arrays if name.startswith("params/")}
    assert len(of_params) == 6 * 2  # BERT's linear maps
    # They have moved from where the run's folder keeps the first ones.
    first = with_adapters(load_encoder(trained / "encoder"), trained / "encoder" / "adapter")
    for name, array in of_params.items():
        _, _, module, leaf = name.split("/")
        start = first.adapters["layers"][module][leaf]
        assert array.shape == (2, *start.shape)
        assert np.abs(array - start).max() > 1e-5, name


def test_a_run_is_resumed_and_scored(trained: Path, commands: Commands, tmp_path: Path) -> None:
    base = read_safetensors(trained / "encoder" / "model.safetensors")
    again = tmp_path / "run"
    stopped = [*TINY, f"--workdir={again}"]
    stopped[1] = "--config.train.steps=3"
    _copy_until(trained, again, step=2)
    told = commands.succeed("train", *stopped)
    assert "at step 2" in told
    resumed, whole = saved_state(again, 3), saved_state(trained, 3)
    assert resumed.keys() == whole.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(resumed[name], array, err_msg=name)
    logs = []
    for out in (tmp_path / "once", tmp_path / "twice"):  # nothing is dropped, nothing drawn
        score = [f"--workdir={again}", "--checkpoint=last", "--samples=4", f"--out={out}"]
        told = commands.succeed("evaluate", *score)
        assert "last checkpoint of step 3" in told
        logs.append({p.relative_to(out): p.read_text() for p in out.glob("*/*.jsonl")})
    assert logs[0] == logs[1]
    assert len(logs[0]) == 4  # trained or not, in several steps or one
    for name, array in read_safetensors(again / "encoder" / "model.safetensors").items():
        np.testing.assert_array_equal(array, base[name], err_msg=name)
    # A folder of adapters is a start for another run; one of another width is told at once.
    start = f"--config.encoder.lora.path={again / 'encoder' / 'adapter'}"
    fresh = ["train", *TINY, start, f"--workdir={tmp_path / 'other'}"]
    told = refusal(commands.run(*fresh, "--config.encoder.scratch.hidden=48"))
    assert "made for another base, since encoder.layer.0." in told
    told = refusal(commands.run(*fresh, "--config.encoder.lora.rank=5"))
    assert "config.encoder.lora.rank is 5, but the adapters of" in told


def test_a_run_is_exported(trained: Path, commands: Commands, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = (f"--workdir={trained}", f"--out={out}", "--checkpoint=last")
    names = ["adapter-chunk", "adapter-state", "chunk", "state", "README.md", "retriever.json"]
    told = commands.succeed("export", *arguments)
    assert told.splitlines() == [str(out / name) for name in names]
    base, state = load_encoder(trained / "encoder"), saved_state(trained, 3)
    for number, tower in enumerate(("state", "chunk")):
        alone = with_adapters(base, out / f"adapter-{tower}")
        assert alone.lora == LoraConfig(4, 16.0, alone.lora.targets, 0.2)
        for module, leaves in alone.adapters["layers"].items():
            for leaf, array in leaves.items():
                saved = state[f"params/layers/{module}/{leaf}"][number]
                np.testing.assert_array_equal(array, saved, err_msg=f"{module}/{leaf}")
        merged = merge(Adapted(base.params, alone.adapters), alone.lora.scale)
        # The exported towers hold the scale of their vectors in the last norm.
        whole = scaled_norm(merged, FAMILIES["bert"].last_norm, base.encoder.scale)
        assert base.encoder.scale == 0.1
        jax.tree.map(np.testing.assert_array_equal, load_encoder(out / tower).params, whole)
    card = (out / "README.md").read_text()
    assert "adapters merged in (rank 4, alpha 16)" in card
    assert (out / "adapter-state" / "README.md").read_text() == card


def _copy_until(run: Path, out: Path, step: int) -> None:
    """The run as it was when it had saved so many steps."""
    import shutil

    shutil.copytree(run, out)
    for folder in (out / "checkpoints" / "last").iterdir():
        if folder.name.isdigit() and int(folder.name) > step:
            shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("dropout", 1.0, r"dropout is 1\.0; it is the share .* from 0 to below 1"),
        ("dropout", -0.1, "dropout is -0.1; it is"),
        ("dropout", float("nan"), "dropout is nan"),
        ("rank", -1, "rank is -1 and alpha 16.0"),
        ("alpha", 0.0, "rank is 4 and alpha 0.0"),
    ],
)
def test_settings_without_sense_are_refused(field: str, value: float, told: str) -> None:
    config = hotpotqa.get_config("tiny")
    config.encoder.lora.rank = 4
    config.encoder.lora[field] = value
    with pytest.raises(InputError, match=told):
        QRagConfig.of(config)


def test_dropout_without_adapters_is_refused() -> None:
    config = hotpotqa.get_config("tiny")
    config.encoder.lora.dropout = 0.1
    with pytest.raises(InputError, match=r"dropout is 0\.1, but there are no adapters .* set"):
        QRagConfig.of(config)


def test_without_rank_there_are_no_adapters() -> None:
    config = hotpotqa.get_config("tiny")
    assert QRagConfig.of(config).encoder.lora.sizes is None
