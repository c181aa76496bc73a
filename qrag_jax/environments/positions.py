"""Positions of chunks: the integer at which the embedding of a chunk is rotated.

Kinds (Q-RAG, arXiv 2511.07328):
- `none`: no chunk is rotated.
- `absolute`: 0, 1, 2, …
- `random`: as `absolute`, but in training every chunk lies 1 to `MOST_INDENT` positions after the
  previous one. The gaps are drawn again for each episode, so that training on short documents also
  meets late positions.
- `random_published`: the "random" of Q-RAG's code, in training and in evaluation. A document of n
  chunks is cut into five parts at four random places, and part j is moved by d_j positions. The
  moves 0 ≤ d_1 ≤ … ≤ d_5 < 2000 - n are drawn and sorted; documents have at most 2,000 chunks. In
  evaluation the draw depends only on the question and n, so that it can be repeated.
- `relative`: the chunks taken so far cut the document into intervals. The positions in interval k
  run from 20·k to 20·k + 18, however many chunks it has, so documents of any length look alike.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.errors import InputError

RANDOM_PUBLISHED = "random_published"
KINDS = ("none", "absolute", "random", RANDOM_PUBLISHED, "relative")
STEP = 20  # positions from the start of one interval to the start of the next
SPAN = 18  # int(0.9·STEP): the position of an interval's last chunk within it
MOST_INDENT = 8  # largest gap between neighbours under `random`
MOST_CHUNKS = 2000  # most chunks of a document under `random_published` (`max_chunks_count`)
PARTS = 5  # of a document, each with its own indent (`num_splits`)


def check_chunks(kind: str, chunks: int) -> None:
    """Refuses documents that have more chunks than there are positions."""
    if kind == RANDOM_PUBLISHED and chunks > MOST_CHUNKS:
        raise InputError(f"config.env.positions={kind} has no {chunks} chunks; give random.")


def last_position(kind: str, chunks: int, max_steps: int) -> int:
    """The highest position that a chunk can have in a document of `chunks` chunks."""
    if kind == "none":
        return 0
    if kind == "relative":
        return STEP * max_steps + SPAN
    if kind == RANDOM_PUBLISHED:
        return MOST_CHUNKS - 1
    return (chunks - 1) * (MOST_INDENT if kind == "random" else 1)


def relative(index: jax.Array, taken: jax.Array, chunks: jax.Array) -> jax.Array:
    """Positions of the chunks `index` given those taken so far.

    Let i_1 < … < i_k be the chunks taken. Interval 0 is [0, i_1), interval 1 is [i_1, i_2), …, and
    the last one is [i_k, chunks). The m chunks of interval j have the positions
    ⌊20·j + linspace(0, 18, m)⌋.

    Args:
        index: `[..., N]` chunk indices, below `chunks`.
        taken: `[..., T]` distinct indices of chunks taken, in any order, -1 where none.
        chunks: `[...]` chunks of the document.

    Returns:
        `[..., N]` int32. Exact for documents of up to 100 million chunks.
    """
    chunks = jnp.asarray(chunks, jnp.int32)[..., None]
    cuts = jnp.where(taken < 0, chunks, taken)  # an empty slot cuts nothing off
    # For each chunk: the number of cuts up to it, the last one of them, and the next cut after it.
    before = cuts[..., None, :] <= index[..., :, None]
    behind = ~before
    interval = before.sum(-1)
    start = jnp.where(before, cuts[..., None, :], 0).max(-1, initial=0)
    end = jnp.where(behind, cuts[..., None, :], chunks[..., None]).min(
        -1, initial=jnp.iinfo(jnp.int32).max, where=behind
    )
    end = jnp.minimum(end, chunks)
    place, gaps = index - start, jnp.maximum(end - start - 1, 1)
    return STEP * interval + SPAN * place // gaps


def absolute(keys: jax.Array | None, episodes: int, chunks: int) -> jax.Array:
    """Positions `[B, C]` of all chunks: 0, 1, 2, …, or with keys `[B]` at random gaps."""
    if keys is None:
        return jnp.broadcast_to(jnp.arange(chunks), (episodes, chunks))

    def indents(key: jax.Array) -> jax.Array:
        gaps = jax.random.randint(key, (chunks,), 1, MOST_INDENT + 1)
        return jnp.cumsum(gaps) - gaps[0]

    return jax.vmap(indents)(keys)


class Indents(NamedTuple):
    # `[B, PARTS - 1]`, ascending indices at which a part begins. A cut that is not below the
    # document's number of chunks has no effect.
    cuts: jax.Array
    by: jax.Array  # `[B, PARTS]`, number of positions by which each part is moved

    def positions(self, index: jax.Array) -> jax.Array:
        part = (self.cuts[:, None, :] <= index[:, :, None]).sum(-1)
        return index + jnp.take_along_axis(self.by, part, axis=1)


def draw_indents(keys: jax.Array, chunks: jax.Array) -> Indents:
    """Cuts and indents of documents with `chunks` `[B]` chunks; keys `[B]`.

    The cuts are four of 1, …, n - 2, all choices equally likely; if there are not four, all of
    them. The indents are drawn from 0, …, 1999 - n and then sorted; they are 0 if n is 2,000.
    """

    def one(key: jax.Array, count: jax.Array) -> Indents:
        of_cuts, of_indents = jax.random.split(key)
        places = count - 2
        cuts: list[jax.Array] = []
        # Floyd's algorithm for a random set: draw up to `top`; if the set has the draw, take `top`.
        for number, part_key in enumerate(jax.random.split(of_cuts, PARTS - 1)):
            top = places - (PARTS - 1) + number
            drawn = jax.random.randint(part_key, (), 0, jnp.maximum(top, 0) + 1)
            known = jnp.array([False]) if not cuts else jnp.stack(cuts) == drawn + 1
            cuts.append(jnp.where(top < 0, count, jnp.where(known.any(), top, drawn) + 1))
        indents = jax.random.randint(of_indents, (PARTS,), 0, jnp.maximum(MOST_CHUNKS - count, 1))
        return Indents(jnp.sort(jnp.stack(cuts)), jnp.sort(indents))

    return jax.vmap(one)(keys, jnp.asarray(chunks, jnp.int32))


def evaluation_keys(question: jax.Array | np.ndarray, lengths: jax.Array | np.ndarray) -> jax.Array:
    """The PRNG keys `[B]` of an evaluation's draws: equal questions have equal keys in any batch.

    Of the token ids `[B, L]`, those after the questions' lengths `[B]` are not read.
    """
    tokens = jnp.asarray(question).astype(jnp.uint32) + 1
    # A polynomial hash in an odd number, modulo 2^32.
    powers = jnp.cumprod(jnp.full(tokens.shape[1], 2_654_435_761, jnp.uint32), dtype=jnp.uint32)
    inside = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    digests = jnp.where(inside, tokens * powers[None], 0).sum(-1, dtype=jnp.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), digests)
