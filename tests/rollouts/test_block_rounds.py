"""The rounds that loops over blocks take, by lengths alone."""

from __future__ import annotations

import types

import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import BlockShapes, TokenRows, count_tokens
from qrag_jax.rollouts.block_rounds import (
    BATCHES,
    RowLengths,
    Widths,
    draw_lengths,
    loop_rounds,
    rounds_of,
    widths_of,
)
from qrag_jax.rollouts.chunks import RolloutConfig
from qrag_jax.runtime.step_time import Rounds

BLOCKS = Blocks((256, 512), (64, 128), (40.0, 100.0))


def test_rounds_are_counted_by_hand() -> None:
    one_size = Blocks((512,), (128,), (100.0,))
    twelve = np.array([[100] * 12, [100] * 5 + [0] * 7])  # five rows fit a block: 3 rounds, and 1
    assert rounds_of(one_size, twelve) == Rounds(2.0, (1.0,))
    assert rounds_of(one_size, np.zeros((1, 4), int)) == Rounds(0.0, (0.0,))


def test_the_rounds_compute_the_tokens_that_the_encoder_counts() -> None:
    lengths = np.random.default_rng(0).integers(0, 129, 50)
    tokens = np.repeat(1 + np.arange(50)[:, None], 128, axis=1)  # no row twice
    rows = TokenRows(jnp.asarray(tokens), jnp.asarray(lengths))
    found = rounds_of(BLOCKS, lengths[None])
    places = [shape.tokens for shape in BLOCKS.shapes(50)]
    assert sum(found.shares) == pytest.approx(1.0)
    assert found.rounds * np.dot(found.shares, places) == count_tokens(BLOCKS, rows).computed


def test_loops_are_named_by_their_rows() -> None:
    lengths = RowLengths(np.full((2, 30), 60), np.full((2, 2, 3), 120), np.full((2, 2, 3), 60))
    found = loop_rounds(BlockShapes(BLOCKS, BLOCKS, BLOCKS), Widths(100, 128), lengths)
    assert set(found) == {(30, 100), (6, 100), (6, 128), (3, 128)}
    assert found[30, 100] == rounds_of(BLOCKS, lengths.chunks)
    # The state tower learns from six rows of 120 tokens, the chunk tower from six of 60.
    longer, shorter = (rounds_of(BLOCKS, np.full((1, 6), size)).rounds for size in (120, 60))
    assert found[6, 100].rounds == shorter
    assert found[6, 128].rounds == (longer + shorter) / 2


def test_lengths_are_drawn_from_the_data() -> None:
    encoder = types.SimpleNamespace(chunk_opening=(1,), state_opening=(1,))
    rollout = RolloutConfig(2, True, True, 20, 6, 5)
    actor = types.SimpleNamespace(encoder=encoder, config=rollout)
    store = types.SimpleNamespace(
        question_lengths=np.array([5, 5]),
        chunk_counts=np.array([3, 3]),
        chunk_lengths=np.array([10] * 6),
    )
    shape = EpisodeShape(question_tokens=8, chunk_tokens=10, chunks=4)
    found = draw_lengths(actor, shape, [store], 7)
    assert found.chunks.shape == (BATCHES, 28)
    assert (np.sort(found.chunks)[:, :7] == 0).all()  # the fourth chunk is absent
    assert (np.sort(found.chunks)[:, 7:] == 12).all()  # [CLS] and [SEP]
    assert (found.states[:, 0] == 7).all()
    assert (found.states[:, 1] == 7 + 6 + 1).all()  # a chunk is cut, and a [SEP] ends it
    assert (found.chosen == 12).all()
    assert widths_of(actor, shape) == Widths(12, 8 + 2 + 7)
