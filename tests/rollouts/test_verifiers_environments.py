"""Environments by verifiers itself, `make verifiers`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.rollouts.played_units import Lost, Scored
from tests.environments.verifiers_pythons import PACKAGES, needs_verifiers
from tests.rollouts.foreign import SIDE_BY_SIDE, Foreign, counts_letters, foreign

NAME = "made-v1"
pytestmark = [pytest.mark.long, needs_verifiers]


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))


def check_tokens(played: Foreign, segments: tuple) -> None:
    """What trains is what the sampler drew, behind the ids that it saw."""
    drawn = {turn.log_probs.tobytes(): (ids, turn) for ids, turn in played.sampler.drawn}
    for segment in segments:
        row = np.zeros(0, np.int32)
        for turn in segment:
            row = np.concatenate([row, turn.observed])
            ids, own = drawn.pop(turn.log_probs.tobytes())
            np.testing.assert_array_equal(row, ids)
            np.testing.assert_array_equal(turn.sampled, own.ids)
            row = np.concatenate([row, turn.sampled])
    assert not drawn


def test_a_tool_is_called_and_the_rubric_is_the_reward(tmp_path: Path) -> None:
    with foreign(tmp_path, NAME) as played:
        units = played.play(counts_letters, 0, 3)
        segments = ()
        for unit in units:
            (episode,) = unit.episodes
            assert isinstance(episode.ended, Scored), episode.ended
            assert episode.ended.reward == 1.0
            assert episode.ended.parts["right"] == 1.0
            assert not episode.ended.truncated
            (segment,) = episode.segments
            assert len(segment) == 2
            segments += episode.segments
        check_tokens(played, segments)
        assert played.counts.outside == 0
        unit = played.play(lambda text: "I do not know", 1)[0]
        assert isinstance(unit.ended, Scored)
        assert unit.ended.reward == 0.0


def test_connections_do_not_grow_with_episodes(tmp_path: Path) -> None:
    """Episodes share the connections of those that were side by side with them."""
    with foreign(tmp_path, NAME, size=40) as played:
        units = played.play(lambda text: "3", *range(40))
        assert all(isinstance(unit.ended, Scored) for unit in units)
        assert played.connections <= SIDE_BY_SIDE


@pytest.mark.parametrize(
    ("does", "cause", "says"),
    [("raise", "raised", "no answer"), ("nan", "no_number", "right gives nan")],
)
def test_a_rubric_that_fails_gives_no_reward(
    tmp_path: Path, does: str, cause: str, says: str
) -> None:
    with foreign(tmp_path, NAME, does=does) as played:
        (unit,) = played.play(counts_letters, 0)
        assert isinstance(unit.ended, Lost)
        assert unit.ended.cause == cause
        assert says in unit.ended.message


def test_an_agent_that_always_calls_is_stopped(tmp_path: Path) -> None:
    def call(text: str) -> str:
        return counts_letters("How many letters has abc?")

    with foreign(tmp_path, NAME) as played:
        (unit,) = played.play(call, 0)
        assert isinstance(unit.ended, Scored), unit.ended
        assert unit.ended.truncated
        assert unit.episodes[0].status == "truncated"
        assert sum(len(segment) for segment in unit.episodes[0].segments) == 5


@pytest.mark.parametrize(
    ("name", "says"), [("not-there", "no package not_there"), ("made-nothing", "no Taskset")]
)
def test_a_package_that_cannot_be_used_is_refused(name: str, says: str, tmp_path: Path) -> None:
    with foreign(tmp_path, name) as played, pytest.raises(InputError, match=says):
        played.process.start(lambda: None)
