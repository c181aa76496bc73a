"""Embeddings of texts: one tower over rows of tokens, and a table of one row per DISTINCT text.

Rows are packed into blocks and embedded in groups of two static sizes, so nothing recompiles. The
blocks are chosen by the lengths in the data and the device.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.data.tokens import TokenStore
from qrag_jax.environments.chunks import chunk_width
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.packing import Blocks, choose_blocks
from qrag_jax.models.compute.ragged import BlockShapes, TokenRows, embed_rows
from qrag_jax.models.embedding import Params, TextEncoder
from qrag_jax.models.first_encoder import EncoderConfig
from qrag_jax.retrieval.towers import Rows
from qrag_jax.rollouts.chunks import Actor, RolloutConfig, widths_of
from qrag_jax.runtime.mesh import BATCH_AXES, replicate
from qrag_jax.runtime.platform import Platform, compiler_options
from qrag_jax.runtime.whole_files import write_whole, writing

GROUP, SMALL_GROUP = 8192, 512  # rows embedded by one call; the small size if it is enough
DIGEST = 16  # bytes of a text's digest
_WHAT = "folder for embeddings"

Embed = Callable[[Params, np.ndarray, np.ndarray], jax.Array]


def make_embed(
    mesh: Mesh, shardings: Params, encoder: TextEncoder, blocks: Blocks, tower: int | None
) -> Embed:
    """Makes the jitted `(params, tokens [N, L], lengths [N]) → [N, D]` of one tower.

    Rows are split over the mesh's batch axes; N must be a multiple of the number of devices.
    `tower` is the index of one of two stacked on axis 0; None: the parameters are those of one.
    """
    encoder, rows = encoder.on(mesh), NamedSharding(mesh, PartitionSpec(BATCH_AXES))

    def embed(params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        params = encoder.alone(params) if tower is None else encoder.tower(params, tower)
        return embed_rows(encoder, blocks, params, TokenRows(tokens, lengths))[0]

    return jax.jit(
        embed,
        in_shardings=(shardings, rows, rows),
        out_shardings=rows,
        compiler_options=compiler_options(mesh, adapters=isinstance(shardings, Adapted)),
    )


def padded_rows(
    rows: Sequence[Sequence[int] | np.ndarray], shape: tuple[int, int], devices: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 `[N, L]` of this shape, and lengths int32 `[N]`, 0 where there is no row.

    N is rounded up to a multiple of the number of devices.
    """
    size, width = shape
    tokens = np.full((size + -size % devices, width), pad_id, np.int32)
    lengths = np.zeros(len(tokens), np.int32)
    for place, row in enumerate(rows):
        tokens[place, : len(row)], lengths[place] = row, len(row)
    return tokens, lengths


# Questions alone are much shorter than states: with blocks of their own they are embedded in a
# third of the time. Rows of up to `SHORT` tokens have these.
SHORT = 64
_LENGTHS = 2  # of rows in a block; every size has all of them, and each pair is compiled
_SIZES, _SHORT_SIZES = 2, 3  # of blocks: a single question should not fill a large one


