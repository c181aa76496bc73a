"""Played hops as tries, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qrag_jax.environments.query_writing.state import (
    BY_HOP,
    BY_PASSAGE,
    EMPTY,
    STOPPED,
    TOO_LONG,
    Searched,
)
from qrag_jax.environments.tools.episode import Document, Failed
from qrag_jax.feedback.pool_scores import PoolScores, QueryRewardConfig
from qrag_jax.feedback.tries import StateKey, Try
from qrag_jax.rollouts.query_tries import Asked, Scoring, state_after, try_of
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.rollouts.trajectories import Turn
from tests.environments.query_writing.trying import BERG, LATER, OSLO, RAIN, STATE

SCORING = Scoring(PoolScores(2, 6), QueryRewardConfig(hop_cost=0.125), BY_HOP, BY_PASSAGE)
TURN = Turn(
    np.array([1, 2, 3], np.int32), np.array([7, 8], np.int32), np.array([-1.5, -0.25], np.float32),
    "stop", "v3",
)  # fmt: skip


def made(ended: Any, state=LATER, turn: Turn | None = TURN) -> Try:
    segments = () if turn is None else ((turn,),)
    asked = Asked(StateKey(4, state.hop, 1), state.asked_by(2), 3)
    return try_of(asked, TokenEpisode(ended, segments, 1), SCORING)


def test_what_a_query_found_joins_the_pool_and_is_scored() -> None:
    each = made(Searched(answer="oslo", seen=("b", "a"), found=(OSLO, BERG)))
    assert each.key == (4, 2, 1, 2, 3)
    assert each.pool == ("a", "c", "b")
    assert each.found == (("b", 7.0), ("a", 5.0))
    assert each.scores["ap"] == pytest.approx((1 / 1 + 2 / 3) / 2)
    assert each.reward == pytest.approx(each.scores["ap"] - 0.125)
    assert (each.sampled, each.log_probs, each.version) == ((7, 8), (-1.5, -0.25), "v3")


def test_to_stop_costs_nothing_and_keeps_the_pool() -> None:
    each = made(Searched(answer="DONE", outcome=STOPPED))
    assert each.pool == ("a", "c")
    assert each.reward == each.scores["ap"] == 0.5
    assert not each.searched


@pytest.mark.parametrize("outcome", [EMPTY, TOO_LONG])
def test_no_query_has_no_reward(outcome: str) -> None:
    each = made(Searched(answer="", outcome=outcome))
    assert (each.reward, each.scores, each.pool) == (None, {}, ("a", "c"))


def test_a_failure_has_no_reward_either() -> None:
    each = made(Failed("timeout", "no reply"), turn=None)
    assert (each.outcome, each.reward, each.sampled, each.finish) == ("timeout", None, (), "")


def test_the_next_state_has_the_pool_with_its_scores() -> None:
    each = made(Searched(answer="oslo", seen=("b",), found=(OSLO,)))
    opened: list[str] = []

    def by_name(_: Any, names: Any) -> list[Document]:
        opened.extend(names)
        return [OSLO._replace(score=0.0)]

    after = state_after(LATER, each, by_name)
    assert opened == ["b"]
    assert after.pool == (BERG, RAIN, OSLO)
    assert (after.hop, after.variant, after.pages) == (3, 0, STATE.pages)
