"""Counts the padding that attention computes; linear maps compute hardly any.

Rows stand end to end in blocks of T places. In every block attention computes R rows of L places,
even if the rows are fewer or shorter (`models.compute.packing`). The places are counted on the
host, for the blocks that the trainer chooses; no encoder runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ours import MINILM, Encoder, Texts, chunk_row_lengths
from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.models.compute.packing import Blocks, Filling, next_block
from qrag_jax.models.compute.ragged import BlockShapes
from qrag_jax.models.trunks.bert import BertConfig

FORWARD, BOTH_WAYS = 1, 3  # forward passes: a gradient costs two more


@dataclasses.dataclass
class Places:
    """Sums over encoder calls, each weighted by its number of forward passes.

    Attributes:
        text: tokens with text.
        linear: places that linear maps compute (T).
        attention: places of attention's rows (R·L).
        text_pairs: pairs of tokens that attention scores need (Σ n²).
        pairs: pairs of places that attention scores compute (R·L²).
    """

    text: float = 0.0
    linear: float = 0.0
    attention: float = 0.0
    text_pairs: float = 0.0
    pairs: float = 0.0

    def add(self, blocks: Blocks, lengths: np.ndarray, passes: int) -> None:
        """Adds the blocks for rows of these lengths `[N]`, all of them present."""
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
    """Shares of what is computed.

    Attributes:
        linear: share of the linear maps' places that hold no text.
        attention: share of the places of attention's rows that hold no text.
        attention_flops: share of the FLOPs that attention scores take.
        padding_flops: share of the FLOPs that the text does not need.
    """

    linear: float
    attention: float
    attention_flops: float
    padding_flops: float


def shares(places: Places, sizes: BertConfig = MINILM) -> Shares:
    """The shares for an encoder of these sizes.

    A layer takes 2·(4h² + 2hi) FLOPs per place and 4h per pair.
    """
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
    """The places of a PQN step that draws chunks at random, as at the start of a training."""
    places = Places()
    chunks = chunk_row_lengths(texts, encoder, batch)[batch.chunk_mask]
    rows = np.concatenate([batch.chunks[batch.chunk_mask], chunks[:, None]], axis=1)
    distinct = np.unique(rows, axis=0)  # a row that occurs twice is computed once
    for _ in ("policy", "target"):
        places.add(block_shapes.chunks, distinct[:, -1], FORWARD)
    states = list(states_and_chunks(encoder, texts, batch))
    for lengths, _ in states:
        for _ in ("policy", "target"):
            places.add(block_shapes.states, lengths, FORWARD)
    places.add(
        block_shapes.gradients, np.concatenate([lengths for lengths, _ in states]), BOTH_WAYS
    )
    places.add(block_shapes.gradients, np.concatenate([chosen for _, chosen in states]), BOTH_WAYS)
    return places


def states_and_chunks(
    encoder: Encoder, texts: Texts, batch: EpisodeBatch
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields for each step the lengths of the state rows and of the rows of the chunks taken."""
    rng, data, count = np.random.default_rng(0), texts.config.data, len(batch.question_length)
    rows = chunk_row_lengths(texts, encoder, batch)
    in_state = np.minimum(batch.chunk_lengths, data.max_chunk_tokens_in_state)
    order = rng.random(batch.chunk_mask.shape) + ~batch.chunk_mask  # absent chunks come last
    taken = order.argsort(axis=1)[:, : texts.config.env.max_steps]
    state = batch.question_length + len(encoder.encoder.state_opening) + 1
    for chosen in taken.T:
        chunk = np.arange(count), chosen
        live = batch.chunk_mask[chunk]  # the other episodes have ended
        yield state[live], rows[chunk][live]
        state = state + in_state[chunk] + 1
