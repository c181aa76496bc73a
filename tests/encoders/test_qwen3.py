"""Qwen3 against Hugging Face's in torch: every layer, the pooled vector, every gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from qrag_jax.encoders.packing import Blocks
from qrag_jax.encoders.precision import Precision
from qrag_jax.encoders.qwen3 import Qwen3, Qwen3Config
from qrag_jax.encoders.qwen3_weights import TABLE
from qrag_jax.encoders.ragged import embed_rows
from qrag_jax.encoders.text_encoder import LAST, TextEncoder
from qrag_jax.encoders.weights import params_from_tensors, tensors_from_params
from qrag_jax.errors import InputError
from tests.encoders.conftest import numpy_tensors, torch_qwen3

TOLERANCE = 2e-5
HALF = jnp.dtype(jnp.bfloat16)
LENGTHS = np.array([13, 1, 6, 2, 9], np.int32)
SIZES: list[dict[str, Any]] = [
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False, "num_hidden_layers": 3, "attention_bias": True},
    {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8, "rms_norm_eps": 1e-3},
]


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


def theirs(
    model: Qwen3ForCausalLM, tokens: np.ndarray, lengths: np.ndarray, side: str = "right"
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Every layer's normed hidden states `[B, L, H]` and the last tokens' vectors `[B, H]`."""
    inside = np.arange(tokens.shape[1]) < lengths[:, None]
    if side == "left":
        tokens = np.stack([np.roll(row, -length) for row, length in zip(tokens, lengths)])
        inside = inside[:, ::-1].copy()
    output = model.model(
        input_ids=torch.from_numpy(tokens).long(),
        attention_mask=torch.from_numpy(inside).long(),
        output_hidden_states=True,
    )
    last = -1 if side == "left" else torch.from_numpy(lengths).long() - 1
    pooled = output.last_hidden_state[torch.arange(len(tokens)), last]
    # All but the last come without the final norm.
    states = [model.model.norm(state) for state in output.hidden_states[:-1]]
    return [*states, output.last_hidden_state], torch.nn.functional.normalize(pooled, dim=-1)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_layer_equals_hugging_face(sizes: dict[str, Any]) -> None:
    model = torch_qwen3(**sizes)
    encoder, params = ours(model)
    tokens = rows()
    inside = np.arange(13) < LENGTHS[:, None]
    states, _ = theirs(model, tokens, LENGTHS)
    assert len(states) == model.config.num_hidden_layers + 1
    for depth, expected in enumerate(states):
        if depth == 0:
            continue  # the word table, normed
        shallow = dataclasses.replace(encoder.module.config, num_hidden_layers=depth)
        cut = params | {"layers": jax.tree.map(lambda leaf, n=depth: leaf[:n], params["layers"])}
        found = Qwen3(shallow).hidden_states(cut, tokens, LENGTHS)
        np.testing.assert_allclose(
            np.asarray(found)[inside], expected.detach().numpy()[inside], atol=TOLERANCE
        )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_vectors_and_gradients_equal_hugging_face(sizes: dict[str, Any]) -> None:
    model = torch_qwen3(**sizes)
    encoder, params = ours(model)
    tokens = rows()
    target = np.random.default_rng(1).normal(size=(len(LENGTHS), 32)).astype(np.float32)
    _, expected = theirs(model, tokens, LENGTHS)
    (expected * torch.from_numpy(target)).sum().backward()

    @jax.jit
    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        embedded = encoder.embed(params, tokens, LENGTHS)
        return (embedded * target).sum(), embedded

    (_, embedded), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    np.testing.assert_allclose(embedded, expected.detach(), atol=TOLERANCE)
    found = tensors_from_params(TABLE, gradient)
    parameters = dict(model.model.named_parameters())
    assert set(found) == set(parameters)
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        wanted = parameter.grad.numpy()
        assert np.abs(wanted).max() > 0 or "k_proj.bias" in name, name
        np.testing.assert_allclose(found[name], wanted, atol=TOLERANCE, err_msg=name)


def test_padding_side_and_company_change_no_vector() -> None:
    model = torch_qwen3()
    encoder, params = ours(model)
    tokens = rows()
    embed = jax.jit(encoder.embed)
    together = np.asarray(embed(params, tokens, LENGTHS))
    with torch.no_grad():
        right, left = (theirs(model, tokens, LENGTHS, side)[1] for side in ("right", "left"))
    np.testing.assert_allclose(together, right, atol=TOLERANCE)
    np.testing.assert_allclose(together, left, atol=TOLERANCE)
    for i, length in enumerate(LENGTHS):
        alone = encoder.embed(params, tokens[i : i + 1, :length], LENGTHS[i : i + 1])
        np.testing.assert_allclose(alone[0], together[i], atol=1e-6)
    blocks = Blocks((20, 40), (6, 13), (3.0, 10.0))
    packed, _ = jax.jit(embed_rows, static_argnums=(0, 1))(encoder, blocks, params, tokens, LENGTHS)
    np.testing.assert_allclose(packed, together, atol=1e-6)


@pytest.mark.parametrize(
    "precision", [Precision(HALF, HALF), Precision(jnp.dtype(jnp.float32), HALF)]
)
def test_bfloat16_stays_close(precision: Precision) -> None:
    encoder, params = ours(torch_qwen3(num_hidden_layers=3))
    half = dataclasses.replace(encoder, module=encoder.module.clone(precision=precision))
    exact = np.asarray(encoder.embed(params, rows(), LENGTHS))
    found = half.embed(params, rows(), LENGTHS)
    assert found.dtype == jnp.float32
    cosine = (np.asarray(found) * exact).sum(-1)
    assert cosine.min() > 0.999
    assert cosine.min() < 1 - 1e-9  # it is bfloat16 that was computed


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
    back = module.rest(module.prepare(params))
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
    config = config_dict()
    del config["hidden_size"], config["num_key_value_heads"]
    with pytest.raises(InputError, match="fields hidden_size, num_key_value_heads are missing"):
        Qwen3Config.from_dict(config, "test")
