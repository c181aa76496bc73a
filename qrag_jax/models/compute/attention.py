"""Attention over right-padded rows, in the form each platform runs fastest."""

from __future__ import annotations

import functools
import json
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qrag_jax.models.compute.dropout import KeptWeights
from qrag_jax.models.compute.precision import FUSED, PRODUCTS, Precision, rounded_einsum
from qrag_jax.runtime.platform import is_deterministic

MASKED = -1e9
# Queries of causal rows are asked in parts, each with the keys that it may see: at most so many
# parts, of so many queries at least.
_PARTS, _SHORTEST_PART = 4, 48
# The function of JAX that lowers cuDNN's calls, and fields of what it writes.
_LOWERS = "create_dot_product_attention_backend_config"
_FIELDS, _OF_GRADIENTS = "cudnn_fmha_backend_config", "bmm1_grad_gemm1_dot_dimension_numbers"


class Behind(NamedTuple):
    """Queries that begin behind the starts of their rows.

    Attributes:
        position: `[B]`, of each row's first query.
        most: the largest that it can be.
    """

    position: jax.Array
    most: int


class Window(NamedTuple):
    """Keys that queries see in layers with local attention.

    Attributes:
        reach: a query sees the keys that are at most so many tokens away, before and behind it.
        applies: bool `[]`, whether this layer has local attention; where not, all keys are seen.
    """

    reach: int
    applies: jax.Array

    def near(self, length: int) -> jax.Array:
        """Which keys are seen, bool `[L, L]` by query and key."""
        position = jnp.arange(length)
        return (jnp.abs(position[:, None] - position[None]) <= self.reach) | ~self.applies


