"""One tower on a mesh for rows that come a few at a time, in two static sizes."""

from __future__ import annotations

import numpy as np
from jax.sharding import Mesh

from qrag_jax.models.compute.packing import choose_blocks
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.retrieval.tower_rows import Rows
from qrag_jax.rollouts.block_shapes import ACCELERATOR_BLOCK_TOKENS, CPU_BLOCK_TOKENS
from qrag_jax.rollouts.text_table import laid_out, make_embed
from qrag_jax.runtime.platform import Platform

GROUP, SMALL_GROUP = 512, 32  # rows embedded by one call; the small size if it is enough
_LENGTHS, _SIZES = 2, 2  # of blocks: each pair is compiled


class MeshTower:
    """One tower, as `retrieval.tower_rows.RowEncoder`.

    Rows are packed into blocks and split over the mesh. The programs are compiled at the first two
    calls and never again.

    Args:
        shardings: where the parameters live.
        params: of towers stacked on axis 0.
        number: the tower's index on it.
        row_tokens: length of the longest row, special tokens counted.
    """

    def __init__(
        self,
        mesh: Mesh,
        shardings: Params,
        encoder: TextEncoder,
        params: Params,
        *,
        number: int,
        row_tokens: int,
    ) -> None:
        on_cpu = Platform.of(mesh).on_cpu
        blocks = choose_blocks(
            np.ones(row_tokens + 1, np.int64),
            CPU_BLOCK_TOKENS if on_cpu else ACCELERATOR_BLOCK_TOKENS,
            _LENGTHS,
            _SIZES,
            multiples=(8,) if on_cpu else (64, 8),
        )
        self._embed = make_embed(mesh, shardings, encoder, blocks, number)
        self._encoder, self._params = encoder, params
        self._row_tokens, self._devices = row_tokens, mesh.size

    def __call__(self, rows: Rows) -> np.ndarray:
        """float32 `[rows, width]`.

        Raises:
            ValueError: a row is longer than `row_tokens`.
        """
        parts = [self._of_group(rows[i : i + GROUP]) for i in range(0, len(rows), GROUP)]
        return np.concatenate([np.zeros((0, self._encoder.width), np.float32), *parts])

    def _of_group(self, rows: Rows) -> np.ndarray:
        if (longest := max(map(len, rows))) > self._row_tokens:
            raise ValueError(f"a row of {longest} tokens is longer than {self._row_tokens}")
        size = GROUP if len(rows) > SMALL_GROUP else SMALL_GROUP
        shape = (size, self._row_tokens)
        group = laid_out(rows, shape, self._devices, self._encoder.pad_id)
        embedded = self._embed(self._params, group.tokens, group.lengths)
        return np.asarray(embedded)[group.places]
