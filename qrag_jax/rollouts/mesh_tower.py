"""One tower on a mesh for rows that come a few at a time, in static sizes."""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from qrag_jax.models.compute.packing import choose_blocks
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.retrieval.tower_rows import Rows
from qrag_jax.rollouts.block_shapes import ACCELERATOR_BLOCK_TOKENS, CPU_BLOCK_TOKENS
from qrag_jax.rollouts.text_table import Embed, laid_out, make_embed
from qrag_jax.runtime.platform import Platform

GROUP = 512  # rows embedded by one call
# Questions alone are much shorter than states: with blocks of their own they are embedded in a
# third of the time. Rows of up to `SHORT` tokens have these.
SHORT = 64
_LENGTHS = 2  # of rows in a block; every size has all of them, and each pair is compiled
_SIZES, _SHORT_SIZES = 2, 3  # of blocks: a single question should not fill a large one


class _Program(NamedTuple):
    """Embeds rows of more than `shorter` and at most `longest` tokens."""

    shorter: int
    longest: int
    embed: Embed


class MeshTower:
    """One tower, as `retrieval.tower_rows.RowEncoder`.

    Rows are packed into blocks and split over the mesh. There is a program for short rows and one
    for all others; each is compiled at its first call and never again.

    Args:
        shardings: where the parameters live.
        params: of towers stacked on axis 0, or of one tower.
        number: the tower's index on that axis; None: there is one tower.
        row_tokens: length of the longest row, special tokens counted.
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
    ) -> None:
        on_cpu = Platform.of(mesh).on_cpu

        def program(shorter: int, longest: int, sizes: int) -> Embed:
            """For rows of more than `shorter` tokens, all lengths as likely."""
            blocks = choose_blocks(
                np.arange(longest + 1) > shorter,
                CPU_BLOCK_TOKENS if on_cpu else ACCELERATOR_BLOCK_TOKENS,
                _LENGTHS,
                sizes,
                multiples=(8,) if on_cpu else (64, 8),
            )
            return make_embed(mesh, shardings, encoder, blocks, number)

        short = min(SHORT, row_tokens)
        self._programs = [_Program(0, short, program(0, short, _SHORT_SIZES))]
        if row_tokens > short:
            self._programs.append(_Program(short, row_tokens, program(short, row_tokens, _SIZES)))
        self._encoder, self._params = encoder, params
        self._row_tokens, self._devices = row_tokens, mesh.size

    def with_params(self, params: Params) -> MeshTower:
        """The same programs with other parameters."""
        other = copy.copy(self)
        other._params = params
        return other

    def __call__(self, rows: Rows) -> np.ndarray:
        """float32 `[rows, width]`.

        Raises:
            ValueError: a row is longer than `row_tokens`.
        """
        lengths = np.array([len(row) for row in rows], np.int64)
        if len(rows) and lengths.max() > self._row_tokens:
            longest = lengths.max()
            raise ValueError(f"a row of {longest} tokens is longer than {self._row_tokens}")
        found = np.zeros((len(rows), self._encoder.width), np.float32)
        for program in self._programs:
            (places,) = np.nonzero((lengths > program.shorter) & (lengths <= program.longest))
            for first in range(0, len(places), GROUP):
                part = places[first : first + GROUP]
                shape = (GROUP, program.longest)
                own = laid_out([rows[i] for i in part], shape, self._devices, self._encoder.pad_id)
                embedded = program.embed(self._params, own.tokens, own.lengths)
                found[part] = np.asarray(embedded)[own.places]
        return found
