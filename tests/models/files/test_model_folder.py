"""Weights of a folder, sharded or not, and folders named on the hub, fetched by its client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import save_file

from qrag_jax.errors import InputError
from qrag_jax.models.files.model_folder import read_config, resolve_folder
from tests.support.small_models import read_tensors

TENSORS: dict[str, np.ndarray] = {
    "f": np.arange(6, dtype=np.float32).reshape(2, 3),
    "h": np.ones(3, np.float16),
    "b": np.arange(4).astype(ml_dtypes.bfloat16),
    "i": np.arange(4),
}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array)


def torch_tensors() -> dict[str, torch.Tensor]:
    return {
        "f": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "h": torch.ones(3, dtype=torch.float16),
        "b": torch.arange(4).bfloat16(),
        "i": torch.arange(4),
    }


def write_index(path: Path, shards: dict[str, list[str]]) -> None:
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_one_file_of_either_kind(tmp_path: Path) -> None:
    torch.save(torch_tensors(), tmp_path / "pytorch_model.bin")
    assert_same(read_tensors(tmp_path), TENSORS)
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even looked at")
    assert_same(read_tensors(tmp_path), TENSORS)


def test_shards_of_either_kind(tmp_path: Path) -> None:
    shards = {"pytorch_model-1.bin": ["f"], "pytorch_model-2.bin": ["h", "b", "i"]}
    for shard, names in shards.items():
        torch.save({name: torch_tensors()[name] for name in names}, tmp_path / shard)
    write_index(tmp_path / "pytorch_model.bin.index.json", shards)
    assert_same(read_tensors(tmp_path), TENSORS)
    shards = {"model-1.safetensors": ["f", "b"], "model-2.safetensors": ["h", "i"]}
    for shard, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / shard)
    write_index(tmp_path / "model.safetensors.index.json", shards)
    assert_same(read_tensors(tmp_path), TENSORS)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(InputError, match=r"index\.json: .*model-2\.safetensors"):
        read_tensors(tmp_path)
    save_file({"h": TENSORS["h"]}, tmp_path / "model-2.safetensors")
    with pytest.raises(InputError, match=r"index\.json: .* i\b"):
        read_tensors(tmp_path)


def test_broken_weights_and_indices(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model\.safetensors"):
        read_tensors(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    for data in (b"", whole[:-3], b"\xff" * 100):
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"model\.safetensors"):
            read_tensors(tmp_path)
    path.unlink()
    for text in ("{", "[]", "{}"):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(InputError, match=r"index\.json"):
            read_tensors(tmp_path)


def test_local_folders_come_before_hub_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_folder("org/name") == Path("org/name")
    for path in (str(tmp_path / "absent"), "./absent", "name", "a/b/c", "../absent", ""):
        with pytest.raises(InputError, match="folder"):
            resolve_folder(path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, bytes]]:
    """Repositories, whose files the hub's client gives by its own rules of names."""
    repositories: dict[str, dict[str, bytes]] = {}

    def snapshot_download(name: str, *, etag_timeout: float, **patterns: Any) -> str:
        folder = tmp_path / "hub" / name
        for path in filter_repo_objects(repositories[name], **patterns):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(repositories[name][path])
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return repositories


def weights(tmp_path: Path) -> tuple[bytes, bytes]:
    save_file(TENSORS, tmp_path / "x.safetensors")
    torch.save(torch_tensors(), tmp_path / "x.bin")
    return (tmp_path / "x.safetensors").read_bytes(), (tmp_path / "x.bin").read_bytes()


def test_hub_name_fetches_safetensors_and_no_torch_file(
    tmp_path: Path, hub: dict[str, dict[str, bytes]]
) -> None:
    safe, torch_file = weights(tmp_path)
    kept = {"config.json": b'{"hidden_size": 8}', "vocab.txt": b"a", "1_Pooling/config.json": b"{}"}
    left = {"onnx/config.json": b"{}", "README.md": b"text", "run.py": b"print()"}
    both = {"model.safetensors": safe, "pytorch_model.bin": torch_file}
    hub["org/name"] = kept | left | both
    folder = resolve_folder("org/name")
    assert read_config(folder) == {"hidden_size": 8}
    assert_same(read_tensors(folder), TENSORS)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {*kept, "model.safetensors"}
    hub["org/old"] = {"config.json": b"{}", "pytorch_model.bin": torch_file}
    assert_same(read_tensors(resolve_folder("org/old")), TENSORS)
    with pytest.raises(InputError, match="org/absent"):
        resolve_folder("org/absent")
