"""Where a chunk stands in its document, as the integer its embedding is rotated at.

Kinds (Q-RAG, arXiv 2511.07328):
- `none`: no chunk is rotated.
- `absolute`: 0, 1, 2, …
- `random`: absolute, but in training every chunk lies 1 to `MOST_INDENT` further than the one
  before, drawn anew for each episode, so that later positions are known from short documents.
- `random_published`: as Q-RAG's code has its "random", in training and in evaluation. A document
  of n chunks is cut into five parts at four random places, and part j lies d_j further than
  `absolute`, 0 ≤ d_1 ≤ … ≤ d_5 < 2000 - n drawn and sorted; documents hold 2,000 chunks at most.
  In evaluation the draw depends on the question and n alone, so that it can be repeated.
- `relative`: chunks are numbered within the intervals that the chunks taken so far cut the
  document into. Interval k runs from 20·k to 20·k + 18 however many chunks it holds, so documents
  of any length look alike.
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
MOST_INDENT = 8  # gap between neighbours under `random`, at most
MOST_CHUNKS = 2000  # of a document under `random_published` (`max_chunks_count`)
PARTS = 5  # with an indent of its own each (`num_splits`)


def check_chunks(kind: str, chunks: int) -> None:
    """Refuses documents that are longer than their positions reach.

    Raises:
        InputError: a document of `chunks` chunks has no positions of this kind.
    """
    if kind == RANDOM_PUBLISHED and chunks > MOST_CHUNKS:
        raise InputError(
            f"config.env.positions {RANDOM_PUBLISHED} places documents of at most {MOST_CHUNKS} "
            f"chunks, but one has {chunks}; give random or relative, or shorter documents."
        )


def last_position(kind: str, chunks: int, max_steps: int) -> int:
    """The highest position that a document of `chunks` chunks can show."""
    if kind == "none":
        return 0
    if kind == "relative":
        return STEP * max_steps + SPAN
    if kind == RANDOM_PUBLISHED:
        return MOST_CHUNKS - 1
    return (chunks - 1) * (MOST_INDENT if kind == "random" else 1)


def relative(index: jax.Array, taken: jax.Array, chunks: jax.Array) -> jax.Array:
    """Positions of the chunks `index` given those taken so far.

    With i_1 < … < i_k taken, [0, i_1) is interval 0, [i_1, i_2) interval 1, …, [i_k, chunks) the
    last; the m chunks of interval j lie at the integer part of 20·j + linspace(0, 18, m).

    Args:
        index: `[..., N]` chunk indices, below `chunks`.
        taken: `[..., T]` distinct indices of chunks taken, in any order, -1 where none.
        chunks: `[...]` chunks of the document.

    Returns:
        `[..., N]` int32. Exact for documents of up to 100 million chunks.
    """
    chunks = jnp.asarray(chunks, jnp.int32)[..., None]
    cuts = jnp.where(taken < 0, chunks, taken)  # what is not taken cuts nothing off
    # Before or at each chunk: how many cuts, the last of them; behind it: the next one.
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
    """Positions `[B, C]` of all chunks: 0, 1, 2, …; with keys `[B]`, behind random indents."""
    if keys is None:
        return jnp.broadcast_to(jnp.arange(chunks), (episodes, chunks))

    def indents(key: jax.Array) -> jax.Array:
        gaps = jax.random.randint(key, (chunks,), 1, MOST_INDENT + 1)
        return jnp.cumsum(gaps) - gaps[0]

    return jax.vmap(indents)(keys)


class Indents(NamedTuple):
    """The draw of `random_published` for B documents.

    cuts `[B, PARTS - 1]`: ascending indices at which a part begins; one that is not below a
    document's chunks cuts nothing. by `[B, PARTS]`: positions that each part is moved by.
    """

    cuts: jax.Array
    by: jax.Array

    def positions(self, index: jax.Array) -> jax.Array:
        """`[B, N]` chunk indices → their positions."""
        part = (self.cuts[:, None, :] <= index[:, :, None]).sum(-1)
        return index + jnp.take_along_axis(self.by, part, axis=1)


def draw_indents(keys: jax.Array, chunks: jax.Array) -> Indents:
    """Cuts and indents of documents with `chunks` `[B]` chunks; keys `[B]`.

    The cuts are any four of 1, …, n - 2, all as likely, fewer where there are not four; an indent
    is any of 0, …, 1999 - n, before they are sorted, 0 where n is 2,000.
    """

    def one(key: jax.Array, count: jax.Array) -> Indents:
        of_cuts, of_indents = jax.random.split(key)
        places = count - 2
        cuts: list[jax.Array] = []
        # Floyd's way to a random set: the k-th draw is below `top`, or `top` if that is in it.
        for number, own in enumerate(jax.random.split(of_cuts, PARTS - 1)):
            top = places - (PARTS - 1) + number
            drawn = jax.random.randint(own, (), 0, jnp.maximum(top, 0) + 1)
            known = jnp.array([False]) if not cuts else jnp.stack(cuts) == drawn + 1
            cuts.append(jnp.where(top < 0, count, jnp.where(known.any(), top, drawn) + 1))
        indents = jax.random.randint(of_indents, (PARTS,), 0, jnp.maximum(MOST_CHUNKS - count, 1))
        return Indents(jnp.sort(jnp.stack(cuts)), jnp.sort(indents))

    return jax.vmap(one)(keys, jnp.asarray(chunks, jnp.int32))


def evaluation_keys(question: jax.Array | np.ndarray, lengths: jax.Array | np.ndarray) -> jax.Array:
    """The keys `[B]` of an evaluation's draws: of equal questions the same, in any batch.

    Args:
        question: `[B, L]` token ids. lengths: `[B]` of each; what lies beyond is not read.
    """
    tokens = jnp.asarray(question).astype(jnp.uint32) + 1
    # A polynomial in an odd number, modulo 2^32.
    powers = jnp.cumprod(jnp.full(tokens.shape[1], 2_654_435_761, jnp.uint32), dtype=jnp.uint32)
    inside = jnp.arange(tokens.shape[1]) < lengths[:, None]
    digests = jnp.where(inside, tokens * powers, 0).sum(-1, dtype=jnp.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), digests)