class MeshTower:
    """One tower, as `retrieval.towers.RowEncoder`; `number` is as the `tower` of `make_embed`.

    Args:
        row_tokens: length of the longest row, special tokens counted.
        blocks: for all rows, of which many may come at a time; None: nothing is known of the rows.
            A few come at a time, and there is a program for short ones and one for all others.
    """

    def __init__(
        self,
        mesh: Mesh,
        shardings: Params,
        encoder: TextEncoder,
        params: Params,
        *,
        number: int | None,
        row_tokens: int,
        blocks: Blocks | None = None,
    ) -> None:
        def program(shorter: int, longest: int, blocks: Blocks) -> tuple[int, int, Embed]:
            return shorter, longest, make_embed(mesh, shardings, encoder, blocks, number)

        def alike(shorter: int, longest: int, sizes: int) -> tuple[int, int, Embed]:
            """All lengths are as likely."""
            how = EncoderConfig(length_buckets=_LENGTHS, block_sizes=sizes)
            wanted = np.arange(longest + 1) > shorter
            return program(shorter, longest, blocks_of(how, wanted, Platform.of(mesh)))

        # Of rows of more than so many and at most so many tokens.
        if blocks is not None:
            self._programs = [program(0, row_tokens, blocks)]
        else:
            short = min(SHORT, row_tokens)
            self._programs = [alike(0, short, _SHORT_SIZES)]
            if row_tokens > short:
                self._programs.append(alike(short, row_tokens, _SIZES))
        self._encoder, self._params = encoder, params
        self._row_tokens, self._devices = row_tokens, mesh.size

    def __call__(self, rows: Rows) -> np.ndarray:
        """float32 `[rows, width]`; raises ValueError if a row is longer than `row_tokens`."""
        return self.embed(self._params, rows)

    def embed(self, params: Params, rows: Rows) -> np.ndarray:
        """The same by other parameters."""
        lengths = np.array([len(row) for row in rows], np.int64)
        if len(rows) and lengths.max() > self._row_tokens:
            raise ValueError(f"a row of {lengths.max()} tokens is longer than {self._row_tokens}")
        embedded = np.zeros((len(rows), self._encoder.width), np.float32)
        for shorter, longest, embed in self._programs:
            (places,) = np.nonzero((lengths > shorter) & (lengths <= longest))
            for first in range(0, len(places), GROUP):
                part = places[first : first + GROUP]
                shape = (_group_size(len(part)), longest)
                batch_rows = [rows[i] for i in part]
                arrays = padded_rows(batch_rows, shape, self._devices, self._encoder.pad_id)
                embedded[part] = np.asarray(embed(params, *arrays))[: len(part)]
        return embedded


class TextTable:
    """A table of embeddings, which grows when new texts are asked for.

    Args:
        embed: texts → float32 `[texts, D]`.
        folder: keeps embeddings between processes, those of one `embed` and of its parameters;
            None: nothing is kept.
    """

    def __init__(
        self, mesh: Mesh, embed: Callable[[Sequence[str]], np.ndarray], folder: Path | None = None
    ) -> None:
        self._mesh, self._embed, self._folder = mesh, embed, folder
        self._row_of: dict[bytes, int] = {}  # by digest: the texts themselves would take memory
        self._rows = 0  # two files may have the same text, which then has two
        self._table: jax.Array | None = None  # None: it has no rows yet
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._put = jax.jit(_put, donate_argnums=0, out_shardings=everywhere)
        self._double = jax.jit(_double, out_shardings=everywhere)
        if folder is not None:
            with writing(folder, _WHAT):
                folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.glob("*.npz")):
                with np.load(path) as kept:
                    self._append([row.tobytes() for row in kept["digests"]], kept["embeddings"])

    def __len__(self) -> int:
        return self._rows

    @property
    def array(self) -> jax.Array:
        """The embeddings on every device, `[N, D]` float32; N doubles when `len` comes near it.

        Embedding another text makes this array invalid: read it after `rows_of`.
        """
        assert self._table is not None
        return self._table

    def rows_of(self, texts: Sequence[str]) -> np.ndarray:
        """The row index of each text, `[n]` int32; texts that have no row yet are embedded."""
        digests = [hashlib.blake2b(text.encode(), digest_size=DIGEST).digest() for text in texts]
        missing = {d: t for d, t in zip(digests, texts, strict=True) if d not in self._row_of}
        for start in range(0, len(missing), GROUP):
            self._add(dict(itertools.islice(missing.items(), start, start + GROUP)))
        return np.fromiter((self._row_of[digest] for digest in digests), np.int32, len(texts))

    def _add(self, texts: dict[bytes, str]) -> None:
        """Embeds up to `GROUP` texts, by digest."""
        digests, embeddings = list(texts), self._embed(list(texts.values()))
        self._append(digests, embeddings)
        if self._folder is not None:
            # Writes are atomic, and files have different names: processes may add some together.
            together, data = b"".join(digests), io.BytesIO()
            of_texts = np.frombuffer(together, np.uint8).reshape(-1, DIGEST)
            np.savez(data, digests=of_texts, embeddings=embeddings)
            name = f"{hashlib.blake2b(together, digest_size=DIGEST).hexdigest()}.npz"
            with writing(self._folder, _WHAT):
                write_whole(self._folder / name, data.getvalue())

    def _append(self, digests: Sequence[bytes], embeddings: np.ndarray) -> None:
        count, first = len(digests), self._rows
        rows = np.zeros((_group_size(count), embeddings.shape[1]), np.float32)
        rows[:count] = embeddings
        if self._table is None:
            self._table = replicate(self._mesh, np.zeros((2 * GROUP, rows.shape[1]), np.float32))
        # The padding of the group lies behind the last row; the next group overwrites it.
        while len(self._table) < first + len(rows):
            self._table = self._double(self._table)
        self._table = self._put(self._table, rows, np.int32(first))
        self._row_of |= {digest: first + i for i, digest in enumerate(digests)}
        self._rows += count


