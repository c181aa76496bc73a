"""Where a chunk stands in its document, as the integer its embedding is rotated at.

Kinds (Q-RAG, arXiv 2511.07328):
- `none`: no chunk is rotated.
- `absolute`: 0, 1, 2, …
- `random`: absolute, but in training every chunk lies 1 to `MOST_INDENT` further than the one
  before, drawn anew for each episode, so that later positions are known from short documents.
- `relative`: chunks are numbered within the intervals that the chunks taken so far cut the
  document into. Interval k runs from 20·k to 20·k + 18 however many chunks it holds, so documents
  of any length look alike.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

KINDS = ("none", "absolute", "random", "relative")
STEP = 20  # positions from the start of one interval to the start of the next
SPAN = 18  # int(0.9·STEP): the position of an interval's last chunk within it
MOST_INDENT = 8  # gap between neighbours under `random`, at most


def last_position(kind: str, chunks: int, max_steps: int) -> int:
    """The highest position that a document of `chunks` chunks can show."""
    if kind == "none":
        return 0
    if kind == "relative":
        return STEP * max_steps + SPAN
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
