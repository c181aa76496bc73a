"""Tensors read where they lie, and written tensor by tensor: bytes, shards, whole or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from qrag_jax.errors import InputError
from qrag_jax.models.files.stored_tensors import StoredLeaf, open_safetensors, write_shards
from qrag_jax.models.files.weight_names import expected_shapes, stored_params
from qrag_jax.models.pretrained import load_encoder, save_encoder
from qrag_jax.models.trunks.families import BERT_TABLE, Bert, BertConfig
from tests.support.small_models import FAMILIES, read_tensors, torch_trunk

# ---------------------------------------------------------------------- read


def leaves(folder: Path, dtype: Any) -> dict[str, tuple[StoredLeaf, np.ndarray]]:
    """A leaf of each kind, with the array it stands for."""
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.standard_normal((6, 4)).astype(dtype) for i in range(3)}
    save_file(arrays, folder / "f.safetensors")
    found = list(open_safetensors(folder / "f.safetensors").values())
    wide = [array.astype(np.float32) for array in arrays.values()]
    return {
        "kernels": (StoredLeaf(found, True, True), np.stack([a.T for a in wide])),
        "stack": (StoredLeaf(found, True, False), np.stack(wide)),
        "kernel": (StoredLeaf(found[:1], False, True), wide[0].T),
        "table": (StoredLeaf(found[:1], False, False), wide[0]),
        "in memory": (StoredLeaf([*arrays.values()], True, True), np.stack(wide).mT),
    }


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_leaf_gives_any_part(dtype: Any, tmp_path: Path) -> None:
    for name, (leaf, whole) in leaves(tmp_path, dtype).items():
        assert (leaf.shape, leaf.ndim) == (whole.shape, whole.ndim), name
        found = np.asarray(leaf)
        assert found.dtype == np.float32
        assert found.flags.c_contiguous
        assert found.flags.writeable
        np.testing.assert_array_equal(found, whole, err_msg=name)
        for index in ((slice(1, 3), slice(None), slice(0, 2)), (slice(0, 1), slice(2, 4))):
            index = (*index, slice(None))[: whole.ndim]
            np.testing.assert_array_equal(leaf.read(index), whole[index], err_msg=name)
        if leaf.stacked:
            np.testing.assert_array_equal(leaf.layers(1, 3), whole[1:3], err_msg=name)


def write_hollow(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A file of any size that takes no room on the disk: all its tensors are zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def test_names_and_shapes_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    trunk = Bert(BertConfig(2**20, 2**12, 8, 8, 2**14, 512))  # 22 GB
    shapes = expected_shapes(BERT_TABLE, trunk)
    path = tmp_path / "model.safetensors"
    write_hollow(path, shapes)
    tree = stored_params(BERT_TABLE, trunk, open_safetensors(path), "there")
    words, query = tree["word_embeddings"], tree["layers"]["query"]["kernel"]
    assert words.shape == (2**20, 2**12)
    assert not words.read((slice(2**19, 2**19 + 2), slice(None))).any()
    assert query.shape == (8, 2**12, 2**12)
    assert query.read((slice(7, 8), slice(0, 3), slice(None))).shape == (1, 3, 2**12)

    layers = [name for name in shapes if name.startswith("encoder.layer.")]
    bad = {"embeddings.word_embeddings.weight": (2**20, 2**12 + 1)}
    bad |= {name: shape for name, shape in shapes.items() if name not in (*bad, *layers[:60])}
    write_hollow(path, bad)
    with pytest.raises(InputError, match=r"there: .* 11 more"):  # a bounded list
        stored_params(BERT_TABLE, trunk, open_safetensors(path), "there")
    write_hollow(path, bad | {name: shapes[name] for name in layers})
    with pytest.raises(InputError, match=r"there: .*word_embeddings\.weight"):
        stored_params(BERT_TABLE, trunk, open_safetensors(path), "there")


# ---------------------------------------------------------------------- written


def write(folder: Path, arrays: dict[str, np.ndarray], **settings: Any) -> list[str]:
    write_shards(folder, arrays, **settings)
    return sorted(path.name for path in folder.iterdir())


def test_shards_hold_no_more_than_asked(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.standard_normal(size) for i, size in enumerate((4, 6, 30, 10, 1))}
    names = write(tmp_path, arrays, max_bytes=80)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert names == [
        *(f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)),
        "model.safetensors.index.json",
    ]
    assert [int(index["weight_map"][f"w{i}"][6:11]) for i in range(5)] == [2, 2, 1, 3, 4]
    assert index["metadata"]["total_size"] == 51 * 8
    found = read_tensors(tmp_path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    # What was there in another layout would be read before it, or fill the disk.
    assert write(tmp_path, arrays, max_bytes=10**9) == ["model.safetensors"]
    assert len(write(tmp_path, arrays, max_bytes=100)) == 4  # three shards, their index
    assert sorted(read_tensors(tmp_path)) == sorted(arrays)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("bert", torch.float32), ("qwen3", torch.bfloat16)],
)
def test_an_encoder_goes_round_byte_for_byte(family: str, dtype: Any, tmp_path: Path) -> None:
    model = torch_trunk(family).to(dtype)
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    model.save_pretrained(first, max_shard_size="6KB")
    FAMILIES[family][1](first)
    assert len(list(first.glob("*.safetensors"))) > 2
    save_encoder(load_encoder(first), first, second)
    theirs, ours = read_tensors(first), read_tensors(second)
    assert sorted(ours) == sorted(model.state_dict()) == sorted(theirs)
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype == str(dtype).removeprefix("torch."), name
        assert ours[name].tobytes() == array.tobytes(), name
    # Into another folder, onto themselves, and by Hugging Face.
    save_encoder(load_encoder(second), second, third)
    assert [path.name for path in third.glob("model*")] == ["model.safetensors"]
    save_encoder(load_encoder(second), second, second)
    files = [folder / "model.safetensors" for folder in (second, third)]
    assert files[0].read_bytes() == files[1].read_bytes()
    back = type(model).from_pretrained(third, dtype="auto")
    assert back.dtype == dtype
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
