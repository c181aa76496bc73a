"""Weights written tensor by tensor: the library's bytes, shards of bounded size, whole or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Model

from qrag_jax.models.files.model_folder import read_tensors
from qrag_jax.models.files.shards import Size, write_shards
from qrag_jax.models.pretrained import load_encoder, save_encoder
from tests.models.conftest import (
    torch_bert,
    torch_qwen3,
    torch_xlm_roberta,
    write_bpe_tokenizer,
    write_unigram_tokenizer,
)

ARRAYS: dict[str, np.ndarray] = {
    "layers.10.ö": np.arange(5, dtype=np.float32),
    "layers.2.w": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "a": np.arange(3, dtype=np.int64),
    "scalar": np.array(3, np.float32),
    "none": np.ones((0, 2), np.float16),
}


def write(folder: Path, arrays: dict[str, np.ndarray], **settings: Any) -> list[str]:
    sizes = {name: Size(array.shape, array.dtype) for name, array in arrays.items()}
    write_shards(folder, sizes, reversed(arrays.items()), **settings)
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_the_librarys_byte_for_byte(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "theirs", metadata={"format": "pt"})
    theirs = (tmp_path / "theirs").read_bytes()
    (tmp_path / "ours").mkdir()
    assert write(tmp_path / "ours", ARRAYS) == ["model.safetensors"]
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == theirs


def test_shards_hold_no_more_than_asked(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.standard_normal(size) for i, size in enumerate((4, 6, 30, 10, 1))}
    names = write(tmp_path, arrays, max_bytes=80)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert names == [
        *(f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)),
        "model.safetensors.index.json",
    ]
    assert [int(index["weight_map"][f"w{i}"][6:11]) for i in range(5)] == [1, 1, 2, 3, 4]
    assert index["metadata"]["total_size"] == 51 * 8
    found = read_tensors(tmp_path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    # What was there in another layout would be read before it, or fill the disk.
    assert write(tmp_path, ARRAYS) == ["model.safetensors"]
    assert write(tmp_path, arrays, max_bytes=10**9) == ["model.safetensors"]
    assert len(write(tmp_path, arrays, max_bytes=100)) == 4  # three shards, their index
    assert sorted(read_tensors(tmp_path)) == sorted(arrays)


def test_what_fails_midway_leaves_the_old_files(tmp_path: Path) -> None:
    write(tmp_path, ARRAYS)
    before = (tmp_path / "model.safetensors").read_bytes()
    sizes = {name: Size(array.shape, array.dtype) for name, array in ARRAYS.items()}

    def broken() -> Iterator[tuple[str, np.ndarray]]:
        yield "a", ARRAYS["a"]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        write_shards(tmp_path, sizes, broken())
    with pytest.raises(ValueError, match="no array came for"):
        write_shards(tmp_path, sizes, [("a", ARRAYS["a"])])
    with pytest.raises(ValueError, match="a is int32"):
        write_shards(tmp_path, sizes, [("a", ARRAYS["a"].astype(np.int32))])
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


# ---------------------------------------------------------------------- whole encoders


def write_words(folder: Path) -> None:
    """A word-level tokenizer with BERT's special tokens."""
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    vocab = {token: i for i, token in enumerate([*special.values(), "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, "[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


FAMILIES = {
    "bert": (torch_bert, write_words),
    "xlm-roberta": (lambda: torch_xlm_roberta(vocab_size=64), write_unigram_tokenizer),
    "qwen3": (lambda: torch_qwen3(vocab_size=264).model, write_bpe_tokenizer),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_goes_round_byte_for_byte(family: str, dtype: Any, tmp_path: Path) -> None:
    make, with_tokenizer = FAMILIES[family]
    model = make().to(dtype)
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    model.save_pretrained(first, max_shard_size="6KB")
    with_tokenizer(first)
    assert len(list(first.glob("*.safetensors"))) > 2
    save_encoder(load_encoder(first), first, second, max_shard_bytes=5000)
    assert len(list(second.glob("*.safetensors"))) > 2
    given, found = read_tensors(first), read_tensors(second)
    assert sorted(found) == sorted(model.state_dict()) == sorted(given)
    for name, array in given.items():
        assert found[name].dtype == array.dtype == str(dtype).removeprefix("torch."), name
        assert found[name].tobytes() == array.tobytes(), name
    # From our own shards into one file, onto themselves, and by Hugging Face.
    save_encoder(load_encoder(second), second, third)
    assert [path.name for path in third.glob("model*")] == ["model.safetensors"]
    save_encoder(load_encoder(second), second, second)
    files = [folder / "model.safetensors" for folder in (second, third)]
    assert files[0].read_bytes() == files[1].read_bytes()
    back = type(model).from_pretrained(third, dtype="auto")
    assert back.dtype == dtype
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_hugging_face_reads_our_shards(tmp_path: Path) -> None:
    model = torch_qwen3(vocab_size=264).model
    model.save_pretrained(tmp_path / "in")
    write_bpe_tokenizer(tmp_path / "in")
    save_encoder(load_encoder(tmp_path / "in"), tmp_path / "in", tmp_path / "out", 5000)
    back = Qwen3Model.from_pretrained(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