class _Heads(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array


class _Biases(NamedTuple):
    """What is added to scores: `[N or 1, Q or 1, L]`, and (or None) what all rows share.

    The latter is `[n, Q, L]`, where n divides N, and is added to each n of the scores. It alone has
    a gradient.
    """

    of_rows: jax.Array
    shared: jax.Array | None = None


def padded_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    *,
    precision: Precision | None = None,
    causal: bool = False,
    kept: KeptWeights | None = None,
    first: Behind | None = None,
    window: Window | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """softmax(QKᵀ/√d)·V over the first `lengths[b]` keys of each row (Vaswani et al., 2017).

    NVIDIA GPUs use cuDNN's fused kernel, with lengths instead of a mask, for the dtypes and head
    widths that it supports. CPUs use plain batched products: the einsums of JAX's attention, and
    above all their gradients, are slower there. With dropout every platform uses batched
    products, because no fused kernel accepts the masks of this package. All other cases use JAX's
    attention, compiled by XLA: windows and biases too, which cuDNN's kernel takes only in part.

    Args:
        query: `[B, L, heads, d]`.
        key: `[B, L, groups, d]`. Query heads i·heads/groups to (i+1)·heads/groups - 1 share the
            key and value of group i (Ainslie et al., arXiv 2305.13245).
        value: `[B, L, groups, d]`.
        lengths: `[B]`, at least 1.
        precision: dtypes of the products, and the form of attention; None: batched products in the
            dtype of query. JAX's attention ignores `products`.
        causal: a query sees no later key. Cotangents at positions ≥ length must then be 0.
        kept: the attention weights that dropout keeps; None: no dropout.
        first: where the queries of rows begin, of which there may then be fewer than keys; None: at
            the rows' starts. Batched products take it, causal and without dropout.
        window: which keys a query sees, in layers that are not causal; None: all of the row.
        bias: float32 `[heads, L, L]`, added to the scores of every row, in layers that are not
            causal and whose heads have keys of their own. It has a gradient.

    Returns:
        `[B, L, heads, d]`; values at positions ≥ length are meaningless.
    """
    heads, how = _Heads(query, key, value), precision or Precision(products=query.dtype)
    if causal and (window is not None or bias is not None):
        raise ValueError("causal attention takes neither a window nor a bias")
    if window is not None and key.shape[1] <= window.reach + 1:
        window = None  # all keys are near
    if how.attention == PRODUCTS or kept is not None:
        shared = bias
        if window is not None:
            far = jnp.where(window.near(key.shape[1]), 0.0, MASKED)[None]
            shared = far if bias is None else bias + far
        return _batched_products(
            heads, lengths, how.products, causal=causal, kept=kept, first=first, shared=shared
        )
    if first is not None:
        raise ValueError("only batched products take queries that begin behind a row's start")
    fused = how.attention == FUSED and _fused_kernel_takes(query) and bias is None
    if fused:
        _say_determinism()
    whole = partial(_library, causal=causal, implementation="cudnn" if fused else "xla", bias=bias)
    if window is None:
        return whole(heads, lengths)
    local = partial(_library, causal=False, implementation="xla", bias=bias, window=window)
    if not fused:
        return local(heads, lengths)
    return jax.lax.cond(window.applies, local, whole, heads, lengths)


def _fused_kernel_takes(query: jax.Array) -> bool:
    """Whether cuDNN's flash attention takes these heads.

    It needs half precision, heads of at most 128 by steps of 8, and, for gradients, rows of an even
    length.
    """
    width, length = query.shape[-1], query.shape[1]
    half = query.dtype in (jnp.bfloat16, jnp.float16)
    return half and width <= 128 and width % 8 == 0 and length % 2 == 0


def _say_determinism() -> None:
    """From now on calls are lowered with the field, if XLA is asked for deterministic programs.

    XLA writes the wish for a deterministic algorithm into the first of equal gradients only, and
    then finds no kernel for the others: such a program ends with an IndexError as it starts
    (openxla/xla, pull request 46500). PPO's update is one, with its policy and its critic. So each
    call says it from the start, in the field that XLA itself would write. JAX has no public way to
    set it. A version without the function that is wrapped here is left as it is.
    """
    from jax._src.cudnn import fused_attention_stablehlo as lowering

    made = getattr(lowering, _LOWERS, None)
    if made is None or hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def with_field(*args: Any, **options: Any) -> str:
        text: str = made(*args, **options)
        config = json.loads(text)
        fields = config.get(_FIELDS, {})
        # As XLA would write it: with another value the first of equal calls would differ again.
        if _OF_GRADIENTS not in fields or not is_deterministic():
            return text
        fields["force_deterministic"] = True
        return json.dumps(config)

    setattr(lowering, _LOWERS, with_field)


def _library(heads, lengths, *, causal, implementation, bias=None, window=None):
    lengths = lengths.astype(jnp.int32)
    near = None if window is None else window.near(heads.key.shape[1])[None, None]
    # The library takes no precision; without this a GPU would round factors in float32 to TF32.
    in_full = heads.query.dtype == jnp.float32
    with jax.default_matmul_precision("highest" if in_full else None):
        return jax.nn.dot_product_attention(
            heads.query,
            heads.key,
            heads.value,
            bias=None if bias is None else bias[None],
            mask=near,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            is_causal=causal,
            implementation=implementation,
        )


def _by_group(groups: int, x: jax.Array) -> jax.Array:
    """`[B, L, heads, d]` → `[B·groups, heads/groups·L, d]`."""
    return x.transpose(0, 2, 1, 3).reshape(len(x) * groups, -1, x.shape[-1])


def _batched_products(heads_of_rows, lengths, products, *, causal, kept, first, shared):
    query, key, value = heads_of_rows
    batch, asking, heads, width = query.shape
    length, groups = key.shape[1:3]
    by_group = partial(_by_group, groups)
    position = jnp.arange(length)
    if causal and kept is None:  # padding keys come after all queries of the row
        behind = first or Behind(jnp.zeros(1, jnp.int32), 0)
        return _in_parts(heads_of_rows, products, behind)
    if causal:
        bias = jnp.where(position[None] <= position[:, None], 0.0, MASKED)
        bias = jnp.tile(bias, (heads // groups, 1))[None]
    else:
        bias = jnp.where(position[None] < lengths[:, None], 0.0, MASKED)
        bias = jnp.repeat(bias, groups, axis=0)[:, None]
    scaled = query * jnp.asarray(width**-0.5, query.dtype)
    mask, rate = (kept.mask.reshape(batch * groups, -1, length), kept.rate) if kept else (None, 0.0)
    by_groups = _Heads(by_group(scaled), by_group(key), by_group(value))
    if shared is not None:
        shared = jnp.tile(shared, (1, heads // groups, 1))
    result = _attend(products, rate, by_groups, _Biases(bias, shared), mask)
    return result.reshape(batch, heads, asking, width).transpose(0, 2, 1, 3)


def _in_parts(heads_of_rows, products, behind):
    """Causal attention: a part of the queries needs no key behind its last one's position."""
    query, key, value = heads_of_rows
    batch, asking, heads, width = query.shape
    length, groups = key.shape[1:3]
    share = heads // groups
    by_group = partial(_by_group, groups)
    size = max(_SHORTEST_PART, -(-asking // _PARTS))
    found = []
    for start in range(0, asking, size):
        end = min(start + size, asking)
        seen = min(length, behind.most + end)
        own = behind.position[:, None] + jnp.arange(start, end)[None]
        bias = jnp.where(jnp.arange(seen)[None, None] <= own[..., None], 0.0, MASKED)
        bias = jnp.repeat(jnp.tile(bias, (1, share, 1)), groups if len(bias) > 1 else 1, axis=0)
        scaled = query[:, start:end] * jnp.asarray(width**-0.5, query.dtype)
        part = _Heads(by_group(scaled), by_group(key[:, :seen]), by_group(value[:, :seen]))
        attended = _attend(products, 0.0, part, _Biases(bias), None)
        found.append(attended.reshape(batch, heads, end - start, width))
    return jnp.concatenate(found, axis=2).transpose(0, 2, 1, 3)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(products, rate, heads, biases, kept):
    """query `[N, Q, d]`, key, value `[N, L, d]`, biases of the scores → `[N, Q, d]`.

    The softmax is computed in float32. kept `[N, Q, L]` marks the weights that dropout keeps; None:
    all.
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
    return _Heads(d_query, d_key, d_value), _Biases(jnp.zeros_like(bias), d_shared), None


_attend.defvjp(_attend_forward, _attend_backward)
