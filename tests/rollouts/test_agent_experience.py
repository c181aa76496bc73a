"""The order of questions, and where a run goes on that was stopped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qrag_jax.rollouts.agent_experience import AgentExperience, QuestionOrder
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from tests.devices import mesh_of
from tests.learners.hop_updates import batch


def test_each_question_comes_once_an_epoch() -> None:
    order = QuestionOrder(10, 4, seed=3)
    drawn = [order.at(step) for step in range(5)]
    numbers = np.concatenate([each.numbers for each in drawn])
    assert sorted(numbers[:10]) == sorted(numbers[10:]) == list(range(10))
    assert numbers[:10].tolist() != numbers[10:].tolist() != list(range(10))
    np.testing.assert_array_equal(np.concatenate([e.epochs for e in drawn]), [0] * 10 + [1] * 10)


def test_hosts_share_a_batch() -> None:
    whole, parts = QuestionOrder(9, 6, 0), [QuestionOrder(9, 6, 0, (i, 3)) for i in range(3)]
    for step in range(3):
        together = np.concatenate([part.at(step).numbers for part in parts])
        np.testing.assert_array_equal(together, whole.at(step).numbers)


class Played:
    """Plays nothing, and writes down what it was asked to play."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int]] = []

    def __call__(self, state: Any, numbers: Any, number: int, stop: StopSignal) -> Any:
        self.asked.append((list(numbers), number))
        stop.check()
        return batch(8)


def test_a_batch_that_was_stopped_is_played_again() -> None:
    mesh, order, stop = mesh_of(), QuestionOrder(10, 4, 0), StopSignal()
    played = Played()
    experience = AgentExperience(mesh, order, played, dict)
    experience.next(None, 0, stop)
    assert experience.position() == (1, [])
    assert experience.samples.tolist() == [[n, 0] for n in played.asked[0][0]]
    stop.requested = True
    stopping = Played()
    broken = AgentExperience(mesh, order, stopping, dict, batches=1)
    with pytest.raises(Stopped):
        broken.next(None, 1, stop)
    assert broken.position() == (1, [])
    again = AgentExperience(mesh, order, played, dict, batches=broken.position()[0])
    again.next(None, 1, StopSignal())
    whole = AgentExperience(mesh, order, beside := Played(), dict)
    for number in range(2):
        whole.next(None, number, StopSignal())
    assert played.asked == beside.asked
