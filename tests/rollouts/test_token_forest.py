"""Whatever branches, each sampled token trains once, behind the ids that it was sampled behind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qrag_jax.rollouts.token_forest import Piece, segments_of
from qrag_jax.rollouts.trajectories import DONE, SCORED, BatchRules, TokenTrajectory, token_batch


@st.composite
def forests(draw: st.DrawFn) -> list[Piece]:
    """Pieces in any order of parents; a third of them is only read."""
    pieces: list[Piece] = []
    token = 0
    for number in range(draw(st.integers(1, 14))):
        size = draw(st.integers(0, 4))
        ids = np.arange(token, token + size, dtype=np.int32)  # each id is there once
        token += size
        learned = draw(st.integers(0, 2)) > 0
        log_probs = -ids.astype(np.float32) / 8 if learned else None
        pieces.append(Piece(draw(st.integers(-1, number - 1)), ids, log_probs))
    return pieces


def before(pieces: list[Piece], number: int) -> list[int]:
    """The ids up to a piece."""
    found: list[int] = []
    while (number := pieces[number].parent) >= 0:
        found = [*pieces[number].ids.tolist(), *found]
    return found


@given(forests())
def test_each_sampled_token_trains_once(pieces: list[Piece]) -> None:
    places = {int(i): n for n, piece in enumerate(pieces) for i in piece.ids}
    seen: list[int] = []
    for segment in segments_of(pieces):
        row: list[int] = []
        for turn in segment:
            row += turn.observed.tolist()
            own = places[int(turn.sampled[0])]
            assert row == before(pieces, own)
            assert turn.sampled.tolist() == pieces[own].ids.tolist()
            np.testing.assert_array_equal(turn.log_probs, pieces[own].log_probs)
            seen += turn.sampled.tolist()
            row += turn.sampled.tolist()
    trained = [i for piece in pieces if piece.log_probs is not None for i in piece.ids.tolist()]
    assert sorted(seen) == sorted(trained)


@given(forests())
def test_attention_sees_what_the_loss_does_not_count(pieces: list[Piece]) -> None:
    segments = segments_of(pieces)
    episode = TokenTrajectory(0, 0, 1, segments, DONE, {"reward": 1.0})
    batch = token_batch([episode], BatchRules(1, ("reward",), SCORED, 100))
    for row, segment in enumerate(segments):
        size = sum(len(turn.observed) + len(turn.sampled) for turn in segment)
        sampled = sum(len(turn.sampled) for turn in segment)
        assert batch.lengths[row] == size
        assert batch.loss_mask[row].sum() == batch.log_prob_mask[row].sum() == sampled
        assert not batch.loss_mask[row, : len(segment[0].observed)].any()


def test_a_parent_stands_before() -> None:
    with pytest.raises(ValueError, match="not before"):
        segments_of([Piece(1, np.zeros(1, np.int32)), Piece(-1, np.zeros(1, np.int32))])
