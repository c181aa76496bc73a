"""Dropout in a trunk: torch's own model in training mode with just our masks; where it acts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from qrag_jax.errors import InputError
from qrag_jax.models.compute.attention import padded_attention
from qrag_jax.models.compute.dropout import (
    KEY as LEAF,
)
from qrag_jax.models.compute.dropout import (
    KeptWeights,
    TokenDropout,
    kept_weights,
    with_key,
)
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import TokenRows, embed_rows, pull_back
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.models.pretrained import family_of, load_encoder
from tests.models.conftest import torch_family
from tests.support.parity import gradients_in_files
from tests.support.small_models import write_small_model
from tests.support.torch_encoder import model_options

HIDDEN, ATTENTION = 0.3, 0.2
KEY = jax.random.key(11)
# Rows 1 and 3 are equal; rows 0 and 4 begin alike; row 5 is absent.
TOKENS = np.random.default_rng(0).integers(6, 40, (6, 9)).astype(np.int32)
TOKENS[3], TOKENS[4, :4] = TOKENS[1], TOKENS[0, :4]
LENGTHS = np.array([9, 4, 7, 4, 5, 0], np.int32)
ROWS = int((LENGTHS > 0).sum())
BLOCKS = Blocks((12, 20), (5, 9), (4.0, 8.0))  # rows do not stand where they stand in TOKENS
# Places of a layer by the numbers of their keys, in the order torch's model drops at them.
ORDER = {
    **dict.fromkeys(("bert", "xlm-roberta", "mpnet", "nomic_bert"), (0, 1, 3)),
    "new": (0, 1, 2, 3),
    "modernbert": (0, 1, 2),
}
RATES = {"hidden_dropout_prob": HIDDEN, "attention_probs_dropout_prob": ATTENTION}
RATES_OF_MODERNBERT = {
    **dict.fromkeys(("embedding_dropout", "mlp_dropout"), HIDDEN),
    "attention_dropout": ATTENTION,
}

jitted = jax.jit(embed_rows, static_argnums=(0, 1))
jitted_pull_back = jax.jit(pull_back, static_argnums=(0, 1))


def dropping(encoder: TextEncoder, hidden: float = HIDDEN, attention: float = ATTENTION) -> Any:
    return dataclasses.replace(encoder, dropout=hidden, attention_dropout=attention)


# ---------------------------------------------------------------------- masks by their definition


def mixed(number: np.ndarray) -> np.ndarray:
    number = np.asarray(number, np.uint64) % 2**32
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        number = (number ^ (number >> np.uint64(shift))) * np.uint64(factor) % 2**32
    return number


def digests(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`[B, L]`, of each row's content and the position."""
    of_rows = [
        sum((int(token) + 1) * 0x2C9277B5**i for i, token in enumerate(row[:length])) % 2**32
        for row, length in zip(tokens, lengths, strict=True)
    ]
    position = np.arange(tokens.shape[1], dtype=np.uint64) * 0x9E3779B9
    return (np.array(of_rows, np.uint64)[:, None] + position) % 2**32


def factors(of_tokens: np.ndarray, key: np.ndarray, numbers: np.ndarray, rate: float) -> np.ndarray:
    """0 or 1/(1-p) for tokens `[B, L]` and features of these numbers: `[B, L, …]`."""
    tokens = mixed(of_tokens ^ np.uint64(key[0]))
    features = mixed(np.asarray(numbers, np.uint64) + np.uint64(key[1]))
    drawn = mixed(tokens.reshape(*tokens.shape, *[1] * features.ndim) + features)
    return ((drawn / 2**32 >= rate) / (1 - rate)).astype(np.float32)


