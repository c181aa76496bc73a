"""Adds rows to a table where an index may come several times: the gradient of a look-up.

On a GPU such a scatter adds in the order in which threads arrive, so in another order every time.
XLA's deterministic form of it (`runtime.platform`) sorts every single number: 8,192 rows of 768
are 6.3 million triples of 12 bytes. Here only the indices are sorted; a prefix sum in log2(rows)
steps then adds the rows of equal indices, and the scatter that is left has each index once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def add_rows(table: jax.Array, at: jax.Array, rows: jax.Array) -> jax.Array:
    """`table.at[at].add(rows)`, in an order that is the same in every run on every platform.

    A CPU uses the scatter itself, which is quickest there and adds in the order of the rows. Other
    platforms add in pairs; so their sums differ from those by float32 rounding.

    Args:
        table: `[V, D]`.
        at: `[T]`, at least 0; a row whose index is V or more is left out.
        rows: `[T, D]`, in the dtype of the table.

    Returns:
        `[V, D]`.
    """
    return jax.lax.platform_dependent(table, at, rows, cpu=_scattered, default=_sorted_sums)


def _scattered(table: jax.Array, at: jax.Array, rows: jax.Array) -> jax.Array:
    return table.at[at].add(rows, mode="drop")


def _sorted_sums(table: jax.Array, at: jax.Array, rows: jax.Array) -> jax.Array:
    count = at.shape[0]
    order = jnp.argsort(at, stable=True)
    at, sums = at[order], rows[order]
    reach = 1
    while reach < count:  # sums[i] holds the rows of its index among the last `reach` ones up to i
        same = jnp.pad(at[reach:] == at[:-reach], (reach, 0))
        before = jnp.pad(sums[:-reach], ((reach, 0), (0, 0)))
        sums = sums + jnp.where(same[:, None], before, 0)
        reach *= 2
    last = jnp.append(at[1:] != at[:-1], True)
    size = table.shape[0]
    # All others get indices of their own behind the table, which are left out.
    once = jnp.where(last & (at < size), at, size + jnp.arange(count, dtype=at.dtype))
    return table.at[once].add(sums, mode="drop", unique_indices=True)


@jax.custom_vjp
def take_rows(table: jax.Array, at: jax.Array) -> jax.Array:
    """`table[at]`, whose gradient adds in a fixed order (`add_rows`).

    The table is `[V, D]`, at `[T]` from 0 to V - 1.
    """
    return table[at]


def _take_rows_backward(saved: tuple[Any, jax.Array], gradient: jax.Array) -> tuple[Any, None]:
    table, at = saved
    return add_rows(jnp.zeros_like(table), at, gradient), None


take_rows.defvjp(lambda table, at: (table[at], (table, at)), _take_rows_backward)
