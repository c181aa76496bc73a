"""What attention computes without text: its rows are padded, though linear maps see none of that.

Rows stand end to end in blocks of T places; attention looks at R rows of L places of each block,
whether they are there and as long or not (`models.compute.packing`). Counted on the host, by the
trainer's own choice of blocks; nothing is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ours import MINILM, Encoder, Texts
from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.models.compute.packing import Blocks, Filling, next_block
from qrag_jax.models.compute.ragged import BlockShapes
from qrag_jax.models.trunks.bert import BertConfig

FORWARD, BOTH_WAYS = 1, 3  # a gradient costs two forward passes more


@dataclasses.dataclass
class Places:
    """Sums over encoder calls, each weighted by its passes.

    Attributes:
        text: tokens with text. linear: places that linear maps compute (T). attention: places of
            attention's rows (R·L). text_pairs, pairs: of tokens, Σ n² and R·L², as scores have.
    """

    text: float = 0.0
    linear: float = 0.0
    attention: float = 0.0
    text_pairs: float = 0.0
    pairs: float = 0.0

    def add(self, blocks: Blocks, lengths: np.ndarray, passes: int) -> None:
        """Counts the blocks for rows of these lengths, all present."""
        ordered = jnp.asarray(np.sort(lengths).astype(np.int32))
        shapes = list(blocks.shapes(len(lengths)))
        left = Filling(jnp.int32(0), jnp.int32(len(lengths)))
        while int(left.low) < int(left.high):
            block = _next_block(blocks, ordered, left)
            shape = shapes[int(block.shape)]
            self.linear += passes * shape.tokens
            self.attention += passes * shape.rows * shape.length
            self.pairs += passes * shape.rows * shape.length**2
            left = Filling(left.low + block.bottom, left.high - block.top)
        exact = lengths.astype(np.float64)
        self.text += passes * float(exact.sum())
        self.text_pairs += passes * float(np.square(exact).sum())


_next_block = jax.jit(next_block, static_argnums=0)


class Shares(NamedTuple):
    """Of what is computed: places of linear maps and of attention without text; FLOPs that
    attention takes; FLOPs beyond those that the text needs."""

    linear: float
    attention: float
    attention_flops: float
    padding_flops: float


def shares(places: Places, sizes: BertConfig = MINILM) -> Shares:
    """With the widths of this encoder: a layer takes 2·(4h² + 2hi) FLOPs a place and 4h a pair."""
    width, inner = sizes.hidden_size, sizes.intermediate_size
    dense, scores = 2.0 * (4 * width**2 + 2 * width * inner), 4.0 * width
    computed = dense * places.linear + scores * places.pairs
    needed = dense * places.text + scores * places.text_pairs
    return Shares(
        linear=1 - places.text / places.linear,
        attention=1 - places.text / places.attention,
        attention_flops=scores * places.pairs / computed,
        padding_flops=1 - needed / computed,
    )


def count_places(
    block_shapes: BlockShapes, encoder: Encoder, texts: Texts, batch: EpisodeBatch
) -> Places:
    """Of one PQN step in which every chunk is drawn at random, as those at a training's start."""
    places = Places()
    chunks = _chunk_rows(encoder, texts, batch)
    rows = np.concatenate([batch.chunks[batch.chunk_mask], chunks[:, None]], axis=1)
    distinct = np.unique(rows, axis=0)  # a row that occurs twice is computed once
    for _ in ("policy", "target"):
        places.add(block_shapes.chunks, distinct[:, -1], FORWARD)
    states = list(_states(encoder, texts, batch))
    for lengths, _ in states:
        for _ in ("policy", "target"):
            places.add(block_shapes.states, lengths, FORWARD)
    places.add(
        block_shapes.gradients, np.concatenate([lengths for lengths, _ in states]), BOTH_WAYS
    )
    places.add(block_shapes.gradients, np.concatenate([chosen for _, chosen in states]), BOTH_WAYS)
    return places


def _chunk_rows(encoder: Encoder, texts: Texts, batch: EpisodeBatch) -> np.ndarray:
    opening = len(encoder.encoder.chunk_opening)
    longest = texts.config.data.max_chunk_tokens - opening - 1
    return np.minimum(batch.chunk_lengths, longest)[batch.chunk_mask] + opening + 1


def _states(
    encoder: Encoder, texts: Texts, batch: EpisodeBatch
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of each step: lengths of the states' rows, and of the rows of the chunks taken there."""
    rng, data, count = np.random.default_rng(0), texts.config.data, len(batch.question_length)
    opening = len(encoder.encoder.chunk_opening)
    rows = np.zeros(batch.chunk_mask.shape, np.int64)
    rows[batch.chunk_mask] = _chunk_rows(encoder, texts, batch)
    order = rng.random(batch.chunk_mask.shape) + ~batch.chunk_mask  # those that are none come last
    taken = order.argsort(axis=1)[:, : texts.config.env.max_steps]
    state = batch.question_length + len(encoder.encoder.state_opening) + 1
    for chosen in taken.T:
        chunk = rows[np.arange(count), chosen]
        yield state, chunk
        state = state + np.minimum(chunk - opening - 1, data.max_chunk_tokens_in_state) + 1
