"""Tensors looked into where they lie, and leaves made of them part by part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from qrag_jax.errors import InputError
from qrag_jax.models.files.stored_tensors import StoredLeaf, open_safetensors
from qrag_jax.models.files.weight_names import expected_shapes, stored_params
from qrag_jax.models.trunks.bert import Bert, BertConfig
from qrag_jax.models.trunks.bert_weights import TABLE

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_]


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_as_the_library_wrote_them(dtype: Any, tmp_path: Path) -> None:
    array = (np.arange(24) % 7).reshape(2, 3, 4).astype(dtype)
    given = {"one": array, "scalar": np.array(array[0, 0, 1]), "none": array[:0]}
    save_file({"before": np.ones(3, np.uint8), **given}, tmp_path / "f.safetensors")
    found = open_safetensors(tmp_path / "f.safetensors")
    for name in ("one", "scalar"):
        assert (found[name].dtype, found[name].shape) == (given[name].dtype, given[name].shape)
        assert np.asarray(found[name]).tobytes() == given[name].tobytes()
    assert np.asarray(found["none"]).shape == (0, 3, 4)
    part = found["one"][1:, :2, ::2]
    np.testing.assert_array_equal(part, array[1:, :2, ::2])
    part[...] = 0  # a copy: the file is as it was
    np.testing.assert_array_equal(found["one"][1:, :2, ::2], array[1:, :2, ::2])


def leaves(folder: Path, dtype: Any) -> dict[str, tuple[StoredLeaf, np.ndarray]]:
    """A leaf of each kind, with the array it stands for."""
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.standard_normal((6, 4)).astype(dtype) for i in range(3)}
    save_file(arrays, folder / "f.safetensors")
    found = list(open_safetensors(folder / "f.safetensors").values())
    wide = [array.astype(np.float32) for array in arrays.values()]
    one = np.dtype(np.float32)
    return {
        "kernels": (StoredLeaf(found, True, True, one), np.stack([a.T for a in wide])),
        "stack": (StoredLeaf(found, True, False, one), np.stack(wide)),
        "kernel": (StoredLeaf(found[:1], False, True, one), wide[0].T),
        "table": (StoredLeaf(found[:1], False, False, one), wide[0]),
        "in memory": (StoredLeaf([*arrays.values()], True, True, one), np.stack(wide).mT),
    }


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64])
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


def test_bytes_survive_where_the_dtype_is_kept(tmp_path: Path) -> None:
    # NaNs with a payload, infinities and the smallest numbers too.
    bits = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    save_file({"w": bits.view(ml_dtypes.bfloat16)}, tmp_path / "f.safetensors")
    tensor = open_safetensors(tmp_path / "f.safetensors")["w"]
    leaf = StoredLeaf([tensor], True, True, np.dtype(np.float32)).as_stored()
    assert np.asarray(leaf)[0].T.tobytes() == bits.tobytes()


def big_bert() -> Bert:
    return Bert(BertConfig(2**20, 2**12, 8, 8, 2**14, 512))  # 22 GB


def test_names_and_shapes_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    shapes = expected_shapes(TABLE, big_bert())
    path = tmp_path / "model.safetensors"
    write_hollow(path, shapes)
    tree = stored_params(TABLE, big_bert(), open_safetensors(path), "there")
    words = tree["word_embeddings"]
    assert words.shape == (2**20, 2**12)
    assert not words.read((slice(2**19, 2**19 + 2), slice(None))).any()
    query = tree["layers"]["query"]["kernel"]
    assert query.shape == (8, 2**12, 2**12)
    assert query.read((slice(7, 8), slice(0, 3), slice(None))).shape == (1, 3, 2**12)

    layers = [name for name in shapes if name.startswith("encoder.layer.")]
    bad = {"embeddings.word_embeddings.weight": (2**20, 2**12 + 1)}
    bad |= {name: shape for name, shape in shapes.items() if name not in (*bad, *layers[:60])}
    write_hollow(path, bad)
    with pytest.raises(InputError, match=r"there: the weights do not fit") as caught:
        stored_params(TABLE, big_bert(), open_safetensors(path), "there")
    told = str(caught.value)
    assert told.count("is missing") == 50
    assert told.endswith(" missing; and 11 more.")
    write_hollow(path, bad | {name: shapes[name] for name in layers[1:]})
    with pytest.raises(InputError) as caught:
        stored_params(TABLE, big_bert(), open_safetensors(path), "there")
    assert str(caught.value).count(";") == 1
    assert "has shape (1048576, 4097), expected (1048576, 4096)" in str(caught.value)


def test_a_header_that_lies_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    for entry in (
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
    ):
        text = json.dumps({"w": entry}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
        with pytest.raises(InputError, match=r"f\.safetensors: not a readable safetensors"):
            open_safetensors(path)
