"""Soft Q-values of a two-tower encoder: two critics, a top-k softmax policy, a soft state value.

An embedding of width 2D is read as two halves, each the vector of one critic:
`q_i = <E_s[half i], E_a[half i]>` and `Q = q_1 + q_2` (Q-RAG, arXiv 2511.07328).
All values are float32.

Of long documents, chunks are scored in blocks, sharded over the mesh: a document is a list `[C]` of
rows in a table of embeddings (`rollouts.text_table`), and only the k best of each block stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.environments import positions
from qrag_jax.errors import Count, Positive
from qrag_jax.models.compute.attention import rotate
from qrag_jax.models.compute.precision import EXACT
from qrag_jax.runtime.mesh import BATCH_AXES, on_each

MASKED = -1e30  # finite, so that a row without any action stays free of NaN
LEAST_BLOCK = 16  # chunks scored at a time of short documents; no search asks for more actions


@dataclasses.dataclass(frozen=True)
class SoftQConfig:
    """Section `policy`."""

    alpha: Positive = 0.05  # α_0, temperature; α_t = α_0·lr_t / lr_0
    top_k_actions: Count = 5  # k, number of best actions that are drawn from, and summed over in V


def twin_q(state: jax.Array, chunks: jax.Array) -> jax.Array:
    """state `[..., 2D]`, chunks `[..., C, 2D]` → the two critics' values `[..., C, 2]`."""
    state = state.reshape(*state.shape[:-1], 2, -1)
    chunks = chunks.reshape(*chunks.shape[:-1], 2, -1)
    return jnp.einsum("...hd,...chd->...ch", state, chunks, precision=EXACT)


def log_policy(q: jax.Array, available: jax.Array, alpha: jax.Array, top_k: int) -> jax.Array:
    """Log-probabilities of softmax(q / α) over the available actions among the top k.

    Args:
        q: `[..., C]` values.
        available: `[..., C]` bool.
        alpha: temperature, a scalar > 0.

    Returns:
        `[..., C]`, `MASKED` or less for actions that cannot be drawn.
    """
    q = jnp.where(available, q, MASKED)
    worst = jax.lax.top_k(q, min(top_k, q.shape[-1]))[0][..., -1:]
    drawable = available & (q >= worst)
    logits = jnp.where(drawable, (q - q.max(-1, keepdims=True)) / alpha, MASKED)
    return jnp.where(drawable, jax.nn.log_softmax(logits), MASKED)


def log_uniform(available: jax.Array) -> jax.Array:
    """Log-probabilities of the uniform policy over the available actions, `[..., C]`."""
    return jnp.where(available, -jnp.log(jnp.maximum(available.sum(-1, keepdims=True), 1)), MASKED)


def entropy(log_probabilities: jax.Array) -> jax.Array:
    """Entropy in nats, `[..., C]` → `[...]`."""
    return -(jnp.exp(log_probabilities) * jnp.maximum(log_probabilities, -1e4)).sum(-1)


def soft_value(twin: jax.Array, available: jax.Array, alpha: jax.Array, top_k: int) -> jax.Array:
    """`V = Σ_i α·logsumexp(q_i / α)`, each over the available actions in the top k of half i.

    Args:
        twin: `[..., C, 2]` values of the two critics.
        available: `[..., C]` bool.

    Returns:
        `[...]`; 0 where no action is available, because a state that has ended has the value 0.
    """
    q = jnp.where(available[..., None], twin, MASKED)
    best = jax.lax.top_k(jnp.moveaxis(q, -1, -2), min(top_k, q.shape[-2]))[0]
    # Subtract the maximum first, so that q/α does not overflow and α → 0 gives max(q).
    top = best[..., :1]
    value = top[..., 0] + alpha * jax.nn.logsumexp((best - top) / alpha, axis=-1)
    return jnp.where(available.any(-1), value.sum(-1), 0.0)


# ---------------------------------------------------------------- long documents


BLOCK = 1024  # chunks scored at a time