def masks(family: str, config: Any) -> Iterator[np.ndarray]:
    """What a model multiplies by, place after place."""
    layers, heads, width = (
        getattr(config, name)
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    keys = np.asarray(jax.random.key_data(jax.random.split(KEY, (layers + 1, 4))))
    of_tokens, length = digests(TOKENS[:ROWS], LENGTHS[:ROWS]), TOKENS.shape[1]
    yield factors(of_tokens, keys[0, 0], np.arange(width), HIDDEN)
    for depth in range(1, layers + 1):
        for place in ORDER[family]:
            if place:
                inner = config.intermediate_size if place == 2 else width
                yield factors(of_tokens, keys[depth, place], np.arange(inner), HIDDEN)
            else:
                numbers = 2**16 * np.arange(heads)[:, None] + np.arange(length)
                of_weights = factors(of_tokens, keys[depth, 0], numbers, ATTENTION)
                yield of_weights.transpose(0, 2, 1, 3)  # [B, heads, query, key]


# ---------------------------------------------------------------------- against torch


@pytest.mark.parametrize(
    "family",
    [  # by default the family that drops at every place
        pytest.param(name, marks=[] if name == "new" else pytest.mark.slow) for name in ORDER
    ],
)
def test_vectors_and_gradients_are_those_of_torch(family, family_bases, monkeypatch) -> None:
    model = torch_family(family)
    config = model.config
    rates = RATES_OF_MODERNBERT if family == "modernbert" else RATES
    model = type(model)(
        type(config)(**(config.to_dict() | rates), attn_implementation="eager"),
        **({} if family == "new" else model_options(family)),
    ).train()
    for name, module in model.named_modules():
        if name.endswith("out_drop"):  # ModernBERT's own has the rate of attention weights
            module.p = HIDDEN
    model.load_state_dict(torch_family(family).state_dict())
    left = masks(family, config)

    def with_our_mask(x, p=0.5, training=True, inplace=False):
        factor = torch.from_numpy(next(left))
        assert training
        assert p == (ATTENTION if x.ndim == 4 else HIDDEN)
        assert x.shape == factor.shape
        return x * factor

    monkeypatch.setattr(torch.nn.functional, "dropout", with_our_mask)
    tokens = torch.tensor(TOKENS[:ROWS], dtype=torch.long)
    inside = torch.arange(TOKENS.shape[1]) < torch.tensor(LENGTHS[:ROWS])[:, None]
    hidden = model(input_ids=tokens, attention_mask=inside.long()).last_hidden_state
    assert next(left, None) is None  # theirs drops nowhere else
    expected = 0.1 * (hidden * inside[..., None]).sum(1) / inside.sum(1)[:, None]

    loaded = family_bases[family]
    encoder, params = dropping(loaded.encoder), with_key(loaded.params, KEY)
    found, _ = jitted(encoder, BLOCKS, params, TokenRows(TOKENS, LENGTHS))
    np.testing.assert_allclose(found[:ROWS], expected.detach().numpy(), atol=1e-5)
    assert (
        np.abs(found - jitted(encoder, BLOCKS, loaded.params, TokenRows(TOKENS, LENGTHS))[0]).max()
        > 1e-2
    )
    np.testing.assert_array_equal(found[1], found[3])  # equal rows, equal masks

    cotangents = np.random.default_rng(1).standard_normal(found.shape).astype(np.float32)
    gradient, _ = jitted_pull_back(encoder, BLOCKS, params, TokenRows(TOKENS, LENGTHS), cotangents)
    (expected * torch.tensor(cotangents[:ROWS])).sum().backward()
    ours = tensors_from_params(family_of(loaded.model_config, "").table, gradient)
    theirs = gradients_in_files(model)
    assert ours.keys() == theirs.keys()
    largest = max(np.abs(wanted).max() for wanted in theirs.values())
    for name, wanted in theirs.items():
        scale = max(np.abs(wanted).max(), 1e-3 * largest)
        np.testing.assert_allclose(ours[name], wanted, atol=1e-4 * scale, err_msg=name)


# ---------------------------------------------------------------------- scale and independence


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_share_of_weights_dropped_is_the_rate(rate: float) -> None:
    rng = np.random.default_rng(0)
    digests = jnp.asarray(rng.integers(2**32, size=40, dtype=np.uint32))
    place = jnp.arange(40).reshape(2, 20)

    @jax.jit
    @jax.vmap
    def draw(key: jax.Array) -> jax.Array:
        keys = jnp.zeros((4, 2), jnp.uint32).at[0].set(key)
        return kept_weights(TokenDropout(digests, keys=keys, attention=rate), place, 3).mask

    kept = np.asarray(draw(rng.integers(2**32, size=(300, 2), dtype=np.uint32)))
    assert kept.shape == (300, 2, 3, 20, 20)
    dropped = ~kept
    assert abs(dropped.mean() - rate) < 5 * (rate * (1 - rate) / kept.size) ** 0.5
    spread = (rate * (1 - rate) / 300) ** 0.5
    assert np.abs(dropped.mean(axis=0) - rate).max() < 6 * spread  # at every place
    for axis in range(5):  # keys, rows, heads, queries and keys are independent
        one, two = (np.take(dropped, range(*ends), axis) for ends in ((0, 1), (1, 2)))
        assert abs((one & two).mean() - rate**2) < 0.01, axis


def test_attention_is_kept_in_the_mean() -> None:
    rng = np.random.default_rng(1)
    query, key, value = rng.standard_normal((3, 2, 5, 2, 4)).astype(np.float32)
    lengths = np.array([5, 3])
    masks = rng.random((4000, 2, 2, 5, 5)) >= 0.4

    @jax.jit
    @jax.vmap
    def attend(mask: jax.Array) -> jax.Array:
        return padded_attention(query, key, value, lengths, kept=KeptWeights(mask, 0.4))

    found = np.asarray(attend(masks), np.float64)
    plain = np.asarray(padded_attention(query, key, value, lengths))
    errors = found.std(axis=0) / 4000**0.5
    for row, length in enumerate(lengths):
        difference = np.abs(found.mean(axis=0) - plain)[row, :length]
        assert (difference <= 6 * errors[row, :length] + 1e-6).all()
        assert errors[row, :length].min() > 1e-4


# ---------------------------------------------------------------------- where it does not act


def test_other_blocks_orders_and_remat_give_the_same(family_bases) -> None:
    loaded = family_bases["bert"]
    encoder, params = dropping(loaded.encoder), with_key(loaded.params, KEY)
    layers = dataclasses.replace(encoder, module=encoder.module.clone(remat="layers"))
    rng = np.random.default_rng(2)
    cotangents, order = rng.standard_normal((6, 16)).astype(np.float32), rng.permutation(6)
    wide, other = (
        np.concatenate([TOKENS, np.full((6, 3), 9, np.int32)], axis=1),
        Blocks((72,), (12,), (12.0,)),
    )
    expected, _ = jitted_pull_back(encoder, BLOCKS, params, TokenRows(TOKENS, LENGTHS), cotangents)
    found, _ = jitted_pull_back(
        layers, other, params, TokenRows(wide[order], LENGTHS[order]), cotangents[order]
    )
    assert LEAF not in expected
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4 * max(np.abs(two).max(), 1e-2))


