"""Attention over right-padded rows, in the form each platform runs fastest; rotary positions."""

from __future__ import annotations

import functools
import json
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.models.compute.dropout import KeptWeights
from qrag_jax.models.compute.packing import Layout, from_rows, to_rows
from qrag_jax.models.compute.precision import FUSED, Precision, rounded_einsum
from qrag_jax.runtime.platform import is_deterministic

MASKED = -1e9
# Queries of causal rows are asked in parts, each with the keys that it may see: at most so many
# parts, of so many queries at least.
_PARTS, _SHORTEST_PART = 4, 48


class Window(NamedTuple):
    """Keys that queries see in layers with local attention."""

    reach: int  # a query sees the keys that are at most so many tokens away, before and behind it
    # bool `[]`, whether this layer has local attention; where not, all keys are seen
    applies: jax.Array


_Heads = tuple[jax.Array, jax.Array, jax.Array]  # query, key, value


def padded_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    precision: Precision,
    *,
    kept: KeptWeights | None = None,
    window: Window | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """softmax(QKᵀ/√d)·V over the first `lengths[b]` keys of each row (Vaswani et al., 2017).

    NVIDIA GPUs use cuDNN's fused kernel, with lengths instead of a mask, for the dtypes and head
    widths that it supports. All else is computed by plain batched products: other platforms, and
    dropout, windows and biases, which the kernel takes only in part or not at all. On a CPU the
    einsums of JAX's attention, and above all their gradients, are slower.

    Args:
        query, key, value: `[B, L, heads, d]`.
        lengths: `[B]`, at least 1.
        precision: dtypes of the products, and the form of attention.
        kept: the attention weights that dropout keeps; None: no dropout.
        window: which keys a query sees; None: all of the row.
        bias: float32 `[heads, L, L]`, added to the scores of every row. It has a gradient.

    Returns:
        `[B, L, heads, d]`; values at positions ≥ length are meaningless.
    """
    of_rows, length = (query, key, value), key.shape[1]
    if window is not None and length <= window.reach + 1:
        window = None  # all keys are near

    def by_products(of_rows: _Heads, lengths: jax.Array) -> jax.Array:
        shared = bias
        if window is not None:
            position = jnp.arange(length)
            near = jnp.abs(position[:, None] - position[None]) <= window.reach
            far = jnp.where(near | ~window.applies, 0.0, MASKED)[None]
            shared = far if bias is None else bias + far
        outside = jnp.where(jnp.arange(length)[None] < lengths[:, None], 0.0, MASKED)
        outside = jnp.repeat(outside, query.shape[2], axis=0)[:, None]
        mask, rate = kept or (None, 0.0)
        mask = None if mask is None else mask.reshape(len(outside), -1, length)
        attended = _grouped(of_rows, precision.products, (outside, shared), rate, mask)
        return attended.transpose(0, 2, 1, 3)

    if kept is not None or bias is not None or not _takes_fused_kernel(query, precision):
        return by_products(of_rows, lengths)
    if window is None:
        return _fused(of_rows, lengths)
    return jax.lax.cond(window.applies, by_products, _fused, of_rows, lengths)


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    precision: Precision,
    *,
    first: jax.Array | None = None,
    most: int = 0,
) -> jax.Array:
    """As `padded_attention`, where a query sees no later key, and heads share keys and values.

    Cotangents at positions ≥ length must be 0.

    Args:
        query: `[B, L, heads, d]`.
        key, value: `[B, L, groups, d]`. Query heads i·heads/groups to (i+1)·heads/groups - 1 share
            those of group i (Ainslie et al., arXiv 2305.13245).
        first: `[B]`, the position of each row's first query, of which there may then be fewer than
            keys; None: 0. Only batched products take it.
        most: the largest that these can be.
    """
    if _takes_fused_kernel(query, precision):
        return _fused((query, key, value), lengths, causal=True)
    # Padding keys come after all queries of the row, and a part of the queries needs no key behind
    # its last one's position.
    asking, heads = query.shape[1:3]
    length, groups = key.shape[1:3]
    first = jnp.zeros(1, jnp.int32) if first is None else first
    size = max(_SHORTEST_PART, -(-asking // _PARTS))
    parts_out = []
    for start in range(0, asking, size):
        end = min(start + size, asking)
        seen = min(length, most + end)
        positions = first[:, None] + jnp.arange(start, end)[None]
        bias = jnp.where(jnp.arange(seen)[None, None] <= positions[..., None], 0.0, MASKED)
        bias = jnp.tile(bias, (1, heads // groups, 1))
        bias = jnp.repeat(bias, groups if len(bias) > 1 else 1, axis=0)
        part = query[:, start:end], key[:, :seen], value[:, :seen]
        parts_out.append(_grouped(part, precision.products, (bias, None)))
    return jnp.concatenate(parts_out, axis=2).transpose(0, 2, 1, 3)


def shared_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, layout: Layout, precision: Precision
) -> jax.Array:
    """Causal attention of packed tokens, by whole rows or in parts.

    In parts, a row's own tokens see the whole row, and a group's shared tokens see each other,
    once. Fused kernels take whole rows: for them few long rows are better than many short ones.

    Args:
        query: `[T, heads, d]`; key, value: `[T, groups, d]`.

    Returns:
        `[T, heads · d]`, 0 at unused places.
    """

    def rows(x: jax.Array, layout: Layout) -> jax.Array:
        flat = to_rows(x.reshape(len(x), -1), layout)
        return flat.reshape(*layout.place.shape, *x.shape[1:])

    def packed(x: jax.Array, layout: Layout) -> jax.Array:
        return from_rows(x.reshape(*x.shape[:2], -1), layout)

    def of_row_starts(layout: Layout) -> jax.Array:
        lengths = jnp.maximum(layout.lengths, 1)
        heads = rows(query, layout), rows(key, layout), rows(value, layout)
        attended = causal_attention(*heads, lengths, precision)
        return packed(attended, layout)

    shared = layout.shared
    if shared is None or shared.prompts is None or shared.own is None:
        return of_row_starts(layout)
    if precision.attention == FUSED:
        return of_row_starts(layout)
    attended = causal_attention(
        rows(query, shared.own),
        rows(key, layout),
        rows(value, layout),
        jnp.maximum(layout.lengths, 1),
        precision,
        first=jnp.repeat(shared.counts, len(layout.lengths) // len(shared.counts)),
        most=shared.prompts.place.shape[1],
    )
    return packed(attended, shared.own) + of_row_starts(shared.prompts)


def _takes_fused_kernel(query: jax.Array, precision: Precision) -> bool:
    """Whether cuDNN's flash attention is to compute these heads, and can.

    It needs half precision, heads of at most 128 by steps of 8, and, for gradients, rows of an even
    length.
    """
    width, length = query.shape[-1], query.shape[1]
    half = query.dtype in (jnp.bfloat16, jnp.float16)
    able = half and width <= 128 and width % 8 == 0 and length % 2 == 0
    return precision.attention == FUSED and able


@functools.cache  # once
def _say_determinism() -> None:
    """From now on calls are lowered with the field, if XLA is asked for deterministic programs.

    XLA writes the wish for a deterministic algorithm into the first of equal gradients only, and
    then finds no kernel for the others: such a program ends with an IndexError as it starts
    (openxla/xla, pull request 46500). PPO's update is one, with its policy and its critic. So each
    call says it from the start, in the field that XLA itself would write. JAX has no public way to
    set it. A version without the function that is wrapped here is left as it is.
    """
    from jax._src.cudnn import fused_attention_stablehlo as lowering

    name = "create_dot_product_attention_backend_config"
    lower = getattr(lowering, name, None)
    if lower is None:
        return

    @functools.wraps(lower)
    def with_field(*args: Any, **options: Any) -> str:
        text: str = lower(*args, **options)
        config = json.loads(text)
        fields = config.get("cudnn_fmha_backend_config", {})
        # As XLA would write it: with another value the first of equal calls would differ again.
        if "bmm1_grad_gemm1_dot_dimension_numbers" not in fields or not is_deterministic():
            return text
        fields["force_deterministic"] = True
        return json.dumps(config)

    setattr(lowering, name, with_field)


def _fused(of_rows: _Heads, lengths: jax.Array, *, causal: bool = False) -> jax.Array:
    _say_determinism()
    lengths = lengths.astype(jnp.int32)
    return jax.nn.dot_product_attention(
        *of_rows,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        is_causal=causal,
        implementation="cudnn",
    )


# ---------------------------------------------------------------------- batched products


def _grouped(of_rows, products, biases, rate=0.0, kept=None):
    """query `[B, Q, heads, d]`, key, value `[B, L, groups, d]` → `[B, heads, Q, d]`: `_attend`."""
    query, key, value = of_rows
    (batch, asking, heads, width), groups = query.shape, key.shape[2]

    def by_group(x: jax.Array) -> jax.Array:
        return x.transpose(0, 2, 1, 3).reshape(batch * groups, -1, width)

    scaled = query * jnp.asarray(width**-0.5, query.dtype)
    by_groups = tuple(map(by_group, (scaled, key, value)))
    return _attend(products, rate, by_groups, biases, kept).reshape(batch, heads, asking, width)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(products, rate, heads, biases, kept):
    """query `[N, Q, d]`, key, value `[N, L, d]` → `[N, Q, d]`.

    The softmax is computed in float32. The biases of the scores are `[N or 1, Q or 1, L]` and (or
    None) one `[n, Q, L]`, where n divides N, that is added to each n of them; the latter alone has
    a gradient. kept `[N, Q, L]` marks the weights that dropout keeps; None: all.
    """
    return _attend_forward(products, rate, heads, biases, kept)[0]


def _dropped(rate, weights, kept):
    return weights if kept is None else jnp.where(kept, weights / (1 - rate), 0)


def _attend_forward(products, rate, heads, biases, kept):
    (query, key, value), (bias, shared) = heads, biases
    scores = rounded_einsum(products, "nqd,nkd->nqk", query, key, jnp.float32) + bias
    if shared is not None:
        scores = (scores.reshape(-1, *shared.shape) + shared[None]).reshape(scores.shape)
    weights = jax.nn.softmax(scores).astype(query.dtype)
    result = rounded_einsum(
        products, "nqk,nkd->nqd", _dropped(rate, weights, kept), value, query.dtype
    )
    return result, (heads, biases, kept, weights, result)


def _attend_backward(products, rate, saved, gradient):
    (query, key, value), (bias, shared), kept, weights, result = saved
    product = partial(rounded_einsum, products, result=query.dtype)
    d_value = product("nqk,nqd->nkd", _dropped(rate, weights, kept), gradient)
    d_weights = _dropped(rate, product("nqd,nkd->nqk", gradient, value), kept)
    # Σ_k weights·d_weights equals Σ_d result·gradient, with dropout too; that is L/d times cheaper.
    d_scores = weights * (d_weights - (result * gradient).sum(-1, keepdims=True))
    d_query = product("nqk,nkd->nqd", d_scores, key)
    d_key = product("nqk,nqd->nkd", d_scores, query)
    d_shared = None
    if shared is not None:
        by_rows = d_scores.astype(jnp.float32).reshape(-1, *shared.shape)
        d_shared = by_rows.sum(axis=0).astype(shared.dtype)
    return (d_query, d_key, d_value), (jnp.zeros_like(bias), d_shared), None


_attend.defvjp(_attend_forward, _attend_backward)


# ---------------------------------------------------------------- rotary positions
# Of encoders and of finished embeddings (Su et al., arXiv 2104.09864). Angles come from float64
# tables of a coarse and a fine part of the position: exact to float32 at any position.


THETA = 10_000.0
_FINE = 1024  # positions in the fine table


def angles_at(
    positions: jax.Array, frequency: np.ndarray, last: int
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 `[..., n]`, at positions `[...]` from 0 to `last`, a static one.

    Args:
        frequency: float64 `[n]`, radians per position.
    """

    def table(values: np.ndarray) -> tuple[jax.Array, jax.Array]:
        angle = values[:, None] * frequency[None]
        return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)

    fine_cos, fine_sin = table(np.arange(min(last + 1, _FINE), dtype=np.float64))
    if last < _FINE:
        return fine_cos[positions], fine_sin[positions]
    coarse_cos, coarse_sin = table(_FINE * np.arange(last // _FINE + 1, dtype=np.float64))
    coarse, fine = positions // _FINE, positions % _FINE
    a_cos, a_sin = coarse_cos[coarse], coarse_sin[coarse]
    b_cos, b_sin = fine_cos[fine], fine_sin[fine]
    return a_cos * b_cos - a_sin * b_sin, a_sin * b_cos + a_cos * b_sin


def rotate(
    embeddings: jax.Array, positions: jax.Array, last: int, *, back: bool = False
) -> jax.Array:
    """Embeddings `[..., 2D]` rotated at integer positions `[...]` (0 to `last`), float32.

    Position 0 changes nothing. `back` undoes a rotation: `<s, R(p)a> = <R(-p)s, a>`.
    """
    if last == 0:
        return embeddings
    half = embeddings.shape[-1] // 2
    frequency = THETA ** (-np.arange(0, half, 2, dtype=np.float64) / half)
    cos, sin = angles_at(positions, frequency, last)
    sin = -sin if back else sin
    pairs = embeddings.astype(jnp.float32).reshape(*embeddings.shape[:-1], 2, -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[..., None, :], sin[..., None, :]  # the same for both halves
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(*rotated.shape[:-3], -1)


def rotate_halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x `[T, heads, d]` with the pairs (j, j + d/2) rotated by angles `[T, d/2]`, in x's dtype.

    Encoders use this rotation. `rotate`, for finished embeddings, pairs neighbours instead.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]  # the same for all heads
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
