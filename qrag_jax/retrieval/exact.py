"""Exact search for the highest inner products, over vectors that lie on the devices of a mesh.

Every device searches its own part in blocks; the best of all parts are then compared. All scores at
once would be `[queries, passages]`. Of each block of passages only the highest score of every group
of neighbours is kept, and of all groups the best `plan.groups`. The k best passages are in the k
groups with the highest maxima: were one in another group, k others with scores as high would come
before it. Last, the passages of these groups are scored again, one by one in float32. So the
products of a block may be less exact than the result, if there are more groups than k.

A plain loop of products, `lax.top_k` and a merge takes 0.8 to 1.1 times as long for k = 10, but 2.2
to 3 times for k = 100 by 64 or 512 queries (`approx_max_k` likewise; 200,000 x 384, float32, two
busy cores of an AMD EPYC, 2026-11-30): hits that are fused need 100.

Vectors on the devices may be coarser than those of the files. Then `_CANDIDATES` times k passages
are found with them and scored in float32 by the files on the host: only these have the finer
numbers, and the devices need not hold both.

Ties go to the lowest number everywhere: groups are neighbours in order, and `top_k` takes the first
of equal values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.errors import InputError
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.index_folder import EXACT, open_vectors
from qrag_jax.retrieval.protocol import NONE, Hits, Queries, Where, padded_batch, ranked
from qrag_jax.retrieval.vectors import float_rows, query_vectors
from qrag_jax.runtime.aot import room, shown
from qrag_jax.runtime.mesh import BATCH_AXES, make_mesh
from qrag_jax.runtime.platform import GPU, Platform

FLOAT32, BFLOAT16, INT8 = "float32", "bfloat16", "int8"
STORAGES = {FLOAT32: jnp.float32, BFLOAT16: jnp.bfloat16, INT8: jnp.int8}
_BYTES = {FLOAT32: 4, BFLOAT16: 2, INT8: 1}
_BLOCK_BYTES = 2**28  # that are brought to a device at a time
# Of 100 passages of 200,000 by queries in bfloat16, 0.1 % were not in the first 100 groups, and all
# were in the first 110 (width 1024, drawn at random).
_CANDIDATES = {FLOAT32: 1.0, BFLOAT16: 1.25, INT8: 4.0}
# A training asks for products of cuBLAS, which nothing has to time (`runtime.platform`); but
# that reads a copy of each block. Here products may differ from one process to the next: they only
# find groups, and the scores are computed again by a sum of fixed order.
_GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": True, "xla_gpu_deterministic_ops": False}
_EXAMINED = 2**24  # numbers of vectors that the host reads at a time to score again

# On a processor a block and its scores stay in the caches. On an accelerator a block's product is
# large enough to be at its peak, and its scores are the largest array of the program.
GROUP = 16  # larger ones cost more when they are scored again, smaller ones have more maxima
_CPU_BATCH, _BATCH = 512, 1024
_CPU_BLOCK = 2048
_CPU_SPAN = 2**18  # passages
_SCORES = 2**28  # of a block, in numbers; 1 GiB
_MAXIMA = 2**28  # of a span, likewise
_BLOCKS = 128  # that are written out in one program; so long it takes to compile
_CPU_GATHERED, _GATHERED = 2**23, 2**29  # numbers of vectors that are scored again at a time
_ALIGNED = 256  # rows of two tiles of an accelerator's products, and of 16 groups
NOTHING = -jnp.inf  # the score of a passage that is not there
_COARSE = 16  # neighbouring groups whose maxima are first compared with others


class Plan(NamedTuple):
    """How a part is searched; one program for each plan."""

    k: int  # passages that are kept at most
    groups: int  # groups that are kept
    block: int  # passages scored at a time; whole groups
    span: int  # blocks whose maxima are kept until the best are taken
    at_once: int  # queries whose passages are scored again at a time; divides the batch
    half: bool = False  # the factors of a block's products are bfloat16, else float32
    # Blocks are written out one after the other. A GPU's product then reads its block in place; in
    # a loop it reads a copy.
    unrolled: bool = False


class Part(NamedTuple):
    rows: jax.Array  # float32, bfloat16 or int8 `[R, D]`
    scales: jax.Array | None  # float32 `[R]`, by which rows are multiplied; None: by 1
    allowed: jax.Array  # bool `[R]`; other passages are not found


class Best(NamedTuple):
    """The best passages, or groups, of each query, best first."""

    scores: jax.Array  # float32 `[B, k]`, of groups their maxima; `NOTHING` where there are fewer
    places: jax.Array  # int32 `[B, k]`, rows of the part, or numbers of groups


class ExactIndex:
    """All passages' vectors on the devices of a mesh; see `protocol.VectorIndex`."""

    def __init__(
        self,
        corpus: StoredCorpus,
        vectors: np.ndarray,
        mesh: Mesh | None = None,
        storage: str = FLOAT32,
    ) -> None:
        """`storage`: the numbers on the devices, one of `STORAGES`; int8 has a scale per vector."""
        self.corpus, self.storage, self._vectors = corpus, storage, vectors
        self._mesh = mesh or make_mesh()
        self._on_cpu = Platform.of(self._mesh).on_cpu
        rows = rows_of(len(vectors), self._mesh.size)
        self._layout = Layout(len(vectors), vectors.shape[1], rows, storage)
        self._part = load(vectors, self._layout, self._mesh)
        # Whether the files are finer than what is on the devices.
        self._again = vectors.dtype.itemsize > self._part.rows.dtype.itemsize

    @classmethod
    def open(
        cls,
        folder: Path,
        corpus: StoredCorpus,
        mesh: Mesh | None = None,
        encoder: str | None = None,
        storage: str = "",
    ) -> ExactIndex:
        """`storage`: see `__init__`; "": as the index says."""
        digest = corpus.digest
        said, vectors = open_vectors(folder, engine=EXACT, corpus=digest, encoder=encoder)
        return cls(corpus, vectors, mesh, storage or said.settings.get("storage", FLOAT32))

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        """The k passages with the highest inner products, of those that agree with `where`."""
        query_rows = query_vectors(queries, self._layout.width)
        part = self._part
        if where is not None:
            allowed = on_devices(self.corpus.matching(where), self._layout, self._mesh)
            part = part._replace(allowed=allowed)
        most = _CPU_BATCH if self._on_cpu else _BATCH
        starts = range(0, len(query_rows), most)
        parts = [self._search(query_rows[start : start + most], k, part) for start in starts]
        parts = parts or [ranked(np.zeros((0, 0)), np.zeros((0, 0)), k)]  # there is no query
        return Hits(*(np.concatenate(leaves) for leaves in zip(*parts, strict=True)))

    def vectors(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        return float_rows(self._vectors, numbers)

    def _search(self, query_rows: np.ndarray, k: int, part: Part) -> Hits:
        count = len(query_rows)
        padded = np.zeros((padded_batch(count), query_rows.shape[1]), np.float32)
        padded[:count] = query_rows
        plan = plan_of(self._layout, len(padded), k, again=self._again, on_cpu=self._on_cpu)
        best = make_search(self._mesh, plan, part.scales is not None)(jnp.asarray(padded), part)
        scores, numbers = (np.asarray(leaf)[:count] for leaf in best)
        numbers = np.where(scores == NOTHING, NONE, numbers)
        if self._again:
            scores = self._scored_again(query_rows, numbers)
        return ranked(numbers, scores, k)

    def _scored_again(self, query_rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """float32 `[queries, n]`: the scores by the vectors of the host."""
        scores = np.empty(numbers.shape, np.float32)
        some = max(_EXAMINED // (numbers.shape[1] * query_rows.shape[1]), 1)
        for start in range(0, len(query_rows), some):
            of_queries = np.maximum(numbers[start : start + some], 0)
            rows = float_rows(self._vectors, of_queries)
            of_part = query_rows[start : start + some, :, None]
            scores[start : start + some] = (rows @ of_part)[..., 0]
        return scores


@functools.lru_cache(maxsize=64)
def make_search(mesh: Mesh, plan: Plan, scaled: bool) -> Callable[[jax.Array, Part], Best]:
    """Makes the jitted `(queries [B, D] float32, part) → Best` over all parts, with numbers."""

    def on_device(queries: jax.Array, part: Part) -> Best:
        groups = _best_groups(queries, part, plan).places
        best = _scored_again(queries, part, groups, plan)
        if mesh.size == 1:
            return best
        first = jax.lax.axis_index(BATCH_AXES).astype(jnp.int32) * len(part.rows)
        best = best._replace(places=best.places + first)
        # Devices hold the passages in order, so ties still go to the lowest number.
        gather = functools.partial(jax.lax.all_gather, axis_name=BATCH_AXES, axis=1, tiled=True)
        scores, numbers = map(gather, best)
        scores, place = jax.lax.top_k(scores, min(plan.k, scores.shape[1]))
        return Best(scores, jnp.take_along_axis(numbers, place, axis=1))

    whole, split = PartitionSpec(), PartitionSpec(BATCH_AXES)
    specs: tuple[Any, ...] = (split, split if scaled else None, split)
    parts = Part(*specs)
    over_mesh = jax.shard_map(
        on_device, mesh=mesh, in_specs=(whole, parts), out_specs=whole, check_vma=False
    )
    everywhere = NamedSharding(mesh, whole)
    placed = jax.tree.map(functools.partial(NamedSharding, mesh), parts)
    on_gpu = Platform.of(mesh).kind == GPU
    return jax.jit(
        over_mesh,
        in_shardings=(everywhere, placed),
        out_shardings=everywhere,
        compiler_options=_GPU_OPTIONS if on_gpu else None,
    )


def plan_of(layout: Layout, batch: int, k: int, *, again: bool, on_cpu: bool) -> Plan:
    """How a device searches its part for the k best passages of a batch of queries.

    As many groups are kept as passages, or more where products are coarse; and more passages, if
    the host scores them `again`.
    """
    rows, groups = layout.rows, math.ceil(k * _CANDIDATES[layout.storage])
    if on_cpu:
        block, span, unit = _CPU_BLOCK, _CPU_SPAN, GROUP
    else:
        block = max(_SCORES // batch, -(-rows // _BLOCKS))
        span, unit = max(_MAXIMA // batch, 1) * GROUP, _ALIGNED
    # Equal spans of equal blocks, so that little is searched twice.
    spans = -(-rows // span)
    blocks = -(-rows // (spans * block))
    block = min(-(-rows // (spans * blocks * unit)) * unit, rows)
    k, groups = groups if again else k, min(groups, rows // GROUP)
    # Vectors `[at_once, groups, group, D]` may be many.
    most = (_CPU_GATHERED if on_cpu else _GATHERED) // (groups * GROUP * layout.width)
    return Plan(
        k=k,
        groups=groups,
        block=block,
        span=blocks,
        at_once=min(batch, 1 << (max(most, 1).bit_length() - 1)),
        half=not on_cpu and layout.storage != FLOAT32,
        unrolled=not on_cpu,
    )


# ---------------------------------------------------------------- vectors on the devices


class Layout(NamedTuple):
    passages: int
    width: int
    rows: int  # of each device; those beyond the passages belong to none
    storage: str


def rows_of(count: int, devices: int) -> int:
    """Rows of each device for so many passages: equal parts of whole groups."""
    return -(-max(count, 1) // (devices * GROUP)) * GROUP


def load(vectors: np.ndarray, layout: Layout, mesh: Mesh) -> Part:
    """The vectors on the devices of a mesh; a host reads those of its own devices only.

    They go there block by block, so that the host never holds a device's part
    (`jax.make_array_from_callback` would ask for it whole, which may be all that a host has).
    """
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    total = (layout.rows * mesh.size,)
    places = sharding.addressable_devices_indices_map(total)
    needed = layout.rows * layout.width * _BYTES[layout.storage]
    known = [free for place in places if (free := room(place, len(places))) is not None]
    free = min(known, default=needed)
    if needed > free:
        helps = [f"storage={name}" for name in STORAGES if _BYTES[name] < _BYTES[layout.storage]]
        raise InputError(
            f"{layout.passages:,} vectors of {layout.width} numbers in {layout.storage} need "
            f"{shown(needed)} on each device, but {shown(free)} are free; "
            f"{' or '.join([*helps, 'more devices'])} would help."
        )
    pieces = [
        _of_device(vectors, layout, device, at[0].start or 0)
        for device, at in places.items()
        if at is not None  # as JAX declares it
    ]
    rows, scales = map(list, zip(*pieces, strict=True))
    together = jax.make_array_from_single_device_arrays
    return Part(
        together((*total, layout.width), sharding, rows),
        together(total, sharding, scales) if layout.storage == INT8 else None,
        on_devices(np.ones(layout.passages, bool), layout, mesh),
    )


def on_devices(allowed: np.ndarray, layout: Layout, mesh: Mesh) -> jax.Array:
    """bool `[rows of all devices]`."""
    whole = np.zeros(layout.rows * mesh.size, bool)
    whole[: layout.passages] = allowed
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    return jax.make_array_from_callback(whole.shape, sharding, lambda at: whole[at])


def to_int8(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors as int8 `[n, D]` and float32 scales `[n]`: the largest number becomes 127."""
    rows = rows.astype(np.float32)
    scales = np.abs(rows).max(axis=1, initial=0) / np.float32(127)
    return np.rint(rows / np.where(scales == 0, 1, scales)[:, None]).astype(np.int8), scales


def _of_device(
    vectors: np.ndarray, layout: Layout, device: jax.Device, start: int
) -> tuple[jax.Array, jax.Array]:
    """Rows `[R, D]` and scales `[R]` of one device."""
    dtype = STORAGES[layout.storage]
    size = max(_BLOCK_BYTES // (layout.width * 4), 1)
    stop = min(start + layout.rows, layout.passages)
    with jax.default_device(device):
        rows = jnp.zeros((layout.rows, layout.width), dtype)
        scales = jnp.zeros(layout.rows, jnp.float32)
        for first in range(start, stop, size):
            block = vectors[first : min(first + size, stop)]
            if layout.storage == INT8:
                block, of_block = to_int8(block)
                scales = _put(scales, of_block, first - start)
            rows = _put(rows, block.astype(dtype), first - start)
    return rows, scales


@functools.partial(jax.jit, donate_argnums=0)
def _put(whole: jax.Array, block: jax.Array, first: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, block, first, 0)


# ---------------------------------------------------------------- the search of one part


def _best_groups(queries: jax.Array, part: Part, plan: Plan) -> Best:
    rows, in_block = len(part.rows), plan.block // GROUP
    spans = -(-rows // (plan.block * plan.span))
    factors = queries.astype(jnp.bfloat16 if plan.half else jnp.float32)
    library: Any = np if plan.unrolled else jnp

    def of_span(best: Best, number) -> tuple[Best, None]:
        blocks = library.arange(plan.span, dtype=np.int32)
        first = (number * plan.span + blocks) * plan.block
        # The last blocks begin early enough to be whole; what was seen before is not seen again.
        starts = library.minimum(first, rows - plan.block)
        groups = starts[:, None] // GROUP + np.arange(in_block, dtype=np.int32)[None]
        new = groups * GROUP >= first[:, None]
        if plan.unrolled:
            pieces: list[jax.Array] = []
            after = factors
            for start in starts:
                if pieces:  # one begins when the last has ended, for their scores are many
                    after, pieces[-1] = jax.lax.optimization_barrier((after, pieces[-1]))
                pieces.append(_maxima(after, _slice(part, int(start), plan.block), plan))
            pieces = [
                piece if here.all() else jnp.where(here[None], piece, NOTHING)
                for piece, here in zip(pieces, new, strict=True)
            ]
        else:
            maxima = jax.lax.map(
                lambda start: _maxima(factors, _slice(part, start, plan.block), plan), starts
            )
            piece = maxima.swapaxes(0, 1).reshape(len(queries), -1)
            pieces = [jnp.where(new.reshape(1, -1), piece, NOTHING)]
        numbers = jnp.asarray(groups.reshape(-1))
        scores, places = _top(pieces, plan.groups)
        # All groups of the span come behind those so far.
        scores = jnp.concatenate([best.scores, scores], axis=1)
        places = jnp.concatenate([best.places, numbers[places]], axis=1)
        scores, at = jax.lax.top_k(scores, plan.groups)
        return Best(scores, jnp.take_along_axis(places, at, axis=1)), None

    shape = (len(queries), plan.groups)
    best = Best(jnp.full(shape, NOTHING), jnp.zeros(shape, jnp.int32))
    if plan.unrolled:
        for number in range(spans):
            best, _ = of_span(best, number)
    else:
        best, _ = jax.lax.scan(of_span, best, jnp.arange(spans, dtype=jnp.int32))
    # A group without any passage may stand there twice.
    return best._replace(places=jnp.where(best.scores == NOTHING, -1, best.places))


def _maxima(queries: jax.Array, block: Part, plan: Plan) -> jax.Array:
    """The highest score of every group of a block, `[B, groups of a block]`."""
    rows = block.rows
    if block.scales is not None:  # else XLA converts the int8 of all blocks at once
        rows = jax.lax.optimization_barrier(rows)
    scores = jnp.einsum(
        "bd,nd->bn",
        queries,
        rows.astype(queries.dtype),
        # Of float32 factors in float32, on all devices.
        precision=None if plan.half else jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    if block.scales is not None:
        scores = scores * block.scales[None]
    scores = jnp.where(block.allowed[None], _unsigned_zero(scores), NOTHING)
    return scores.reshape(len(queries), -1, GROUP).max(-1)


def _top(pieces: Sequence[jax.Array], kept: int) -> Best:
    """The best of P pieces `[B, n]` and their places in all of them, from the lowest place on.

    Of many values, first the best groups of neighbours are found, as of the passages: a GPU sorts
    them all. Pieces are not joined: they are large.
    """
    count = pieces[0].shape[1]
    coarse = -(-count // _COARSE)
    if kept < coarse * len(pieces):
        short = ((0, 0), (0, -count % _COARSE))
        pieces = [jnp.pad(piece, short, constant_values=NOTHING) for piece in pieces]
        maxima = [piece.reshape(len(piece), coarse, _COARSE).max(-1) for piece in pieces]
        groups = _top([jnp.concatenate(maxima, axis=1)], kept).places
        inside = jnp.arange(_COARSE, dtype=groups.dtype)[None, None]
        members = groups[..., None] * _COARSE + inside
        piece, inside = jnp.divmod(members.reshape(len(groups), -1), coarse * _COARSE)
        values = jnp.full(piece.shape, NOTHING)
        for at, one in enumerate(pieces):
            values = jnp.where(piece == at, jnp.take_along_axis(one, inside, axis=1), values)
        places = piece * count + jnp.minimum(inside, count - 1)
    else:
        values = jnp.concatenate(pieces, axis=1)
        places = jnp.broadcast_to(jnp.arange(values.shape[1], dtype=jnp.int32), values.shape)
    order = jnp.sort(jax.lax.top_k(values, min(kept, values.shape[1]))[1], axis=1)
    return Best(*(jnp.take_along_axis(a, order, axis=1) for a in (values, places)))


def _scored_again(queries: jax.Array, part: Part, groups: jax.Array, plan: Plan) -> Best:
    """The best passages of the groups `[B, groups]`, -1 where there is none."""

    def of_query(query_and_groups) -> Best:
        query, chosen = query_and_groups
        chosen = jnp.sort(chosen)
        inside = jnp.arange(GROUP, dtype=jnp.int32)
        places = (jnp.maximum(chosen, 0)[:, None] * GROUP + inside[None]).reshape(-1)
        scores = (part.rows[places].astype(jnp.float32) * query[None]).sum(-1)
        if part.scales is not None:
            scores = scores * part.scales[places]
        there = part.allowed[places] & jnp.repeat(chosen >= 0, GROUP)
        scores = jnp.where(there, _unsigned_zero(scores), NOTHING)
        values, at = jax.lax.top_k(scores, min(plan.k, len(scores)))
        return Best(values, places[at])

    if plan.at_once == len(queries):
        return jax.vmap(of_query)((queries, groups))
    return jax.lax.map(of_query, (queries, groups), batch_size=plan.at_once)


def _unsigned_zero(scores: jax.Array) -> jax.Array:
    """0 for -0, which sorts take to be less."""
    return jnp.where(scores == 0, 0.0, scores)


def _slice(part: Part, start: jax.Array | int, size: int) -> Part:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), part)