def _group_size(count: int) -> int:
    return GROUP if count > SMALL_GROUP else SMALL_GROUP


def _put(table: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(table, rows, (start, np.int32(0)))


def _double(table: jax.Array) -> jax.Array:
    return jnp.concatenate([table, jnp.zeros_like(table)])


# ---------------------------------------------------------------- blocks


# Tokens computed at a time: as many as a CPU's caches hold, or as an accelerator needs to be busy.
CPU_BLOCK_TOKENS, ACCELERATOR_BLOCK_TOKENS = 512, 8192


def choose_block_shapes(
    config: EncoderConfig,
    rollout: RolloutConfig,
    encoder: TextEncoder,
    shape: EpisodeShape,
    stores: Sequence[TokenStore],
    *,
    platform: Platform,
) -> BlockShapes:
    """Blocks that suit the lengths found in the data and the devices."""
    chunks, states, both = _histograms(rollout, encoder, shape, stores)
    # States and gradients are a small share of the tokens, so fewer shapes are enough for them.
    return BlockShapes(
        chunks=blocks_of(config, chunks, platform),
        states=blocks_of(config, states, platform, fewer=1),
        gradients=blocks_of(config, both, platform, fewer=1),
    )


def blocks_of(
    config: EncoderConfig, histogram: np.ndarray, platform: Platform, *, fewer: int = 0
) -> Blocks:
    """Blocks for rows whose lengths are distributed as in the histogram, of `fewer` lengths."""
    usual = CPU_BLOCK_TOKENS if platform.on_cpu else ACCELERATOR_BLOCK_TOKENS
    tokens, count = config.block_tokens or usual, max(config.length_buckets - fewer, 1)
    # Kernels of attention compute tiles of 64 positions.
    multiples = (8,) if platform.on_cpu else (64, 8)
    return choose_blocks(histogram, tokens, count, config.block_sizes, multiples=multiples)


def _histograms(
    rollout: RolloutConfig, encoder: TextEncoder, shape: EpisodeShape, stores: Sequence[TokenStore]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How many rows have each length: of chunks, of states, and of both in gradients."""
    widths, chunk_lengths = widths_of(rollout, encoder, shape), _of_all(stores, "chunk_lengths")
    chunks = _histogram(chunk_lengths + chunk_width(len(encoder.chunk_opening), 0), widths[0])
    in_state = min(rollout.max_chunk_tokens_in_state, shape.chunk_tokens)
    typical = int(np.minimum(chunk_lengths, in_state).mean()) + 1
    questions = _of_all(stores, "question_lengths") + len(encoder.state_opening) + 1
    lengths = np.concatenate([questions + t * typical for t in range(rollout.max_steps)])
    states = _histogram(lengths, widths[1])
    both = np.zeros(max(widths) + 1, np.int64)
    both[: len(states)] += states
    # Gradients need as many chosen chunks as states.
    both[: len(chunks)] += chunks * states.sum() // max(chunks.sum(), 1)
    return chunks, states, both


def _histogram(lengths: np.ndarray, longest: int) -> np.ndarray:
    return np.bincount(np.minimum(lengths, longest), minlength=longest + 1)


def _of_all(stores: Sequence[TokenStore], name: str) -> np.ndarray:
    return np.concatenate([getattr(store, name) for store in stores])


def mean_rows(
    actor: Actor, shape: EpisodeShape, stores: Sequence[TokenStore]
) -> tuple[float, float, float]:
    """The mean number of a question's chunks, and the mean tokens of a chunk and of a state."""
    chunks, states, _ = _histograms(actor.config, actor.encoder, shape, stores)
    chunk, state = (float(np.average(range(len(h)), weights=h)) for h in (chunks, states))
    return float(_of_all(stores, "chunk_counts").mean()), chunk, state
