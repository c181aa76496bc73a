"""Qwen3 folders in and out: names, dtypes, what does not fit, and Hugging Face's own vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM, Qwen3Model

from qrag_jax.errors import InputError
from qrag_jax.models.files.weight_names import params_from_tensors, tensors_from_params
from qrag_jax.models.pretrained import load_encoder, save_encoder
from qrag_jax.models.trunks.qwen3 import Qwen3, Qwen3Config
from qrag_jax.models.trunks.qwen3_weights import TABLE
from tests.models.conftest import QWEN_END, numpy_tensors, torch_qwen3, write_bpe_tokenizer

TEXTS = ["the moth", "Which thing is it?", "x"]


def params_of(tensors: dict[str, np.ndarray], model: Qwen3ForCausalLM) -> dict[str, Any]:
    config = Qwen3Config.from_dict(model.config.to_dict(), "test")
    return params_from_tensors(TABLE, Qwen3(config), tensors, "here/model.safetensors")


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return torch_qwen3(vocab_size=264, tie_word_embeddings=False)


def write_model(folder: Path, model: Qwen3ForCausalLM | Qwen3Model) -> Path:
    model.save_pretrained(folder)
    write_bpe_tokenizer(folder)
    return folder


def their_vectors(model: Any, folder: Path, texts: list[str]) -> np.ndarray:
    """Hugging Face's tokenizer, model and last token, one text at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vectors = []
    with torch.no_grad():
        for text in texts:
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            assert tokenizer.decode(ids[0, -1]) == QWEN_END
            hidden = model(input_ids=ids).last_hidden_state[0, -1]
            vectors.append(torch.nn.functional.normalize(hidden, dim=-1).numpy())
    return np.stack(vectors)


def our_vectors(folder: Path, texts: list[str], **settings: Any) -> np.ndarray:
    loaded = load_encoder(folder, scale=1.0, **settings)
    encoder = loaded.encoder
    rows = [
        [*encoder.state_opening, *ids, encoder.sep_id] for ids in loaded.tokenizer.encode(texts)
    ]
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.full((len(rows), max(lengths)), encoder.pad_id, np.int32)
    for place, row in zip(tokens, rows):
        place[: len(row)] = row
    return np.asarray(encoder.embed(loaded.params, tokens, lengths))


@pytest.mark.parametrize("with_head", [True, False])
def test_a_folder_gives_hugging_faces_vectors(with_head, model, tmp_path) -> None:
    folder = write_model(tmp_path, model if with_head else model.model)
    expected = their_vectors(model.model, folder, TEXTS)
    np.testing.assert_allclose(our_vectors(folder, TEXTS), expected, atol=1e-5)
    asked = [f"Instruct: find it\nQuery:{text}" for text in (" the moth", " x")]
    found = our_vectors(folder, [" the moth", " x"], state_prefix="Instruct: find it\nQuery:")
    np.testing.assert_allclose(found, their_vectors(model.model, folder, asked), atol=1e-5)


def test_how_a_qwen3_folder_is_used(model, tmp_path) -> None:
    encoder = load_encoder(write_model(tmp_path, model), chunk_prefix="the").encoder
    assert (encoder.pooling, encoder.normalise, encoder.opening_id) == ("last", True, None)
    assert encoder.sep_id == encoder.pad_id == 258  # the text's end, not the chat turn's
    assert encoder.state_opening == ()
    assert encoder.chunk_opening == (257,)
    other = load_encoder(tmp_path, pooling="mean", normalise=False).encoder
    assert (other.pooling, other.normalise) == ("mean", False)
    with pytest.raises(InputError, match=r"config\.encoder\.pooling is 'max'; use one of mean, l"):
        load_encoder(tmp_path, pooling="max")


def test_an_unknown_architecture_names_the_known_ones(model, tmp_path) -> None:
    folder = write_model(tmp_path, model)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mamba"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InputError, match=r"architecture 'mamba' .* is not supported; .* bert, qwen3"
    ) as error:
        load_encoder(folder)
    assert "\n" not in str(error.value)


def test_a_tokenizer_without_an_end_is_refused(model, tmp_path) -> None:
    folder = write_model(tmp_path, model)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="the tokenizer has no sep_token"):
        load_encoder(folder)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("bias", [False, True])
def test_names_round_trip_bit_for_bit(prefix: str, bias: bool) -> None:
    model = torch_qwen3(attention_bias=bias)
    tensors = numpy_tensors(model.model)
    given = {prefix + name: tensor for name, tensor in tensors.items()}
    given["lm_head.weight"] = np.ones((60, 32), np.float32)
    given[prefix + "layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    back = tensors_from_params(TABLE, params_of(given, model))
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor, err_msg=name)


def test_a_bfloat16_checkpoint_becomes_float32(model, tmp_path) -> None:
    half = torch_qwen3(vocab_size=264).to(torch.bfloat16)
    params = load_encoder(write_model(tmp_path, half)).params
    back = tensors_from_params(TABLE, params)
    for name, tensor in half.model.state_dict().items():
        assert back[name].dtype == np.float32
        np.testing.assert_array_equal(back[name], tensor.float().numpy(), err_msg=name)


def test_a_saved_folder_is_read_by_transformers(model, tmp_path) -> None:
    folder = write_model(tmp_path / "in", model)
    save_encoder(load_encoder(folder), folder, tmp_path / "out")
    back = Qwen3Model.from_pretrained(tmp_path / "out").eval()
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    found = their_vectors(back, tmp_path / "out", TEXTS)
    np.testing.assert_allclose(found, their_vectors(model.model, folder, TEXTS), atol=1e-6)
    np.testing.assert_allclose(our_vectors(tmp_path / "out", TEXTS), found, atol=1e-5)


def test_every_problem_is_listed_at_once() -> None:
    model = torch_qwen3()
    tensors = {f"model.{name}": tensor for name, tensor in numpy_tensors(model.model).items()}
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    del tensors["model.norm.weight"]
    tensors["model.embed_tokens.weight"] = np.ones((61, 32), np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T
    tensors["model.layers.0.self_attn.o_proj.weight"] = np.ones((32, 64), np.int8)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(64, ml_dtypes.bfloat16)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((48, 32), np.float32)
    with pytest.raises(InputError) as caught:
        params_of(tensors, model)
    told = str(caught.value)
    assert told.startswith("here/model.safetensors: the weights do not fit config.json: ")
    assert "model.layers.1.self_attn.q_norm.weight (16,) is missing" in told
    assert "model.norm.weight (32,) is missing" in told
    assert "model.embed_tokens.weight has shape (61, 32), expected (60, 32)" in told
    assert "layers.0.mlp.up_proj.weight has shape (32, 48), expected (48, 32)" in told
    assert "layers.0.self_attn.o_proj.weight is int8, expected a float dtype" in told
    assert "layers.0.self_attn.q_proj.bias (64,) has no place" in told
    assert "layers.2.mlp.up_proj.weight (48, 32) has no place" in told
    assert told.count(";") == 6
