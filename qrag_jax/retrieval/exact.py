"""Exact search for the highest inner products, over vectors that lie on the devices of a mesh.

Every device searches its own part (`top_groups`); the best of all parts are then compared. Vectors
on the devices may be coarser than those of the files. Then `candidates` times k passages are found
with them and scored in float32 by the files on the host: only these have the finer numbers, and the
devices need not hold both.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.errors import InputError
from qrag_jax.retrieval.protocol import NONE, Corpus, Hits, Queries, Where, check_k, ranked
from qrag_jax.retrieval.top_groups import NOTHING, Best, Part, Plan, best_of_part
from qrag_jax.retrieval.vectors import (
    Vectors,
    check_finite,
    of_passages,
    open_vectors,
    query_vectors,
)
from qrag_jax.runtime.aot import room, shown
from qrag_jax.runtime.mesh import BATCH_AXES, make_mesh
from qrag_jax.runtime.platform import GPU, Platform

ENGINE = "exact"
FLOAT32, BFLOAT16, INT8 = "float32", "bfloat16", "int8"
STORAGES = (FLOAT32, BFLOAT16, INT8)
_BYTES = {FLOAT32: 4, BFLOAT16: 2, INT8: 1}
_BLOCK_BYTES = 2**28  # that are brought to a device at a time
# Of 100 passages of 200,000 by queries in bfloat16, 0.1 % were not in the first 100 groups, and all
# were in the first 110 (width 1024, drawn at random).
_CANDIDATES = {FLOAT32: 1.0, BFLOAT16: 1.25, INT8: 4.0}
# A training asks for products of cuBLAS, which nothing has to time (`runtime.platform`); but
# that reads a copy of each block. Here products may differ from one process to the next: they only
# find groups, and the scores are computed anew by a sum of fixed order.
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


@dataclasses.dataclass(frozen=True)
class ExactSettings:
    """What may be chosen of an exact search.

    Attributes:
        storage: numbers on the devices: "float32", "bfloat16" or "int8" with a scale per vector.
    """

    storage: str = FLOAT32

    def candidates_of(self, k: int) -> int:
        """The number found by coarse numbers, and scored again by fine ones, for k hits."""
        return math.ceil(k * _CANDIDATES[self.storage])


class ExactIndex:
    """All passages' vectors on the devices of a mesh; see `protocol.VectorIndex`."""

    def __init__(
        self,
        corpus: Corpus,
        vectors: np.ndarray | Vectors,
        mesh: Mesh | None = None,
        settings: ExactSettings | None = None,
        encoder: str = "",
    ) -> None:
        self._vectors = vectors = of_passages(vectors, len(corpus))
        self.corpus, self.settings, self.encoder = corpus, settings or ExactSettings(), encoder
        self._mesh = mesh or make_mesh()
        self._on_cpu = Platform.of(self._mesh).on_cpu
        rows = rows_of(len(vectors), self._mesh.size)
        self._layout = Layout(len(vectors), vectors.width, rows, self.settings.storage)
        working = working_bytes(self._layout, self._on_cpu)
        self._part = load(vectors, self._layout, self._mesh, working)
        # Whether the files are finer than what is on the devices.
        self._again = np.dtype(vectors.dtype).itemsize > self._part.rows.dtype.itemsize

    @classmethod
    def open(
        cls, folder: Path, corpus: Corpus, mesh: Mesh | None = None, encoder: str | None = None
    ) -> ExactIndex:
        corpus_of = corpus.digest
        said, vectors = open_vectors(folder, engine=ENGINE, corpus=corpus_of, encoder=encoder)
        return cls(corpus, vectors, mesh, ExactSettings(**said.settings), said.encoder)

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        """The k passages with the highest inner products, of those that agree with `where`."""
        given = query_vectors(queries, self._layout.width)
        check_k(k)
        part = self._part
        if where is not None:
            allowed = on_devices(self.corpus.matching(where), self._layout, self._mesh)
            part = part._replace(allowed=allowed)
        most = _CPU_BATCH if self._on_cpu else _BATCH
        found = [
            self._search(given[start : start + most], k, part)
            for start in range(0, max(len(given), 1), most)
        ]
        return Hits(*(np.concatenate(leaves) for leaves in zip(*found, strict=True)))

    def vectors(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """float32 `[len(numbers), width]`: the passages' vectors as they were given."""
        return self._vectors.rows(numbers)

    def _search(self, given: np.ndarray, k: int, part: Part) -> Hits:
        if not len(given):
            return Hits(np.zeros((0, k), np.int64), np.zeros((0, k), np.float32))
        padded = np.zeros((padded_batch(len(given)), given.shape[1]), np.float32)
        padded[: len(given)] = given
        groups = self.settings.candidates_of(k)
        kept = groups if self._again else k
        plan = plan_of(self._layout, len(padded), kept, groups, self._on_cpu)
        best = make_search(self._mesh, plan, part.scales is not None)(jnp.asarray(padded), part)
        scores, numbers = (np.asarray(leaf)[: len(given)] for leaf in best)
        numbers = np.where(scores == NOTHING, NONE, numbers)
        if self._again:
            scores = self._scored_again(given, numbers)
        return ranked(numbers, scores, k)

    def _scored_again(self, given: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """float32 `[queries, n]`: the scores by the vectors of the host."""
        scores = np.empty(numbers.shape, np.float32)
        some = max(_EXAMINED // (numbers.shape[1] * given.shape[1]), 1)
        for start in range(0, len(given), some):
            of_queries = np.maximum(numbers[start : start + some], 0)
            rows = self._vectors.rows(of_queries.reshape(-1))
            rows = rows.reshape(*of_queries.shape, -1)
            scores[start : start + some] = (rows @ given[start : start + some, :, None])[..., 0]
        return scores


@functools.lru_cache(maxsize=64)
def make_search(mesh: Mesh, plan: Plan, scaled: bool) -> Callable[[jax.Array, Part], Best]:
    """Makes the jitted `(queries [B, D] float32, part) → Best` over all parts, with numbers."""

    def on_device(queries: jax.Array, part: Part) -> Best:
        best = best_of_part(queries, part, plan)
        if mesh.size == 1:
            return best
        first = jax.lax.axis_index(BATCH_AXES).astype(jnp.int32) * len(part.rows)
        best = best._replace(places=best.places + first)
        # Devices hold the passages in order, so ties still go to the lowest number.
        scores, numbers = (
            jax.lax.all_gather(leaf, BATCH_AXES, axis=1, tiled=True) for leaf in best
        )
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


def padded_batch(count: int) -> int:
    """The batch of so many queries: 1, 8, or a further power of two; each is one program."""
    return 1 if count == 1 else max(8, 1 << (count - 1).bit_length())


def plan_of(layout: Layout, batch: int, k: int, groups: int, on_cpu: bool) -> Plan:
    """How a device searches its part for the k best passages of a batch of queries.

    Args:
        groups: groups that are kept; as many as passages, or more where products are coarse.
    """
    rows = layout.rows
    if on_cpu:
        block, span, unit = _CPU_BLOCK, _CPU_SPAN, GROUP
    else:
        block = max(_SCORES // batch, -(-rows // _BLOCKS))
        span, unit = max(_MAXIMA // batch, 1) * GROUP, _ALIGNED
    # Equal spans of equal blocks, so that little is searched twice.
    spans = -(-rows // span)
    blocks = -(-rows // (spans * block))
    block = min(-(-rows // (spans * blocks * unit)) * unit, rows)
    groups = min(groups, rows // GROUP)
    numbers = _CPU_GATHERED if on_cpu else _GATHERED
    return Plan(
        k=k,
        groups=groups,
        group=GROUP,
        block=block,
        span=blocks,
        gathered=max(min(numbers // layout.width, batch * groups * GROUP), 1),
        half=not on_cpu and layout.storage != FLOAT32,
        unrolled=not on_cpu,
    )


def working_bytes(layout: Layout, on_cpu: bool, k: int = 100) -> int:
    """About the bytes of a device that a search for k passages needs besides the vectors."""
    batch = _CPU_BATCH if on_cpu else _BATCH
    plan = plan_of(layout, batch, k, k, on_cpu)
    scores = batch * plan.block * 4
    maxima = 2 * batch * plan.block // plan.group * plan.span * 4
    copied = plan.block * layout.width * 4 if on_cpu else 0
    return scores + maxima + copied + plan.gathered * layout.width * 4


# ---------------------------------------------------------------- vectors on the devices


@dataclasses.dataclass(frozen=True)
class Layout:
    count: int
    width: int
    rows: int  # of each device; those beyond `count` belong to no passage
    storage: str

    @property
    def bytes(self) -> int:
        scale = 4 if self.storage == INT8 else 0
        return self.rows * (self.width * _BYTES[self.storage] + scale + 1)


def rows_of(count: int, devices: int) -> int:
    """Rows of each device for so many passages: equal parts of whole groups."""
    return -(-max(count, 1) // (devices * GROUP)) * GROUP


def check_room(layout: Layout, working: int, free: int | None) -> None:
    """Refuses vectors that do not fit; `free`: bytes of a device, None: unknown."""
    needed = layout.bytes + working
    if free is not None and needed > free:
        helps = [f"storage={name}" for name in STORAGES if _BYTES[name] < _BYTES[layout.storage]]
        raise InputError(
            f"{layout.count:,} vectors of {layout.width} numbers in {layout.storage} need "
            f"{shown(needed)} on each device ({shown(layout.bytes)} for themselves), but "
            f"{shown(free)} are free, {shown(needed - free)} too few; "
            f"{' or '.join([*helps, 'more devices'])} would help."
        )


def load(vectors: Vectors, layout: Layout, mesh: Mesh, working: int) -> Part:
    """The vectors on the devices of a mesh; a host reads those of its own devices only.

    They go there block by block, so that the host never holds a device's part
    (`jax.make_array_from_callback` would ask for it whole, which may be all that a host has).
    """
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    total = (layout.rows * mesh.size,)
    places = sharding.addressable_devices_indices_map(total)
    frees = [free for device in places if (free := room(device, len(places))) is not None]
    check_room(layout, working, min(frees, default=None))
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
        on_devices(np.ones(layout.count, bool), layout, mesh),
    )


def on_devices(allowed: np.ndarray, layout: Layout, mesh: Mesh) -> jax.Array:
    whole = np.zeros(layout.rows * mesh.size, bool)
    whole[: layout.count] = allowed
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    return jax.make_array_from_callback(whole.shape, sharding, lambda at: whole[at])


def to_int8(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors as int8 `[n, D]` and float32 scales `[n]`: the largest number becomes 127."""
    rows = rows.astype(np.float32)
    scales = np.abs(rows).max(axis=1, initial=0) / np.float32(127)
    return np.rint(rows / np.where(scales == 0, 1, scales)[:, None]).astype(np.int8), scales


def _of_device(
    vectors: Vectors, layout: Layout, device: jax.Device, start: int
) -> tuple[jax.Array, jax.Array]:
    """Rows `[R, D]` and scales `[R]` of one device."""
    dtype = {FLOAT32: jnp.float32, BFLOAT16: jnp.bfloat16, INT8: jnp.int8}[layout.storage]
    size = max(_BLOCK_BYTES // (layout.width * 4), 1)
    stop = min(start + layout.rows, layout.count)
    with jax.default_device(device):
        rows = jnp.zeros((layout.rows, layout.width), dtype)
        scales = jnp.zeros(layout.rows, jnp.float32)
        for first, block in vectors.blocks(start, stop, size):
            check_finite(block, "the index", first)
            if layout.storage == INT8:
                block, of_block = to_int8(block)
                scales = _put(scales, of_block, first - start)
            rows = _put(rows, block.astype(dtype), first - start)
    return rows, scales


@functools.partial(jax.jit, donate_argnums=0)
def _put(whole: jax.Array, block: jax.Array, first: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, block, first, 0)
