"""Rows that begin with the same tokens, such as the episodes of one question, computed once.

The tokens that a group of rows begins with have one place each. All that is computed token by token
runs over P + G·R places instead of G·(P + R); only attention sees whole rows, and needs no other
mask than their lengths. In a causal model the hidden states are the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qrag_jax.models.compute.packing import Layout


def shared_layout(shared: jax.Array, lengths: jax.Array, tokens: int, length: int) -> Layout:
    """The layout of groups of rows, end to end in `tokens` places, which must suffice.

    A group's shared tokens come first, then what each of its rows has alone.

    Args:
        shared: int `[groups]`, tokens that the rows of a group begin with; none is longer than a
            present row of its group.
        lengths: int `[groups · members]`, tokens of each row, those shared included; 0: there is no
            such row. The first row of a group is present if any row of it is.
        tokens: number of places.
        length: tokens of the longest row there can be.
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
    column = jnp.arange(length)[None]
    of_row = jnp.repeat(common, members)[:, None]
    own = starts[:, 1:].reshape(-1, 1) + column - of_row
    together = jnp.repeat(starts[:, 0], members)[:, None] + column
    return Layout(
        row=jnp.where(used, row, count),
        position=jnp.where(used, position, 0),
        place=jnp.clip(jnp.where(column < of_row, together, own), 0, tokens - 1),
        lengths=lengths,
        shared=common,
    )
