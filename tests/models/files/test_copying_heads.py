"""Heads set by hand: what they attend to, and that a model with random weights copies by them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.models.compute.packing import padded_layout
from qrag_jax.models.compute.rope import rotate_halves
from qrag_jax.models.files.copying_heads import with_copying_heads
from qrag_jax.models.trunks.qwen3 import Qwen3, Qwen3Config
from qrag_jax.models.trunks.trunk import LAYERS, WORDS, Params

DEFAULT = Qwen3Config(
    vocab_size=1024,
    hidden_size=192,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    intermediate_size=512,
    head_dim=32,
    max_position_embeddings=1024,
    rope_theta=1e8,
    tie_word_embeddings=True,
)
SMALL = dataclasses.replace(
    DEFAULT, num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=1
)
LENGTH = 80  # of a random text, which is then repeated


def params_of(config: Qwen3Config, *, copies: bool = True) -> Params:
    params = jax.tree.map(np.asarray, jax.jit(Qwen3(config).init_params)(jax.random.key(3)))
    return with_copying_heads(params, config, 5) if copies else params


def repeated(config: Qwen3Config, texts: int) -> np.ndarray:
    """`[texts, 2 · LENGTH]`."""
    once = np.random.default_rng(0).integers(0, config.vocab_size, (texts, LENGTH))
    return np.concatenate([once, once], axis=1)


def share_copied(params: Params, config: Qwen3Config) -> float:
    """Of tokens in the second half, those that are the likeliest behind what stands before."""
    tokens, trunk = repeated(config, 8), Qwen3(config)
    layout = padded_layout(jnp.full(len(tokens), 2 * LENGTH), 2 * LENGTH)
    words = params[WORDS]
    hidden = trunk.apply({"params": trunk.prepare(params)}, words[tokens.reshape(-1)], layout)
    found = np.asarray((hidden @ words.T).argmax(axis=-1)).reshape(tokens.shape)
    return float((found[:, LENGTH:-1] == tokens[:, LENGTH + 1 :]).mean())


def attention(params: Params, config: Qwen3Config, layer: int, x: np.ndarray, head: int):
    """`[T, T]` of one head, by the definition."""
    leaves, d = jax.tree.map(lambda leaf: leaf[layer], params[LAYERS]), config.head_dim
    group = head // (config.num_attention_heads // config.num_key_value_heads)
    normed = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)
    angles = np.arange(len(x))[:, None] * config.frequency
    sides = []
    for name, place in (("query", head), ("key", group)):
        side = normed @ leaves[name]["kernel"][:, place * d : (place + 1) * d]
        side = side / np.sqrt((side**2).mean(axis=-1, keepdims=True) + 1e-6)
        side = side * leaves[f"{name}_norm"]["scale"]
        sides.append(np.asarray(rotate_halves(side[:, None], np.cos(angles), np.sin(angles)))[:, 0])
    scores = sides[0] @ sides[1].T / np.sqrt(d)
    scores = np.where(np.tril(np.ones_like(scores)) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_heads_of_the_first_layer_look_back_by_their_offset(offset: int) -> None:
    params = params_of(DEFAULT)
    x = params[WORDS][repeated(DEFAULT, 1)[0]]
    weights = attention(params, DEFAULT, 0, x, head=offset - 1)
    places = np.arange(offset, len(x))
    assert weights[places, places - offset].mean() > 0.7
    np.testing.assert_array_equal(weights[places].argmax(axis=-1), places - offset)


@pytest.mark.parametrize(("config", "least"), [(DEFAULT, 0.8), (SMALL, 0.5)])
def test_a_random_text_is_copied_when_it_comes_again(config: Qwen3Config, least: float) -> None:
    assert share_copied(params_of(config), config) > least
    assert share_copied(params_of(config, copies=False), config) < 0.05


def test_shapes_and_types_stay_and_the_seed_decides() -> None:
    plain, params = params_of(SMALL, copies=False), params_of(SMALL)
    assert jax.tree.structure(plain) == jax.tree.structure(params)
    for one, two in zip(jax.tree.leaves(plain), jax.tree.leaves(params), strict=True):
        assert one.shape == two.shape
        assert one.dtype == two.dtype == np.float32
    again, other = with_copying_heads(plain, SMALL, 5), with_copying_heads(plain, SMALL, 6)
    np.testing.assert_array_equal(again[WORDS], params[WORDS])
    assert not np.array_equal(other[WORDS], params[WORDS])
