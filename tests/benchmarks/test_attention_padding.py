"""Attention's padded rows are counted as the trainer computes them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.measure import forward_flops
from benchmarks.ours import MINILM, computed_tokens
from benchmarks.speed_cases.attention_padding import Places, shares
from qrag_jax.models.compute.packing import Blocks, choose_blocks


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
