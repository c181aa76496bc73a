"""First weights of a small decoder that can copy already: an induction head, set by hand.

    config.model.tiny.weights = "examples/copying_heads.py:with_copying_heads"

A model that answers by what it reads must copy names that it has never seen. Trained models do this
by induction heads (Olsson et al., arXiv 2209.11895): a first layer tells each token which tokens
stand before it; a second layer looks for an earlier place with the same tokens before it, and
predicts what stood there. To learn this from nothing takes millions of tokens more than to use it.
So a tiny model begins with it, in its first two layers, and training does the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.models.trunks.families import Qwen3Config
from qrag_jax.models.trunks.transformer import LAYERS, WORDS, Params

_LEAST_LAYERS, _LEAST_HIDDEN = 2, 16
_OFFSETS = 3  # so many tokens before each one are compared, if there are as many heads
# Of the likeness of two places: by the token itself, and what each token further back counts.
_FADING = 0.6
_WORD_SIZE = 0.1  # standard deviation of a token's numbers
_CONSTANT = 0.3  # first number of every token's vector, from which queries of positions are made
_TOLD_SIZE = 0.125  # on what a token is told of those before it
_COPIED_SIZE = 3.0  # size of what is copied, in sizes of a token's vector
_FAR = 300  # tokens between two places that are still compared well
_NORMS = 1.5, 2.0  # scales of queries and keys in the first and second layer, for clear attention
# Shares of the fastest turning pairs of a head in a query of a position; they sum to 1.
_POSITION = 0.6, 0.25, 0.1, 0.05
_OTHERS = 0.1  # on the random weights of what else adds to a hidden state


class _Sizes(NamedTuple):
    """How a hidden state is divided: one constant, the token, and blocks for tokens before it."""

    offsets: int
    block: int
    token: int

    def of_block(self, offset: int) -> slice:
        """Places of what is known of the token `offset` places before, from 1."""
        first = 1 + self.token + (offset - 1) * self.block
        return slice(first, first + self.block)

    @property
    def of_token(self) -> slice:
        """Places of the token itself."""
        return slice(1, 1 + self.token)


def with_copying_heads(params: Params, config: Qwen3Config, seed: int) -> Params:
    """Random parameters of a decoder, in which two layers' heads are replaced by ones that copy.

    Args:
        params: of `Transformer.init_params`, with norms of heads.
        config: its sizes. `rope_theta` should be large: what turns slowly can be compared far off.
        seed: of the token vectors and of the random maps between parts of a hidden state.
    """
    rng, c = np.random.default_rng(seed), config
    if c.num_hidden_layers < _LEAST_LAYERS or c.hidden_size < _LEAST_HIDDEN:
        raise InputError(
            f"config.model.tiny.layers is {c.num_hidden_layers} and hidden {c.hidden_size}, and "
            f"heads that copy take {_LEAST_LAYERS} and {_LEAST_HIDDEN}; raise these, or set "
            "config.model.tiny.weights to nothing."
        )
    offsets = min(_OFFSETS, c.num_attention_heads // c.num_key_value_heads)
    block = min(c.head_dim, c.hidden_size // (2 * offsets))
    sizes = _Sizes(offsets, block, c.hidden_size - offsets * block - 1)
    layers = {
        name: {leaf: np.array(array) for leaf, array in leaves.items()}
        for name, leaves in params[LAYERS].items()
    }
    for name in ("attention_output", "down"):
        layers[name]["kernel"] *= _OTHERS
    words = rng.standard_normal((c.vocab_size, c.hidden_size)) * _WORD_SIZE
    words[:, 1 + sizes.token :] *= _OTHERS
    words[:, 0] = _CONSTANT
    token_view = _told_before(layers, c, sizes, rng)
    _copies(layers, c, sizes, token_view, rng)
    for name in ("query_norm", "key_norm"):
        layers[name]["scale"][: len(_NORMS)] = np.array(_NORMS)[:, None]
    return params | {WORDS: words.astype(np.float32), LAYERS: layers}


def _told_before(
    layers: Params, c: Qwen3Config, sizes: _Sizes, rng: np.random.Generator
) -> np.ndarray:
    """Sets the heads of the first layer that look one, two, … tokens back.

    Returns:
        `[token, block]`: of a token's vector, that which later tokens are told of it.
    """
    query, key, value, output = _kernels(layers, 0)
    d, half = c.head_dim, len(c.rotations[0])
    straight = np.zeros(d)
    few = min(len(_POSITION), half)
    straight[:few] = np.sqrt(_POSITION[:few])
    # All queries and keys are the same but for their positions: they come from the constant alone.
    key[:, :d] = 0.0
    key[0, :d] = straight
    view = _orthonormal(rng, sizes.token)[:, : sizes.block]
    value[:, :d] = 0.0
    value[sizes.of_token, : sizes.block] = view
    for head in range(sizes.offsets):
        dims = slice(head * d, (head + 1) * d)
        query[:, dims] = 0.0
        query[0, dims] = _turned(straight, -(head + 1), c.rotations[0])
        output[dims] = 0.0
        output[dims][: sizes.block, sizes.of_block(head + 1)] = _TOLD_SIZE * np.eye(sizes.block)
    return view


def _copies(
    layers: Params, c: Qwen3Config, sizes: _Sizes, token_view: np.ndarray, rng: np.random.Generator
) -> None:
    """Sets one head for each key head of the second layer.

    It compares a token and those before it with the tokens before each earlier place, and adds the
    token of that place to the hidden state.
    """
    query, key, value, output = _kernels(layers, 1)
    d, shared = c.head_dim, c.num_attention_heads // c.num_key_value_heads
    token = sizes.token * _WORD_SIZE**2 + _CONSTANT**2
    # A hidden state's root mean square before the first layer, and then before the second.
    first = np.sqrt(token / c.hidden_size)
    scale = _TOLD_SIZE / first
    of_told = sizes.offsets * sizes.block * (scale * _WORD_SIZE) ** 2
    second = np.sqrt((token + of_told) / c.hidden_size)
    slow = np.flatnonzero(c.rotations[0] * _FAR < 1.0)[-(sizes.block // 2) :]
    if not len(slow):
        slow = np.array([len(c.rotations[0]) - 1])
    compared = np.concatenate([slow, slow + len(c.rotations[0])])
    width = min(d, sizes.token // c.num_key_value_heads)
    views = _orthonormal(rng, sizes.token)
    for group in range(c.num_key_value_heads):
        dims = slice(group * d, (group + 1) * d)
        asks = slice(group * shared * d, (group * shared + 1) * d)
        key[:, dims], query[:, asks], value[:, dims], output[asks] = 0.0, 0.0, 0.0, 0.0
        for offset in range(1, sizes.offsets + 1):
            mixed = _orthonormal(rng, sizes.block)[:, : len(compared)] * _FADING ** (offset - 1)
            key[sizes.of_block(offset), dims][:, compared] = mixed
            if offset == 1:  # the token itself, seen as later tokens are told of it
                query[sizes.of_token, asks][:, compared] = scale * token_view @ mixed
            else:
                query[sizes.of_block(offset - 1), asks][:, compared] = mixed
        view = views[:, group * width : (group + 1) * width]
        value[sizes.of_token, dims][:, :width] = view
        output[asks][:width, sizes.of_token] = _COPIED_SIZE * second * view.T


def _kernels(layers: Params, layer: int) -> tuple[np.ndarray, ...]:
    """Views of one layer's kernels, `[in, out]`: of queries, keys, values and the output."""
    names = ("query", "key", "value", "attention_output")
    return tuple(layers[name]["kernel"][layer] for name in names)


def _orthonormal(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((size, size)))[0]


def _turned(vector: np.ndarray, positions: float, frequency: np.ndarray) -> np.ndarray:
    """A head's vector `[head_dim]`, turned as the rotary embedding turns it at a position."""
    one, two = np.split(vector, 2)
    cos, sin = np.cos(positions * frequency), np.sin(positions * frequency)
    return np.concatenate([one * cos - two * sin, two * cos + one * sin])
