"""Embeddings of texts, one row for each DISTINCT text, reused from document to document.

Texts are tokenised, sorted by length and embedded in groups of one static size, so memory grows
with (distinct texts × embedding width) and never with tokens, and nothing recompiles.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.encoders.packing import Blocks
from qrag_jax.encoders.ragged import embed_rows
from qrag_jax.encoders.text_encoder import Params, TextEncoder
from qrag_jax.runtime.mesh import replicate
from qrag_jax.runtime.sharding import BATCH_AXES, gather, specs_of

GROUP, SMALL_GROUP = 8192, 512  # texts embedded by one call, and where fewer are asked for

Embed = Callable[[Params, np.ndarray, np.ndarray], jax.Array]


class Store(Protocol):
    """Where embeddings outlive the process (`runtime.embedding_files`)."""

    def load(self) -> Iterator[tuple[list[bytes], np.ndarray]]:
        """What is kept, in the order it was added: digests of texts, `[n, D]` float32."""

    def add(self, texts: Sequence[str], embeddings: np.ndarray) -> None:
        """Keeps the embeddings `[n, D]` of texts."""

    def digest(self, text: str) -> bytes:
        """What stands for a text."""


@dataclasses.dataclass
class Counts:
    """Texts asked for, those embedded for it, their tokens, and seconds spent embedding."""

    asked: int = 0
    embedded: int = 0
    tokens: int = 0
    seconds: float = 0.0


def make_embed(
    mesh: Mesh, shardings: Params, encoder: TextEncoder, blocks: Blocks, tower: int
) -> Embed:
    """The jitted `(params, tokens [N, L], lengths [N]) → [N, D]` of one tower.

    Rows are split over the mesh's batch axes; N must be a multiple of their devices.

    Args:
        shardings: where the parameters, two towers stacked on axis 0, live; parts are gathered.
    """
    specs, by_row = specs_of(shardings), PartitionSpec(BATCH_AXES)

    def on_device(params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        params = encoder.tower(gather(params, specs), tower)
        return embed_rows(encoder, blocks, params, tokens, lengths)[0]

    over_mesh = jax.shard_map(
        on_device, mesh=mesh, in_specs=(specs, by_row, by_row), out_specs=by_row, check_vma=False
    )
    rows = NamedSharding(mesh, by_row)
    return jax.jit(over_mesh, in_shardings=(shardings, rows, rows), out_shardings=rows)


class TextTable:
    """Grows as texts are asked for.

    Args:
        embed: as `make_embed` makes it. params: what it is called with.
        row_tokens: longest row, special tokens counted; longer texts are cut.
        store: keeps embeddings between processes; None: nothing is kept.
    """

    def __init__(
        self,
        mesh: Mesh,
        encoder: TextEncoder,
        tokenizer: TextTokenizer,
        embed: Embed,
        params: Params,
        row_tokens: int,
        store: Store | None = None,
    ) -> None:
        self.counts = Counts()
        self._mesh, self._encoder, self._tokenizer = mesh, encoder, tokenizer
        self._embed, self._params, self._row_tokens = embed, params, row_tokens
        self._store = store
        self._row_of: dict[str, int] = {}
        self._kept: dict[bytes, int] = {}  # rows whose text is known by its digest alone
        self._rows = 0
        self._table = np.zeros((GROUP, encoder.width), np.float32)
        self._on_device: jax.Array | None = None
        for digests, embeddings in store.load() if store else ():
            self._kept |= {digest: self._rows + i for i, digest in enumerate(digests)}
            self._append(embeddings)

    def __len__(self) -> int:
        return self._rows

    @property
    def array(self) -> jax.Array:
        """The embeddings on every device, `[N, D]` float32, N a power of two from `len` up."""
        if self._on_device is None:
            self._on_device = replicate(self._mesh, self._table)
        return self._on_device

    def rows_of(self, texts: Sequence[str]) -> np.ndarray:
        """The row of each text, `[n]` int32; embeds those that are not there yet."""
        self.counts.asked += len(texts)
        missing = [text for text in dict.fromkeys(texts) if text not in self._row_of]
        if self._kept and self._store:
            digests = map(self._store.digest, missing)
            found = {t: self._kept.get(d) for t, d in zip(missing, digests, strict=True)}
            self._row_of |= {text: row for text, row in found.items() if row is not None}
            missing = [text for text in missing if found[text] is None]
        started = time.perf_counter()
        for start in range(0, len(missing), GROUP):
            self._add(missing[start : start + GROUP])
        self.counts.seconds += time.perf_counter() - started
        return np.fromiter((self._row_of[text] for text in texts), np.int32, len(texts))

    def _add(self, texts: list[str]) -> None:
        encoder, opening = self._encoder, self._encoder.chunk_opening
        kept = self._row_tokens - len(opening) - 1
        rows = [[*opening, *ids[:kept], encoder.sep_id] for ids in self._tokenizer.encode(texts)]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        devices = self._mesh.shape["data"] * self._mesh.shape["fsdp"]
        size = GROUP if len(rows) > SMALL_GROUP else SMALL_GROUP
        size += -size % devices
        tokens = np.full((size, self._row_tokens), encoder.pad_id, np.int32)
        lengths = np.zeros(size, np.int32)
        # Dealt out by length: every device gets as much to do as the others.
        places = np.arange(size).reshape(-1, devices).T.ravel().argsort()[: len(rows)]
        for place, i in zip(places, order, strict=True):
            tokens[place, : len(rows[i])], lengths[place] = rows[i], len(rows[i])
        embeddings = np.asarray(self._embed(self._params, tokens, lengths))[places]
        named = [texts[i] for i in order]
        self._row_of |= {text: self._rows + i for i, text in enumerate(named)}
        self._append(embeddings)
        self.counts.embedded += len(named)
        self.counts.tokens += int(lengths.sum())
        if self._store:
            self._store.add(named, embeddings)

    def _append(self, embeddings: np.ndarray) -> None:
        end = self._rows + len(embeddings)
        size = len(self._table)
        while size < end:
            size *= 2
        if size > len(self._table):
            larger = np.zeros((size, self._table.shape[1]), np.float32)
            larger[: self._rows] = self._table[: self._rows]
            self._table = larger
        self._table[self._rows : end] = embeddings
        self._rows, self._on_device = end, None
