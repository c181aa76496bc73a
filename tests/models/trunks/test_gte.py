"""Folders of GTE, in and out: names, scaled positions, what is refused (parity: test_parity)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModel

from qrag_jax.errors import InputError
from qrag_jax.models.adapters import target_modules
from qrag_jax.models.files.model_folder import read_safetensors
from qrag_jax.models.files.weight_names import params_from_tensors, tensors_from_params
from qrag_jax.models.pretrained import load_encoder, save_encoder
from qrag_jax.models.trunks.gte import Gte, GteConfig, frequencies
from qrag_jax.models.trunks.gte_weights import TABLE
from tests.models.conftest import numpy_tensors, torch_gte, write_unigram_tokenizer
from tests.support.torch_gte import NewConfig, cos_sin

AUTO_MAP = {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"}
# The fields of gte-multilingual-base's own config.json that are of the computation.
PUBLISHED: dict[str, Any] = {
    "model_type": "new",
    "attention_probs_dropout_prob": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 8192,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 8.0, "type": "ntk"},
    "rope_theta": 20000,
    "type_vocab_size": 1,
    "unpad_inputs": True,
    "use_memory_efficient_attention": True,
    "vocab_size": 250048,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As published: the weights of a model with a head, whose trunk is called "new"."""
    out = tmp_path / "model"
    model = torch_gte(type_vocab_size=2)
    model.save_pretrained(out)
    tensors = {f"new.{name}": tensor for name, tensor in numpy_tensors(model).items()}
    tensors["classifier.weight"] = np.ones((1, 16), np.float32)
    save_file(tensors, out / "model.safetensors")
    edit_json(out / "config.json", auto_map=AUTO_MAP)
    write_unigram_tokenizer(out)
    return out


def edit_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_published_folder_is_read_and_written(folder: Path, tmp_path: Path) -> None:
    loaded = load_encoder(folder)
    # As Q-RAG uses it, where its folder does not say: the mean, divided by 10.
    encoder = loaded.encoder
    assert (encoder.pooling, encoder.normalise, encoder.scale) == ("mean", False, 0.1)
    assert (encoder.max_positions, encoder.opening_id) == (64, 0)
    save_encoder(loaded, folder, tmp_path / "out")
    model, written = torch_gte(type_vocab_size=2), tmp_path / "out"
    tensors = read_safetensors(written / "model.safetensors")
    assert set(tensors) == set(model.state_dict())
    layer = "encoder.layer.1."
    assert {
        "embeddings.word_embeddings.weight",
        "embeddings.token_type_embeddings.weight",
        "embeddings.LayerNorm.bias",
        *(f"{layer}{name}.weight" for name in ("attention.qkv_proj", "mlp.up_gate_proj")),
        *(f"{layer}{name}.bias" for name in ("attention.o_proj", "mlp.down_proj", "mlp_ln")),
    } <= set(tensors)
    assert f"{layer}mlp.up_gate_proj.bias" not in tensors
    config = json.loads((written / "config.json").read_text())
    assert config["architectures"] == ["NewModel"]
    assert config["auto_map"] == AUTO_MAP
    back = AutoModel.from_pretrained(written)
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_names_round_trip_without_segments() -> None:
    model = torch_gte(type_vocab_size=0, layer_norm_type="rms_norm")
    config = GteConfig.from_dict(model.config.to_dict(), "test")
    tensors = numpy_tensors(model)
    given = tensors | {"embeddings.rotary_emb.inv_freq": np.ones(4, np.float32)}  # a buffer
    back = tensors_from_params(TABLE, params_from_tensors(TABLE, Gte(config), given, "test"))
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor, err_msg=name)


def test_adapters_go_to_maps_by_their_names() -> None:
    linear = ["attention.qkv_proj", "attention.o_proj", "mlp.up_gate_proj", "mlp.down_proj"]
    everything = {f"encoder.layer.{{}}.{name}" for name in linear}
    assert set(target_modules(TABLE, "all-linear").values()) == everything
    some = target_modules(TABLE, ("qkv_proj", "mlp.down_proj"))
    assert set(some) == {("layers", "query_key_value"), ("layers", "down")}


def test_the_published_config_is_computed() -> None:
    config = GteConfig.from_dict(PUBLISHED, "config.json")
    assert (config.longest_row, config.head_dim) == (8192, 64)
    # Q-RAG's run and its makers have rows up to 8192 tokens on a base of 20000 · 8.
    expected = 160_000.0 ** -(np.arange(32) / 32) / 8 ** (1 / 32)
    np.testing.assert_allclose(frequencies(config), expected, rtol=1e-12)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "ntk", "factor": 1.0},
        {"type": "ntk", "factor": 2.0},
        {"type": "ntk", "factor": 4.0, "mixed_b": 0.625},
    ],
    ids=str,
)
def test_positions_turn_as_in_torch(scaling: dict[str, Any] | None) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "rope_theta": 700.0}
    cos, sin = cos_sin(NewConfig(**sizes, rope_scaling=scaling), 50)
    fields = sizes | {"rope_scaling": scaling, "vocab_size": 9, "num_hidden_layers": 1}
    config = GteConfig.from_dict(fields | {"intermediate_size": 4}, "test")
    angle = np.arange(50)[:, None] * frequencies(config)
    np.testing.assert_allclose(np.cos(angle), cos[:, :8], atol=1e-5)
    np.testing.assert_allclose(np.sin(angle), sin[:, :8], atol=1e-5)
    if scaling and scaling["factor"] > 1:  # slower than without, all of them
        plain = GteConfig.from_dict(fields | {"intermediate_size": 4, "rope_scaling": None}, "")
        assert (frequencies(config) < frequencies(plain)).all()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"logn_attention_scale": True}, "logn_attention_scale True is not computed here, only F"),
        ({"pack_qkv": False}, "pack_qkv False is not computed here, only True"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type 'absolute' is not"),
        ({"layer_norm_type": "batch"}, "only 'layer_norm', 'rms_norm'"),
        ({"hidden_act": "swish2"}, "hidden_act 'swish2' is not computed here, only 'gelu', "),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "only type 'ntk' with a factor of"),
        ({"rope_scaling": {"type": "ntk"}}, "rope_scaling {'type': 'ntk'} is not computed here"),
        ({"num_attention_heads": 512}, "does not split into 512 heads of even width"),
        ({"hidden_size": None}, "the fields hidden_size are missing"),
        ({"model_type": "gte"}, "model_type 'gte' is not computed here, only 'new'"),
    ],
)
def test_models_that_are_not_computed(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        GteConfig.from_dict(PUBLISHED | fields, "folder/config.json")
    assert str(caught.value).startswith("folder/config.json: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
