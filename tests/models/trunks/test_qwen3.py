"""Qwen3: what is computed again, stacked parameters, configs (its parity is in test_parity)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from transformers import Qwen3ForCausalLM

from qrag_jax.errors import InputError
from qrag_jax.models.files.weight_names import params_from_tensors
from qrag_jax.models.heads.embedding import LAST, TextEncoder
from qrag_jax.models.trunks.qwen3 import Qwen3, Qwen3Config
from qrag_jax.models.trunks.qwen3_weights import TABLE
from tests.models.conftest import numpy_tensors, torch_qwen3

LENGTHS = np.array([13, 1, 6, 2, 9], np.int32)


def ours(model: Qwen3ForCausalLM, **changes: Any) -> tuple[TextEncoder, Any]:
    """The same model as one of our encoders, with its parameters."""
    config = Qwen3Config.from_dict(model.config.to_dict(), "test")
    module = Qwen3(config)
    params = params_from_tensors(TABLE, module, numpy_tensors(model), "test")
    encoder = TextEncoder(
        module=module,
        width=config.hidden_size,
        max_positions=config.max_position_embeddings,
        opening_id=None,
        sep_id=3,
        pad_id=0,
        scale=1.0,
        pooling=LAST,
        normalise=True,
    )
    return dataclasses.replace(encoder, **changes), params


def rows(lengths: np.ndarray = LENGTHS) -> np.ndarray:
    """Tokens `[B, 13]`, other tokens than padding standing in the padding."""
    return np.random.default_rng(0).integers(1, 60, (len(lengths), 13)).astype(np.int32)


@pytest.mark.parametrize("remat", ["dots", "layers"])
def test_remat_changes_no_gradient(remat: str) -> None:
    encoder, params = ours(torch_qwen3())

    def gradient(encoder: TextEncoder) -> Any:
        def loss(params: Any) -> jax.Array:
            return encoder.embed(params, rows(), LENGTHS)[:, 0].sum()

        return jax.jit(jax.grad(loss))(params)

    again = dataclasses.replace(encoder, module=encoder.module.clone(remat=remat))
    for one, other in zip(
        jax.tree.leaves(gradient(encoder)), jax.tree.leaves(gradient(again)), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_rest_undoes_prepare() -> None:
    encoder, params = ours(torch_qwen3(attention_bias=True))
    module = encoder.module
    back = module.as_stored(module.prepare(params))
    jax.tree.map(np.testing.assert_array_equal, back, params)
    made = jax.eval_shape(module.init_params, jax.random.key(0))
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, made)


def config_dict(**changes: Any) -> dict[str, Any]:
    return torch_qwen3().config.to_dict() | changes


def test_both_spellings_of_theta() -> None:
    old = {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": None}
    assert Qwen3Config.from_dict(config_dict(**old), "test").rope_theta == 5e5
    assert Qwen3Config.from_dict(config_dict(), "test").rope_theta == 1e6


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"use_sliding_window": True}, "windowed attention, which is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "windowed attention"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling of type 'yarn'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters of type"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not 'silu'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
    ],
)
def test_models_that_are_not_computed(changes: Mapping[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        Qwen3Config.from_dict(config_dict(**changes), "here/config.json")
    assert str(caught.value).startswith("here/config.json: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_sizes_are_named() -> None:
    config = config_dict(num_key_value_heads=None)
    del config["hidden_size"]
    with pytest.raises(InputError, match="fields hidden_size, num_key_value_heads are missing"):
        Qwen3Config.from_dict(config, "test")
