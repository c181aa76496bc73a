import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.environments import positions
from tests.reference import relative_positions


@pytest.mark.parametrize(
    ("taken", "chunks"),
    [
        ([], 1),
        ([], 7),
        ([], 50),
        ([3], 10),
        ([0], 5),
        ([9, 4], 10),
        ([0, 1, 2], 3),
        ([5, 30, 6], 100),
    ],
)
def test_relative_is_as_defined(taken, chunks):
    padded = np.full(6, -1)
    padded[: len(taken)] = taken
    got = positions.relative(jnp.arange(chunks), jnp.asarray(padded), jnp.int32(chunks))
    assert got.tolist() == relative_positions(taken, chunks)


def test_relative_of_a_slice_and_of_a_batch_equals_that_of_the_whole():
    rng = np.random.default_rng(0)
    chunks = np.array([40, 23])
    taken = np.array([[7, -1, 21], [-1, -1, 3]])
    index = jnp.asarray(rng.integers(0, 23, size=(2, 5)))
    got = positions.relative(index, jnp.asarray(taken), jnp.asarray(chunks))
    for row in range(2):
        whole = relative_positions([t for t in taken[row] if t >= 0], chunks[row])
        assert got[row].tolist() == [whole[i] for i in index[row].tolist()]


def test_relative_positions_are_the_same_at_any_length():
    """The k-th of n parts of an interval lies at one position, however long the document."""
    taken = jnp.asarray([30, -1])
    short = positions.relative(jnp.arange(91), taken, jnp.int32(91))
    ten_million_tokens = 400_000
    far = jnp.asarray([30 * ten_million_tokens // 91, -1])
    index = jnp.linspace(0, ten_million_tokens - 1, 91).astype(int)
    long = positions.relative(index, far, jnp.int32(ten_million_tokens))
    assert int(jnp.abs(short - long).max()) <= 1
    every = positions.relative(jnp.arange(ten_million_tokens), far, jnp.int32(ten_million_tokens))
    assert set(np.unique(every).tolist()) == set(np.unique(short).tolist())
    assert int(every.max()) <= positions.last_position("relative", ten_million_tokens, 1)


def test_absolute_counts_and_random_indents_leave_gaps():
    assert positions.absolute(None, 2, 4).tolist() == [[0, 1, 2, 3]] * 2
    drawn = positions.absolute(jax.random.split(jax.random.key(0), 3), 3, 200)
    assert (drawn[:, 0] == 0).all()
    gaps = np.diff(np.asarray(drawn), axis=1)
    assert set(np.unique(gaps)) == set(range(1, positions.MOST_INDENT + 1))
    assert (drawn[0] != drawn[1]).any()
    assert int(drawn.max()) <= positions.last_position("random", 200, 2)
    assert positions.last_position("absolute", 200, 2) == 199
    assert positions.last_position("none", 200, 2) == 0


def published(counts: list[int], seed: int = 0) -> list[list[int]]:
    """The positions of documents under `random_published`."""
    keys = jax.random.split(jax.random.key(seed), len(counts))
    indents = positions.draw_indents(keys, jnp.asarray(counts))
    index = np.arange(max(counts))[None].repeat(len(counts), 0)
    return [row[:n] for row, n in zip(indents.positions(index).tolist(), counts, strict=True)]


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 5, 6, 7, 100, 1999, 2000])
def test_published_indents_move_five_parts(chunks: int) -> None:
    last = positions.last_position("random_published", chunks, 2)
    assert last == 1999
    for place in published([chunks] * 20, seed=chunks):
        gaps = np.diff(place)
        assert (gaps >= 1).all()
        assert 0 <= place[0] < max(2000 - chunks, 1)
        assert place[-1] - (chunks - 1) < max(2000 - chunks, 1)
        assert place[-1] <= last
        # A part begins at four chunks at most, none of them the first or the last one.
        assert np.count_nonzero(gaps > 1) <= min(4, max(chunks - 2, 0))
        assert chunks < 3 or gaps[-1] == 1
        if chunks == 2000:
            assert place == list(range(2000))


def test_published_cuts_are_any_four_and_indents_any_five() -> None:
    draws = 6000
    keys = jax.random.split(jax.random.key(0), draws)
    indents = positions.draw_indents(keys, jnp.full(draws, 8))
    cuts = np.asarray(indents.cuts)
    sets, seen = np.unique(cuts, axis=0, return_counts=True)
    assert len(sets) == math.comb(6, 4)  # of the places 1, …, 6
    assert (np.diff(sets, axis=1) > 0).all()
    assert sets.min() == 1
    assert sets.max() == 6
    expected = draws / len(sets)
    assert np.abs(seen - expected).max() < 5 * math.sqrt(expected)
    by = np.asarray(indents.by)
    assert (np.diff(by, axis=1) >= 0).all()
    # The order statistics of five uniform draws below 1992: j / 6 of it on average.
    means = by.mean(0) / 1992
    np.testing.assert_allclose(means, np.arange(1, 6) / 6, atol=0.01)
    assert by.max() < 1992


def test_the_keys_of_an_evaluation_are_those_of_the_question() -> None:
    rows = np.array([[5, 6, 7, 0], [5, 6, 8, 0], [7, 6, 5, 0], [5, 6, 7, 9], [5, 6, 0, 0]])
    lengths = np.array([3, 3, 3, 3, 2])
    keys = jax.random.key_data(positions.evaluation_keys(rows, lengths)).tolist()
    wider = np.pad(rows, ((0, 0), (0, 3)), constant_values=1)
    assert jax.random.key_data(positions.evaluation_keys(wider, lengths)).tolist() == keys
    assert keys[0] == keys[3]  # what lies beyond is not read
    assert len({tuple(key) for key in keys}) == 4
