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
