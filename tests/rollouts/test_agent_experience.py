"""The order of questions, and where a run goes on that was stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.policies.plackett_luce import PlackettLuceConfig
from qrag_jax.retrieval.protocol import NONE
from qrag_jax.rollouts.agent_experience import AgentExperience, Playing, QuestionOrder
from qrag_jax.rollouts.hop_batch import HopBatch, HopShape, Rewarded, hop_batch, restored, saved
from qrag_jax.rollouts.pool_search import Drawn
from qrag_jax.runtime.interrupt import Stopped, StopSignal


def test_each_question_comes_once_an_epoch() -> None:
    order = QuestionOrder(10, 4, seed=3)
    drawn = [order.at(step) for step in range(5)]
    numbers = np.concatenate([each.numbers for each in drawn])
    assert sorted(numbers[:10]) == sorted(numbers[10:]) == list(range(10))
    assert numbers[:10].tolist() != numbers[10:].tolist() != list(range(10))
    np.testing.assert_array_equal(np.concatenate([e.epochs for e in drawn]), [0] * 10 + [1] * 10)


def test_the_first_epoch_may_be_in_order() -> None:
    own = [*range(9, -1, -1)]
    order = QuestionOrder(10, 4, 3, first=own)
    numbers = np.concatenate([order.at(step).numbers for step in range(5)]).tolist()
    assert numbers[:10] == own != numbers[10:]
    assert sorted(numbers[10:]) == sorted(own)


@pytest.mark.parametrize("first", [None, range(9)])
def test_hosts_share_a_batch(first: Sequence[int] | None) -> None:
    shards = (0, 1), (0, 3), (1, 3), (2, 3)
    whole, *parts = (QuestionOrder(9, 6, 0, shard, first=first) for shard in shards)
    for step in range(3):
        together = np.concatenate([part.at(step).numbers for part in parts])
        np.testing.assert_array_equal(together, whole.at(step).numbers)


K, HOPS, WIDTH = 4, 2, 3
CONFIG = PlackettLuceConfig(pool=K, passages=2, tau=0.1)
SHAPE = HopShape(HOPS, tokens=5, width=WIDTH, episode_rewards=1, hop_rewards=1)
VECTORS = np.random.default_rng(0).normal(size=(20, WIDTH)).astype(np.float32)


class Player:
    """Plays by drawing at random, seeded by the step, and writes down what it was asked to play.

    The reward tells which parameters acted.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.asked: list[tuple[float, list[int], int]] = []
        self._delay = delay

    def __call__(
        self, params: Any, numbers: Sequence[int], number: int, stop: StopSignal
    ) -> list[Rewarded]:
        time.sleep(self._delay)
        stop.check()
        self.asked.append((params, list(numbers), number))
        rng = np.random.default_rng(number)
        return [self._episode(rng, params) for _ in range(8)]

    def _episode(self, rng: np.random.Generator, params: float) -> Rewarded:
        pool = np.append(rng.choice(20, K - 1, replace=False), NONE)
        vectors = np.append(VECTORS[pool[:-1]], np.zeros((1, WIDTH), np.float32), axis=0)
        row = rng.integers(0, 9, 4).astype(np.int32)
        log_prob = float(np.float32(rng.normal()))
        actions = np.array([2, 0], np.int32)
        search = Drawn(row, pool, vectors, actions, log_prob, 0.5, ("a", "b"), False)
        if rng.random() < 0.3:
            return Rewarded([search], None)
        return Rewarded([search, search], [params], [[0.25], [float(np.float32(rng.random()))]])


def experience(
    play: Player, staleness: int = 0, batches: int = 0, pending: Sequence[Any] = (), steps: int = 6
) -> AgentExperience:
    playing = Playing(
        play=play,
        batch=lambda episodes: hop_batch(episodes, SHAPE, CONFIG),
        save=saved,
        restore=lambda kept: restored(kept, lambda numbers: VECTORS[numbers]),
        params=float,
        staleness=staleness,
        steps=steps,
    )
    order = QuestionOrder(10, 4, 0)
    return AgentExperience(order, playing, dict, batches, pending=pending)


def taken(made: AgentExperience, steps: Sequence[int]) -> list[Any]:
    """The batches and the samples of these steps; the state is the number of updates."""
    found = []
    for step in steps:
        arrays = jax.tree.map(np.asarray, made.next(step, step, StopSignal()))
        found.append((*arrays, made.samples))
    return found


def assert_same(some: list[Any], others: list[Any]) -> None:
    for one, other in zip(some, others, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_which_weights_play_which_questions(staleness: int, delay: float) -> None:
    play = Player(delay)
    batches = taken(experience(play, staleness), range(6))
    order = QuestionOrder(10, 4, 0)
    assert play.asked == [
        (max(step - staleness, 0), order.at(step).numbers.tolist(), step) for step in range(6)
    ]
    for step, batch in enumerate(batches):
        np.testing.assert_array_equal(batch[-1], np.stack(order.at(step), axis=1))
        rewards = batch[HopBatch._fields.index("episode_rewards")]
        scored = batch[HopBatch._fields.index("scored")]
        assert (rewards[scored] == max(step - staleness, 0)).all()


def test_batches_in_flight_are_kept_bit_for_bit() -> None:
    whole = taken(experience(Player(), 2), range(6))
    first = experience(Player(0.02), 2)
    assert_same(taken(first, range(3)), whole[:3])
    batches, pending = json.loads(json.dumps(first.position()))
    assert (batches, len(pending)) == (3, 2)
    play = Player()
    again = experience(play, 2, batches, pending)
    assert_same(taken(again, range(3, 6)), whole[3:])
    assert [number for _, _, number in play.asked] == [5]


def test_a_batch_that_was_stopped_is_played_again() -> None:
    stop, play = StopSignal(), Player(0.1)
    made = experience(play, 1)
    made.next(0, 0, stop)
    stop.requested = True
    with pytest.raises(Stopped):
        made.next(1, 1, stop)
    assert made.position() == (1, [])  # that of step 1 was in flight
    resumed = Player()
    again = experience(resumed, 1, 1)
    samples = [batch[-1] for batch in taken(again, range(1, 6))]
    whole = [batch[-1] for batch in taken(experience(Player(), 1), range(6))]
    assert_same([samples], [whole[1:]])


def test_an_error_while_playing_comes_to_the_loop() -> None:
    def fails(*_: Any) -> list[Rewarded]:
        raise InputError("the index is gone.")

    made = experience(fails, 1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the index is gone"):
        made.next(0, 0, StopSignal())
