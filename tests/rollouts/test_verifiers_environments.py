"""Environments by verifiers itself, of both protocols: `make verifiers0`, `make verifiers1`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.rollouts.played_units import Lost, Scored
from tests.environments.verifiers_pythons import PACKAGES, needs
from tests.rollouts.foreign import SIDE_BY_SIDE, Foreign, counts_letters, foreign

BOTH = [
    pytest.param(protocol, f"made-{protocol}", marks=needs(protocol)) for protocol in ("v0", "v1")
]
pytestmark = pytest.mark.long


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


@pytest.mark.parametrize(("protocol", "name"), BOTH)
def test_a_tool_is_called_and_the_rubric_is_the_reward(
    protocol: str, name: str, tmp_path: Path
) -> None:
    with foreign(tmp_path, protocol, name) as played:
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


@needs("v1")
def test_v1_connections_do_not_grow_with_episodes(tmp_path: Path) -> None:
    """Episodes share the connections of those that were side by side with them."""
    with foreign(tmp_path, "v1", "made-v1", size=40) as played:
        units = played.play(lambda text: "3", *range(40))
        assert all(isinstance(unit.ended, Scored) for unit in units)
        assert played.connections <= SIDE_BY_SIDE


@pytest.mark.parametrize(("protocol", "name"), BOTH)
@pytest.mark.parametrize(
    ("does", "cause", "says"),
    [("raise", "raised", "no answer"), ("nan", "no_number", "right gives nan")],
)
def test_a_rubric_that_fails_gives_no_reward(
    protocol: str, name: str, tmp_path: Path, does: str, cause: str, says: str
) -> None:
    with foreign(tmp_path, protocol, name, does=does) as played:
        (unit,) = played.play(counts_letters, 0)
        assert isinstance(unit.ended, Lost)
        assert unit.ended.cause == cause
        assert says in unit.ended.message


@pytest.mark.parametrize(("protocol", "name"), BOTH)
def test_an_agent_that_always_calls_is_stopped(protocol: str, name: str, tmp_path: Path) -> None:
    def call(text: str) -> str:
        return counts_letters("How many letters has abc?")

    with foreign(tmp_path, protocol, name) as played:
        (unit,) = played.play(call, 0)
        assert isinstance(unit.ended, Scored), unit.ended
        assert unit.ended.truncated
        assert unit.episodes[0].status == "truncated"
        assert sum(len(segment) for segment in unit.episodes[0].segments) == 5


@needs("v0")
@pytest.mark.parametrize(
    ("does", "cause", "says"),
    [
        ("stubborn", "endless", "never stops"),
        ("model", "request", "asks for the model 'another-model'"),
    ],
)
def test_v0_environments_that_do_not_follow(
    tmp_path: Path, does: str, cause: str, says: str
) -> None:
    with foreign(tmp_path, "v0", "made-v0", does=does) as played:
        (unit,) = played.play(lambda text: "yes", 0)
        assert isinstance(unit.ended, Lost)
        assert unit.ended.cause == cause
        assert says in unit.ended.message


@needs("v0")
def test_v0_an_endless_conversation_is_truncated(tmp_path: Path) -> None:
    with foreign(tmp_path, "v0", "made-v0", does="endless") as played:
        (unit,) = played.play(lambda text: "yes", 0)
        assert isinstance(unit.ended, Scored)
        assert unit.ended.truncated
        assert [len(segment) for segment in unit.episodes[0].segments] == [5]


@needs("v0")
def test_v0_a_rewritten_history_is_several_segments(tmp_path: Path) -> None:
    with foreign(tmp_path, "v0", "made-v0", does="rewrites") as played:
        (unit,) = played.play(lambda text: f"yes {len(text)}", 0)
        segments = unit.episodes[0].segments
        assert [len(segment) for segment in segments] == [1, 2, 1]
        check_tokens(played, segments)


@needs("v0")
def test_v0_rewards_that_compare_a_group(tmp_path: Path) -> None:
    said = iter(["a", "four words are here", "two words"])
    with foreign(tmp_path, "v0", "made-v0", does="group") as played:
        played.process.start(lambda: None)
        assert played.process.about is not None
        assert played.process.about.grouped
        (unit,) = played.play(lambda text: next(said), 0, members=3)
        rewards = [episode.ended.reward for episode in unit.episodes]  # type: ignore[union-attr]
        assert sorted(rewards) == pytest.approx([0, 1 / 3, 2 / 3])


@pytest.mark.parametrize(
    ("protocol", "name", "says"),
    [
        pytest.param("v0", "not-there", "has no package not_there", marks=needs("v0")),
        pytest.param("v1", "not-there", "has no package not_there", marks=needs("v1")),
        pytest.param("v0", "made-nothing", "has no load_environment", marks=needs("v0")),
        pytest.param("v1", "made-nothing", "exports no Taskset", marks=needs("v1")),
        pytest.param("v1", "made-v0", "speaks v0, and", marks=needs("v1")),
        pytest.param("v0", "made-v1", "speaks v1, and", marks=needs("v0")),
    ],
)
def test_a_package_that_cannot_be_used_is_refused(
    protocol: str, name: str, says: str, tmp_path: Path
) -> None:
    with foreign(tmp_path, protocol, name) as played, pytest.raises(InputError, match=says):
        played.process.start(lambda: None)
