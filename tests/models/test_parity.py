"""Every family against Hugging Face's in torch, by the figures of the encoders suite."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.models.files.weight_names import expected_shapes
from qrag_jax.models.pretrained import FAMILIES as FAMILIES_BY_TYPE
from qrag_jax.models.pretrained import LoadedEncoder, load_encoder
from tests.support.parity import Figure, equality, hugging_face, stability
from tests.support.small_models import FAMILIES, write_small_model

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("bert", {}),
    ("bert", {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32}),
    ("bert", {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "hidden_act": "gelu_new"}),
    ("xlm-roberta", {}),
    ("xlm-roberta", {"num_hidden_layers": 3, "num_attention_heads": 3, "hidden_size": 24}),
    ("xlm-roberta", {"roberta": True, "type_vocab_size": 2, "hidden_act": "gelu_new"}),
    ("new", {}),
    (  # as gte-large-en-v1.5, whose positions are scaled
        "new",
        {
            "num_hidden_layers": 3,
            "type_vocab_size": 2,
            "rope_scaling": {"type": "ntk", "factor": 2.0},
            "rope_theta": 500.0,
        },
    ),
    (
        "new",
        {
            "type_vocab_size": 0,
            "layer_norm_type": "rms_norm",
            "layer_norm_eps": 1e-5,
            "hidden_act": "silu",
            "num_attention_heads": 4,
            "hidden_size": 32,
            "rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.625},
        },
    ),
    ("modernbert", {}),
    (  # the local layers first, and two global ones at the end, as new files can say
        "modernbert",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "hidden_size": 32,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2,
            "local_attention": 5,
            "norm_eps": 1e-3,
            "hidden_activation": "silu",
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 700.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    ("mpnet", {}),
    ("mpnet", {"num_hidden_layers": 3, "num_attention_heads": 3, "hidden_size": 24}),
    ("nomic_bert", {}),
    (
        "nomic_bert",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "hidden_size": 32,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3", {"tie_word_embeddings": False, "num_hidden_layers": 3, "attention_bias": True}),
    (
        "qwen3",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "rms_norm_eps": 1e-3,
        },
    ),
]


# Of these a family's first model stands for the others by default; packed rows, gradients and
# folders have tests of their own.
FURTHER = ("modernbert", "mpnet", "nomic_bert")


def with_marks(family: str, *sizes: dict[str, Any]) -> Any:
    further = family in FURTHER and sizes != ({},)
    return pytest.param(family, *sizes, marks=[pytest.mark.long] if further else [])


def read(folder: Path) -> tuple[Any, LoadedEncoder]:
    return hugging_face(folder), load_encoder(folder, scale=1.0)


def failures(figures: list[Figure]) -> list[str]:
    return [f"{figure.name}: {figure.value:.1e}" for figure in figures if not figure.holds]


@pytest.mark.parametrize(("family", "sizes"), [with_marks(*case) for case in MODELS], ids=str)
def test_layers_vectors_and_gradients(family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    model, loaded = read(write_small_model(family, tmp_path, **sizes))
    figures = list(equality(model, loaded))
    assert not failures(figures)
    layers, _, gradients = figures
    assert len(layers.details) == 1 + model.config.num_hidden_layers
    table = FAMILIES_BY_TYPE[loaded.model_config["model_type"]].table
    assert gradients.details["parameters"] == len(expected_shapes(table, loaded.encoder.module))


@pytest.mark.parametrize("family", [with_marks(family) for family in FAMILIES])
def test_bfloat16_padding_and_company(family: str, tmp_path: Path) -> None:
    figures = list(stability(*read(write_small_model(family, tmp_path, num_hidden_layers=3))))
    assert not failures(figures)
    for figure in figures[:2]:  # it is bfloat16 that was computed
        assert figure.name.startswith("bfloat16")
        assert figure.value > 1e-9
        assert figure.peer > 1e-9


def test_one_weight_is_seen_from_its_layer_on(tmp_path: Path) -> None:
    model, loaded = read(write_small_model("qwen3", tmp_path))
    params = jax.tree.map(np.copy, loaded.params)
    params["layers"]["down"]["kernel"][1, 3, 5] += 0.01
    layers, vector, gradients = equality(model, dataclasses.replace(loaded, stored=params))
    assert not any(figure.holds for figure in (layers, vector, gradients))
    assert layers.details["after layer 1"] < 1e-5 < layers.details["after layer 2"]


def test_shifted_positions_are_seen(tmp_path: Path) -> None:
    model, loaded = read(write_small_model("xlm-roberta", tmp_path))
    params = jax.tree.map(np.copy, loaded.params)
    params["position_embeddings"] = np.roll(params["position_embeddings"], 1, axis=0)
    layers, *_ = equality(model, dataclasses.replace(loaded, stored=params))
    assert layers.details["embeddings"] > 0.01


def test_genuine_minilm(minilm_folder: Path, capsys: pytest.CaptureFixture) -> None:
    model, loaded = read(minilm_folder)
    figures = [*equality(model, loaded), *stability(model, loaded)]
    assert not failures(figures)
    with capsys.disabled():
        told = ", ".join(f"{figure.name} {figure.value:.1e}" for figure in figures)
        print(f"\nMiniLM beside torch, largest differences: {told}")
