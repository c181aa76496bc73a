"""Attention's padded rows are counted as the trainer computes them."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.measure import forward_flops
from benchmarks.ours import MINILM, computed_tokens
from benchmarks.speed_cases.attention_padding import Places, shares, states_and_chunks

from benchmarks import ours
from configs import hotpotqa
from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.environments import chunks as env
from qrag_jax.models.compute.packing import Blocks, choose_blocks
from tests.episodes_maker import random_store, tiny_encoder


def test_one_block_by_hand() -> None:
    """Blocks of 16 places with 3 rows of 8: two rows of 5 and 7 leave 4 places and 12 of a row."""
    places = Places()
    places.add(Blocks((16,), (8,), (6.0,)), np.array([5, 7]), 1)
    assert (places.text, places.linear) == (12, 16)
    assert (places.attention, places.pairs) == (2 * 8, 2 * 64)  # no more rows than there are
    assert places.text_pairs == 25 + 49
    found = shares(places)
    assert found.linear == pytest.approx(1 - 12 / 16)
    assert found.attention == pytest.approx(1 - 12 / 16)


def test_linear_maps_are_counted_as_the_program_counts_them() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 60, 200)
    blocks = choose_blocks(np.bincount(lengths, minlength=64), 256, 3, 2)
    places = Places()
    places.add(blocks, lengths, 2)
    assert places.linear == 2 * computed_tokens(blocks, lengths)
    assert places.text == 2 * lengths.sum()
    found = shares(places)
    # What the text needs is what every other figure of the suite counts.
    width, inner = MINILM.hidden_size, MINILM.intermediate_size
    layer = 2.0 * (4 * width**2 + 2 * width * inner) * places.linear + 4.0 * width * places.pairs
    needed = 2 * forward_flops(MINILM, lengths) / MINILM.num_hidden_layers
    assert found.padding_flops == pytest.approx(1 - needed / layer)
    assert found.attention > found.linear  # attention wastes more than linear maps do
    assert 0 < found.attention_flops < 1


def test_rows_of_one_length_that_fill_their_blocks_waste_nothing() -> None:
    places = Places()
    places.add(Blocks((64,), (8,), (8.8,)), np.full(32, 8), 1)
    found = shares(places)
    assert (found.linear, found.attention, found.padding_flops) == pytest.approx((0, 0, 0))


@pytest.mark.parametrize(("row", "in_state"), [(5, 7), (9, 3)])
def test_rows_are_as_long_as_those_of_the_rollout(row: int, in_state: int, tmp_path: Path) -> None:
    """A chunk inside a state may be longer than in its own row, and the other way round."""
    questions, steps = 6, 4  # some documents have fewer chunks than steps
    given = hotpotqa.get_config("tiny")
    with given.unlocked():
        given.data.update(max_chunk_tokens=row, max_chunk_tokens_in_state=in_state)
        given.env.max_steps = steps
    config, samples, origin = ours.read_texts(given, "no data set", questions, tmp_path)
    store = random_store(0, questions)
    texts = ours.Texts(config, samples, store, EpisodeShape.holding([store]), origin)
    encoder = ours.Encoder(tiny_encoder(), {}, "tiny")
    batch = texts.batch(0, questions)
    assert batch.chunk_lengths.max() == 7
    assert batch.chunk_mask.sum(1).min() < steps

    e, arrays = encoder.encoder, jax.tree.map(jnp.asarray, batch)
    _, of_chunks = env.chunk_rows(
        arrays, env.RowForm(e.chunk_opening, e.sep_id, e.pad_id), row_tokens=row
    )
    order = np.random.default_rng(0).random(batch.chunk_mask.shape) + ~batch.chunk_mask
    taken = order.argsort(axis=1)[:, :steps]
    form = env.RowForm(e.state_opening, e.sep_id, e.pad_id)
    found = list(states_and_chunks(encoder, texts, batch))
    assert len(found) == steps
    for t, (states, chosen) in enumerate(found):
        _, lengths = env.state_rows(
            arrays, jnp.asarray(taken[:, :t]), form, chunk_tokens=in_state, sort_by_index=False
        )
        live = batch.chunk_mask.sum(1) > t
        np.testing.assert_array_equal(states, np.asarray(lengths)[live])
        np.testing.assert_array_equal(chosen, np.asarray(of_chunks)[live, taken[live, t]])
