"""Loading a model folder: what fits together, and each way in which it does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qrag_jax.errors import InputError
from qrag_jax.models.pretrained import load_encoder
from qrag_jax.models.scratch import ScratchConfig, make_scratch_folder

TEXTS = ["the quick brown fox jumps over the lazy dog"] * 3


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = ScratchConfig(layers=2, hidden=8, heads=2, vocab=60, positions=24)
    make_scratch_folder(folder, TEXTS, sizes, seed=0)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def refusal(folder: Path, **settings: str) -> str:
    with pytest.raises(InputError) as caught:
        load_encoder(folder, **settings)
    text = str(caught.value)
    assert "\n" not in text
    return text


def edit_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_settings_reach_the_encoder(original: Path) -> None:
    loaded = load_encoder(original, "bfloat16", 0.5)
    assert loaded.encoder.scale == 0.5
    assert loaded.encoder.module.precision.products == jnp.bfloat16
    assert loaded.params["word_embeddings"].dtype == np.float32  # parameters stay float32
    assert load_encoder(original).encoder.module.precision.products == jnp.float32
    assert loaded.model_config["hidden_size"] == 8


def test_unknown_dtype(original: Path) -> None:
    text = refusal(original, dtype="float16")
    assert text == "config.encoder.dtype is 'float16'; use one of auto, float32, bfloat16."


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    text = refusal(folder)
    assert f"{folder}: no weights found; looked for model.safetensors" in text


def test_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert f"{folder / 'config.json'}: missing" in refusal(folder)


def test_all_that_is_wrong_with_the_weights_at_once(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.bias"]
    del tensors["embeddings.LayerNorm.weight"]
    tensors["embeddings.position_embeddings.weight"] = np.zeros((20, 8), np.float32)
    save_file(tensors, folder / "model.safetensors")
    text = refusal(folder)
    assert str(folder) in text
    assert "encoder.layer.1.output.dense.bias (8,) is missing" in text
    assert "embeddings.LayerNorm.weight (8,) is missing" in text
    assert "embeddings.position_embeddings.weight has shape (20, 8), expected (24, 8)" in text


def test_broken_weights_file(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert f"{folder / 'model.safetensors'}: not a readable safetensors file" in refusal(folder)


def test_tokenizer_with_more_tokens_than_weights(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    known = len(vocab)
    vocab |= {f"new{i}": known + i for i in range(5)}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    text = refusal(folder)
    assert f"the tokenizer has {known + 5} tokens but the weights hold {known}" in text
    assert "vocab_size in config.json" in text


@pytest.mark.parametrize("token", ["cls_token", "sep_token", "pad_token"])
def test_tokenizer_without_a_special_token(folder: Path, token: str) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings[token]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    text = refusal(folder)
    assert f"the tokenizer has no {token}" in text
    assert "tokenizer_config.json" in text


def test_folder_without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert f"{folder}: " in refusal(folder)


def test_odd_width(folder: Path, tmp_path: Path) -> None:
    edit_json(folder / "config.json", hidden_size=9, num_attention_heads=3)
    assert "hidden_size 9 is odd, but an embedding is read as two halves" in refusal(folder)


def test_config_that_no_encoder_can_have(folder: Path) -> None:
    edit_json(folder / "config.json", num_attention_heads=3)
    text = refusal(folder)
    assert "config.json" in text
    assert "num_attention_heads" in text
