"""Rows that begin with the same tokens, such as the episodes of one question, computed once.

The tokens that a group of rows begins with have one place each. All that is computed token by token
runs over P + G·R places instead of G·(P + R); only attention sees whole rows, and needs no other
mask than their lengths. In a causal model the hidden states are the same. Where attention is a
plain product of arrays it asks by the shared tokens once, too (`shared_attention`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from qrag_jax.models.compute.attention import Behind, causal_attention
from qrag_jax.models.compute.packing import Layout, Shared, from_rows, to_rows
from qrag_jax.models.compute.precision import PRODUCTS, Precision


class RowLengths(NamedTuple):
    """Tokens of the longest row, of the most shared ones, and of the most behind these.

    own is 0 if attention is not to be computed in parts.
    """

    whole: int
    prompt: int = 0
    own: int = 0


def shared_layout(
    shared: jax.Array, lengths: jax.Array, tokens: int, longest: RowLengths
) -> Layout:
    """The layout of groups of rows, end to end in `tokens` places, which must suffice.

    A group's shared tokens come first, then what each of its rows has alone.

    Args:
        shared: int `[groups]`, tokens that the rows of a group begin with; none is longer than a
            present row of its group.
        lengths: int `[groups · members]`, tokens of each row, those shared included; 0: there is no
            such row. The first row of a group is present if any row of it is.
        tokens: number of places.
        longest: the lengths there can be.
    """
    groups, count = len(shared), len(lengths)
    members = count // groups
    by_group = lengths.reshape(groups, members)
    present = by_group > 0
    common = jnp.where(present.any(axis=1), shared, 0)
    alone = jnp.where(present, by_group - common[:, None], 0)
    parts = jnp.concatenate([common[:, None], alone], axis=1).reshape(-1)
    ends = jnp.cumsum(parts)
    starts = (ends - parts).reshape(groups, members + 1)
    place = jnp.arange(tokens)
    part = (place[:, None] >= ends[None]).sum(axis=1)
    used = part < len(parts)
    part = jnp.minimum(part, len(parts) - 1)
    group, number = part // (members + 1), part % (members + 1)
    position = place - starts[group, number] + jnp.where(number > 0, common[group], 0)
    row = group * members + jnp.maximum(number - 1, 0)
    column = jnp.arange(longest.whole)[None]
    of_row = jnp.repeat(common, members)[:, None]
    own = starts[:, 1:].reshape(-1, 1) + column - of_row
    together = jnp.repeat(starts[:, 0], members)[:, None] + column
    prompts = behind = None
    if longest.own:
        if longest.prompt:
            prompts = Layout(
                row=jnp.where(used & (number == 0), group, groups),
                position=jnp.where(used, position, 0),
                place=jnp.clip(starts[:, :1] + jnp.arange(longest.prompt)[None], 0, tokens - 1),
                lengths=common,
            )
        behind = Layout(
            row=jnp.where(used & (number > 0), row, count),
            position=jnp.maximum(position - common[group], 0),
            place=jnp.clip(
                starts[:, 1:].reshape(-1, 1) + jnp.arange(longest.own)[None], 0, tokens - 1
            ),
            lengths=alone.reshape(-1),
        )
    return Layout(
        row=jnp.where(used, row, count),
        position=jnp.where(used, position, 0),
        place=jnp.clip(jnp.where(column < of_row, together, own), 0, tokens - 1),
        lengths=lengths,
        shared=Shared(common, prompts, behind),
    )


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
    if shared is None or shared.own is None or precision.attention != PRODUCTS:
        return of_row_starts(layout)
    position = jnp.repeat(shared.counts, len(layout.lengths) // len(shared.counts))
    most = 0 if shared.prompts is None else shared.prompts.place.shape[1]
    attended = causal_attention(
        rows(query, shared.own),
        rows(key, layout),
        rows(value, layout),
        jnp.maximum(layout.lengths, 1),
        precision,
        first=Behind(position, most),
    )
    own = packed(attended, shared.own)
    return own if shared.prompts is None else own + of_row_starts(shared.prompts)