def padded_chunks(chunks: int, devices: int) -> int:
    """Number of columns for documents of this many chunks: whole blocks on every device."""
    block = BLOCK
    while block // 2 * devices >= chunks and block > LEAST_BLOCK:
        block //= 2
    return -(-chunks // (block * devices)) * block * devices


def make_best_chunks(
    mesh: Mesh, kind: str, max_steps: int, k: int
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Makes the jitted `(table, rows, searches) → values [B, W, k], chunk indices [B, W, k]`.

    They are the k best actions of each state. If fewer than k chunks are left, the remaining values
    are `MASKED`.

    - table `[N, 2D]`: embeddings.
    - rows `[B, C]`: rows of the table, split over the mesh's batch axes; C is from `padded_chunks`.
    - searches, of W states in each document: the documents' numbers of chunks `[B]`, embeddings of
      states `[B, W, 2D]`, chunks taken so far `[B, W, T]`, -1 where none, and keys `[B]` as
      `positions.evaluation_keys` gives them, from which "random_published" draws.

    Ties go to the lowest index, as with argmax.

    Args:
        kind: one of `positions.KINDS`; "random" is played as "absolute".
        k: at most `LEAST_BLOCK`.
    """
    devices = mesh.size

    def best_chunks(table: jax.Array, rows: jax.Array, searches: tuple) -> tuple:
        last = positions.last_position(kind, rows.shape[1], max_steps)
        published = kind == positions.RANDOM_PUBLISHED
        indents = positions.draw_indents(searches[3], searches[0]) if published else None
        score = partial(_scores, (kind, last, indents), searches[:3])
        block = min(BLOCK, rows.shape[1] // devices)

        def best_of_block(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            index, block_rows = block
            q = score(table[block_rows], index)
            # A reduction is cheaper than a sort.
            place = q.argmax(-1, keepdims=True) if k == 1 else jax.lax.top_k(q, k)[1]
            return jnp.take_along_axis(q, place, -1), index[place]

        index = jnp.arange(rows.shape[1], dtype=jnp.int32).reshape(devices, -1, block)
        parts = jnp.moveaxis(rows.reshape(len(rows), *index.shape), 0, 2)
        on_device = partial(jax.lax.map, best_of_block)
        top = on_each(BATCH_AXES, on_device, (index, parts))  # [devices, blocks, B, W, k]
        # Blocks hold the document in order, so ties still go to the lowest index.
        values, actions = (
            jnp.moveaxis(leaf, (0, 1), (2, 3)).reshape(*leaf.shape[2:4], -1) for leaf in top
        )
        values, place = jax.lax.top_k(values, k)
        return values, jnp.take_along_axis(actions, place, axis=2)

    everywhere = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
    return jax.jit(
        best_chunks, in_shardings=(everywhere, split, everywhere), out_shardings=everywhere
    )


def _scores(
    placement: tuple[str, int, positions.Indents | None],
    searches: tuple[jax.Array, jax.Array, jax.Array],
    chunks: jax.Array,
    index: jax.Array,
) -> jax.Array:
    """Q `[B, W, n]` of chunks `[B, n, 2D]` with the indices `[n]`; `MASKED` if taken or absent.

    Args:
        placement: the kind, its highest position, the draw of "random_published".
    """
    kind, last, indents = placement
    counts, states, taken = searches
    if kind == "relative":
        # Each state has its own.
        where = positions.relative(index[None, None], taken, counts[:, None])
        turned = _turned_back(states, last)
        states = jax.vmap(jax.vmap(lambda one, p: one[p]))(turned, jnp.clip(where, 0, last))
        q = jnp.einsum("bnd,bwnd->bwn", chunks, states, precision=EXACT)
    else:
        if kind != "none":
            where = jnp.broadcast_to(index[None], chunks.shape[:2])
            where = where if indents is None else indents.positions(where)
            chunks = rotate(chunks, jnp.clip(where, 0, last), last)
        q = jnp.einsum("bnd,bwd->bwn", chunks, states, precision=EXACT)
    chosen = (taken[..., None] == index[None, None, None]).any(axis=2)
    gone = chosen | (index[None, None] >= counts[:, None, None])
    return jnp.where(gone, MASKED, q)


def _turned_back(states: jax.Array, last: int) -> jax.Array:
    """States `[B, W, 2D]` rotated back at each of P positions: `[B, W, P, 2D]`.

    <s, R(p)·a> equals <R(-p)·s, a>, and there are few positions.
    """
    every = jnp.arange(last + 1)
    shape = (*states.shape[:2], last + 1, states.shape[-1])
    spread = jnp.broadcast_to(states[:, :, None], shape)
    return rotate(spread, jnp.broadcast_to(every, shape[:3]), last, back=True)