def test_without_a_key_the_program_is_the_same(family_bases) -> None:
    loaded = family_bases["bert"]
    cotangents = np.ones((6, 16), np.float32)

    def program(encoder: TextEncoder, params: Any) -> str:
        return jitted_pull_back.lower(
            encoder, BLOCKS, params, TokenRows(TOKENS, LENGTHS), cotangents
        ).as_text()

    plain = program(loaded.encoder, loaded.params)
    assert program(dropping(loaded.encoder), loaded.params) == plain
    assert "threefry" not in plain  # which makes the keys of places
    assert "threefry" in program(dropping(loaded.encoder), with_key(loaded.params, KEY))


def test_either_share_alone(family_bases) -> None:
    loaded, found = family_bases["bert"], []
    params = with_key(loaded.params, KEY)
    for shares in ((0.0, 0.0), (HIDDEN, 0.0), (0.0, ATTENTION), (HIDDEN, ATTENTION)):
        found.append(
            jitted(dropping(loaded.encoder, *shares), BLOCKS, params, TokenRows(TOKENS, LENGTHS))[0]
        )
    plain = jitted(loaded.encoder, BLOCKS, loaded.params, TokenRows(TOKENS, LENGTHS))[0]
    np.testing.assert_array_equal(found[0], plain)
    for i in range(4):
        for j in range(i):
            assert np.abs(found[i] - found[j]).max() > 1e-3


def test_a_model_without_dropout_is_refused(tmp_path) -> None:
    folder = write_small_model("qwen3", tmp_path)
    with pytest.raises(
        InputError, match=r"dropout is 0\.1 .* type 'qwen3' have no dropout; set bot"
    ):
        load_encoder(folder, dropout=0.1)
