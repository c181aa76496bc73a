"""The best passages of one device's part of the vectors, exactly, in blocks.

All scores at once would be `[queries, passages]`. Of each block of passages only the highest score
of every group of neighbours is kept, and of all groups the best `plan.groups`. The k best passages
are in the k groups with the highest maxima: were one in another group, k others with scores as high
would come before it. Last, the passages of these groups are scored again, one by one in float32.
So the products of a block may be less exact than the result, if there are more groups than k.

Ties go to the lowest number everywhere: groups are neighbours in order, and `top_k` takes the first
of equal values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

EXACT = jax.lax.Precision.HIGHEST  # products of float32 factors in float32, on all devices
NOTHING = -jnp.inf  # the score of a passage that is not there
_COARSE = 16  # neighbouring groups whose maxima are first compared with others


class Plan(NamedTuple):
    """How a part is searched; one program for each plan.

    unrolled: blocks are written out one after the other. A GPU's product then reads its block in
        place; in a loop it reads a copy.
    """

    k: int  # passages that are kept at most
    groups: int  # groups that are kept
    group: int  # passages of a group; it divides the part
    block: int  # passages scored at a time; whole groups
    span: int  # blocks whose maxima are kept until the best are taken
    gathered: int  # passages that are scored again at a time, of all queries together
    half: bool = False  # the factors of a block's products are bfloat16, else float32
    unrolled: bool = False


class Part(NamedTuple):
    """The vectors of a device."""

    rows: jax.Array  # float32, bfloat16 or int8 `[R, D]`
    scales: jax.Array | None  # float32 `[R]`, by which rows are multiplied; None: by 1
    allowed: jax.Array  # bool `[R]`; other passages are not found


class Best(NamedTuple):
    """The best passages of each query, best first."""

    scores: jax.Array  # float32 `[B, k]`; `NOTHING` where there are fewer passages
    places: jax.Array  # int32 `[B, k]`, rows of the part


class _Groups(NamedTuple):
    """The best groups of each query: maxima and numbers `[B, groups]`."""

    maxima: jax.Array
    numbers: jax.Array


def best_of_part(queries: jax.Array, part: Part, plan: Plan) -> Best:
    """The best passages of a part.

    Args:
        queries: float32 `[B, D]`.
    """
    return _scored_again(queries, part, _best_groups(queries, part, plan).numbers, plan)


def _best_groups(queries: jax.Array, part: Part, plan: Plan) -> _Groups:
    rows, in_block = len(part.rows), plan.block // plan.group
    spans = -(-rows // (plan.block * plan.span))
    factors = queries.astype(jnp.bfloat16 if plan.half else jnp.float32)
    library: Any = np if plan.unrolled else jnp

    def of_block(carry, start):
        return carry, _maxima(factors, _slice(part, start, plan.block), plan)

    def of_span(best: _Groups, number) -> tuple[_Groups, None]:
        blocks = library.arange(plan.span, dtype=np.int32)
        first = (number * plan.span + blocks) * plan.block
        # The last blocks begin early enough to be whole; what was seen before is not seen again.
        starts = library.minimum(first, rows - plan.block)
        groups = starts[:, None] // plan.group + np.arange(in_block, dtype=np.int32)[None]
        new = groups * plan.group >= first[:, None]
        if plan.unrolled:
            pieces = [
                piece if here.all() else jnp.where(here[None], piece, NOTHING)
                for piece, here in zip(_in_turn(factors, part, starts, plan), new, strict=True)
            ]
        else:
            _, maxima = jax.lax.scan(of_block, (), starts)
            piece = maxima.swapaxes(0, 1).reshape(len(queries), -1)
            pieces = [jnp.where(new.reshape(1, -1), piece, NOTHING)]
        return _merged(best, pieces, jnp.asarray(groups.reshape(-1)), plan.groups), None

    shape = (len(queries), plan.groups)
    best = _Groups(jnp.full(shape, NOTHING), jnp.zeros(shape, jnp.int32))
    if plan.unrolled:
        for number in range(spans):
            best, _ = of_span(best, number)
    else:
        best, _ = jax.lax.scan(of_span, best, jnp.arange(spans, dtype=jnp.int32))
    # A group without any passage may stand there twice.
    return best._replace(numbers=jnp.where(best.maxima == NOTHING, -1, best.numbers))


def _maxima(queries: jax.Array, block: Part, plan: Plan) -> jax.Array:
    """The highest score of every group of a block, `[B, groups of a block]`."""
    scores = jnp.einsum(
        "bd,nd->bn",
        queries,
        block.rows.astype(queries.dtype),
        precision=None if plan.half else EXACT,
        preferred_element_type=jnp.float32,
    )
    if block.scales is not None:
        scores = scores * block.scales[None]
    scores = jnp.where(block.allowed[None], _unsigned_zero(scores), NOTHING)
    return scores.reshape(len(queries), -1, plan.group).max(-1)


def _in_turn(factors: jax.Array, part: Part, starts: np.ndarray, plan: Plan) -> list[jax.Array]:
    """The maxima of each block. One begins when the last has ended, for their scores are many."""
    found: list[jax.Array] = []
    for start in starts:
        if found:
            factors, found[-1] = jax.lax.optimization_barrier((factors, found[-1]))
        found.append(_maxima(factors, _slice(part, int(start), plan.block), plan))
    return found


def _merged(best: _Groups, maxima: Sequence[jax.Array], numbers: jax.Array, kept: int) -> _Groups:
    """The best groups of those so far and of a span, all of which come behind them.

    Args:
        maxima: `[B, G]` of each of P pieces of the span.
        numbers: `[P * G]`, those of the groups.
    """
    count = maxima[0].shape[1]
    coarse = -(-count // _COARSE)
    if kept < coarse * len(maxima):
        maxima = [_whole(piece) for piece in maxima]
        by_coarse = [piece.reshape(len(piece), coarse, _COARSE).max(-1) for piece in maxima]
        place = _members(_best_places(jnp.concatenate(by_coarse, axis=1), kept))
        piece, inside = place // (coarse * _COARSE), place % (coarse * _COARSE)
        found = numbers[piece * count + jnp.minimum(inside, count - 1)]
        values = jnp.full(place.shape, NOTHING)
        for at, one in enumerate(maxima):  # pieces are not joined: they are large
            values = jnp.where(piece == at, jnp.take_along_axis(one, inside, axis=1), values)
    else:
        values = jnp.concatenate(maxima, axis=1)
        found = jnp.broadcast_to(numbers[None], values.shape)
    values = jnp.concatenate([best.maxima, values], axis=1)
    found = jnp.concatenate([best.numbers, found], axis=1)
    values, place = jax.lax.top_k(values, kept)
    return _Groups(values, jnp.take_along_axis(found, place, axis=1))


def _best_places(values: jax.Array, kept: int) -> jax.Array:
    """The places of the best of `[B, n]`, `[B, kept]` from the lowest on.

    Of many values, first the best groups are found, as of the passages: a GPU sorts them all.
    """
    count = values.shape[1]
    coarse = -(-count // _COARSE)
    if kept >= coarse:
        return jnp.sort(jax.lax.top_k(values, kept)[1], axis=1)
    padded = _whole(values)
    maxima = padded.reshape(len(values), coarse, _COARSE).max(-1)
    members = _members(_best_places(maxima, kept))
    _, at = jax.lax.top_k(jnp.take_along_axis(padded, members, axis=1), kept)
    best = jnp.take_along_axis(members, at, axis=1)
    return jnp.sort(jnp.minimum(best, count - 1), axis=1)


def _whole(values: jax.Array) -> jax.Array:
    """`[B, n]` with as many further places as make whole coarse groups."""
    short = -values.shape[1] % _COARSE
    return jnp.pad(values, ((0, 0), (0, short)), constant_values=NOTHING) if short else values


def _members(groups: jax.Array) -> jax.Array:
    """The places of the members of coarse groups `[B, n]`, in their order."""
    inside = jnp.arange(_COARSE, dtype=groups.dtype)
    return (groups[..., None] * _COARSE + inside[None, None]).reshape(len(groups), -1)


def _scored_again(queries: jax.Array, part: Part, groups: jax.Array, plan: Plan) -> Best:
    """The best passages of the groups `[B, groups]`, -1 where there is none."""
    # Some queries at a time: vectors `[B, groups, group, D]` may be many.
    chunk = len(queries)
    while chunk > 1 and chunk % 2 == 0 and chunk * plan.groups * plan.group > plan.gathered:
        chunk //= 2

    def of_chunk(queries_and_groups) -> Best:
        some, chosen = queries_and_groups
        chosen = jnp.sort(chosen, axis=1)
        inside = jnp.arange(plan.group, dtype=jnp.int32)
        places = (jnp.maximum(chosen, 0)[..., None] * plan.group + inside[None, None]).reshape(
            len(some), -1
        )
        there = jnp.repeat(chosen >= 0, plan.group, axis=1)
        scores = (part.rows[places].astype(jnp.float32) * some[:, None]).sum(-1)
        if part.scales is not None:
            scores = scores * part.scales[places]
        scores = jnp.where(part.allowed[places] & there, _unsigned_zero(scores), NOTHING)
        kept = min(plan.k, scores.shape[1])
        values, at = jax.lax.top_k(scores, kept)
        return Best(values, jnp.take_along_axis(places, at, axis=1))

    if chunk == len(queries):
        return of_chunk((queries, groups))
    best = jax.lax.map(
        of_chunk,
        (queries.reshape(-1, chunk, queries.shape[1]), groups.reshape(-1, chunk, plan.groups)),
    )
    return Best(*(leaf.reshape(len(queries), -1) for leaf in best))


def _unsigned_zero(scores: jax.Array) -> jax.Array:
    """0 for -0, which sorts take to be less."""
    return jnp.where(scores == 0, 0.0, scores)


def _slice(part: Part, start: jax.Array | int, size: int) -> Part:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), part)
