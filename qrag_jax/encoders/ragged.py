"""Rows of unequal length encoded, and differentiated, with little padding in ONE compiled program.

Rows are sorted by length on the device and cut into blocks of equal size; a scan walks over the
blocks and a switch runs each at the smallest of a few static bucket lengths that holds it. Shapes
never depend on the data, so nothing recompiles, yet short rows cost little. A block that holds no
row costs nothing.

The gradient is pulled back block by block from cotangents of the embeddings (Gao et al., 2021,
"Scaling Deep Contrastive Learning Batch Size", GradCache), so memory is that of one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.encoders.text_encoder import Params, TextEncoder


class Blocks(NamedTuple):
    """How rows are computed: `size` rows at a time, at one of the `lengths` (ascending)."""

    size: int
    lengths: tuple[int, ...]


class Plan(NamedTuple):
    """The blocks of each place rows are encoded: all chunks, the states, and with gradients."""

    chunks: Blocks
    states: Blocks
    gradients: Blocks


class TokenCount(NamedTuple):
    """Tokens that carry text and tokens computed: float32 scalars, counts can exceed int32."""

    real: jax.Array
    computed: jax.Array


class _Schedule(NamedTuple):
    order: jax.Array  # [N] rows, shortest first
    tokens: jax.Array  # [blocks, size, L]
    lengths: jax.Array  # [blocks, size]
    bucket: jax.Array  # [blocks], 0 = nothing to compute


def _schedule(blocks: Blocks, tokens: jax.Array, lengths: jax.Array) -> _Schedule:
    if tokens.shape[1] > blocks.lengths[-1]:
        raise ValueError(f"rows of {tokens.shape[1]} tokens exceed the buckets {blocks.lengths}")
    size = min(blocks.size, tokens.shape[0])
    absent = -tokens.shape[0] % size
    tokens = jnp.pad(tokens, ((absent, 0), (0, blocks.lengths[-1] - tokens.shape[1])))
    lengths = jnp.pad(lengths, (absent, 0))
    order = jnp.argsort(lengths, stable=True)
    lengths = lengths[order].reshape(-1, size)
    longest = lengths[:, -1]
    bucket = 1 + jnp.searchsorted(jnp.array(blocks.lengths), longest)
    return _Schedule(
        order=order,
        tokens=tokens[order].reshape(-1, size, tokens.shape[1]),
        lengths=lengths,
        bucket=jnp.where(longest == 0, 0, bucket),
    )


def count_tokens(blocks: Blocks, lengths: jax.Array) -> TokenCount:
    """Tokens that rows of these `lengths` `[N]` hold, and that `embed_rows` computes for them."""
    rows = jnp.zeros((lengths.shape[0], 1), jnp.int32)
    schedule = _schedule(blocks, rows, lengths)
    cost = jnp.array((0, *blocks.lengths), jnp.float32) * schedule.lengths.shape[1]
    return TokenCount(real=lengths.astype(jnp.float32).sum(), computed=cost[schedule.bucket].sum())


def embed_rows(
    encoder: TextEncoder, blocks: Blocks, params: Params, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
    """tokens `[N, L]`, lengths `[N]` (0 = no row) → float32 `[N, D]`; absent rows give zeros.

    Equal to `encoder.embed(params, tokens, lengths)` on present rows, up to float rounding.
    """
    schedule = _schedule(blocks, tokens, lengths)
    size = schedule.lengths.shape[1]

    def nothing(_tokens: jax.Array, _lengths: jax.Array) -> jax.Array:
        return jnp.zeros((size, encoder.width), jnp.float32)

    def at_length(length: int):
        return lambda tokens, lengths: encoder.embed(params, tokens[:, :length], lengths)

    branches = [nothing, *map(at_length, blocks.lengths)]

    def step(_, block):
        tokens, lengths, bucket = block
        return None, jax.lax.switch(bucket, branches, tokens, lengths)

    _, sorted_rows = jax.lax.scan(step, None, (schedule.tokens, schedule.lengths, schedule.bucket))
    sorted_rows = sorted_rows.reshape(-1, encoder.width)
    rows = jnp.zeros_like(sorted_rows).at[schedule.order].set(sorted_rows)
    rows = rows[rows.shape[0] - tokens.shape[0] :]
    return jnp.where(lengths[:, None] > 0, rows, 0.0)


def pull_back(
    encoder: TextEncoder,
    blocks: Blocks,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cotangents: jax.Array,
) -> Params:
    """Gradient of `Σ_n <cotangents[n], embed(tokens[n])>` with respect to `params`.

    tokens `[N, L]`, lengths `[N]`, cotangents `[N, D]`; rows of length 0 contribute nothing.
    """
    schedule = _schedule(blocks, tokens, lengths)
    absent = schedule.order.shape[0] - tokens.shape[0]
    cotangents = jnp.pad(cotangents, ((absent, 0), (0, 0)))[schedule.order]
    cotangents = cotangents * (schedule.lengths.reshape(-1, 1) > 0)
    cotangents = cotangents.reshape(*schedule.lengths.shape, -1)

    def nothing(total: Params, *_block: jax.Array) -> Params:
        return total

    def at_length(length: int):
        def add(total, tokens, lengths, cotangents):
            def embed(params):
                return encoder.embed(params, tokens[:, :length], lengths)

            (gradient,) = jax.vjp(embed, params)[1](cotangents)
            return jax.tree.map(jnp.add, total, gradient)

        return add

    branches = [nothing, *map(at_length, blocks.lengths)]

    def step(total, block):
        *rows, bucket = block
        return jax.lax.switch(bucket, branches, total, *rows), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    gradient, _ = jax.lax.scan(
        step, zeros, (schedule.tokens, schedule.lengths, cotangents, schedule.bucket)
    )
    return gradient


def choose_lengths(histogram: Sequence[int] | np.ndarray, count: int) -> tuple[int, ...]:
    """The ≤ `count` bucket lengths that compute the fewest tokens for rows of given lengths.

    `histogram[n]` is how many rows have n tokens; the last index is the longest row allowed and
    always becomes a bucket. Exact by dynamic programming over multiples of 8.
    """
    histogram = np.array(histogram, np.int64)
    histogram[0] = 0  # absent rows cost nothing
    longest = len(histogram) - 1
    edges = sorted({*range(8, longest, 8), longest})
    rows_up_to = np.cumsum(histogram)[edges]
    # cost[j]: fewest tokens for all rows that fit edge j, when edge j is a bucket.
    cost = rows_up_to * np.array(edges)
    paths: list[tuple[int, ...]] = [(edge,) for edge in edges]
    for _ in range(count - 1):
        new_cost, new_paths = cost.copy(), list(paths)
        for j, edge in enumerate(edges):
            for i in range(j):
                split = cost[i] + (rows_up_to[j] - rows_up_to[i]) * edge
                if split < new_cost[j]:
                    new_cost[j], new_paths[j] = split, (*paths[i], edge)
        cost, paths = new_cost, new_paths
    return paths[-1]
