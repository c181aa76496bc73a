"""Episodes of an environment in a process of its own, which may fail, hang or be lost."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.environments.verifiers_process import EnvironmentProcess, ProcessLost, ProcessSpec
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.chat_rendering import ChatRenderer
from qrag_jax.llm.text.tool_calls import HERMES
from qrag_jax.rollouts import environment_play
from qrag_jax.rollouts.called_turns import TurnLimits
from qrag_jax.rollouts.environment_play import EnvironmentPlay, hands_over
from qrag_jax.rollouts.generate_server import GenerateServer
from qrag_jax.rollouts.played_units import Lost, PlayCounts, PlayedUnit, PlaySettings, Scored, Unit
from tests.rollouts.chats import ScriptedSampler, chat_tokenizer

TOKENIZER = chat_tokenizer()
RENDERER = ChatRenderer(TOKENIZER, HERMES)
MADE = Path(__file__).with_name("made_environment.py")


class NoStop:
    def check(self) -> None:
        return None


class Plays:
    """The made environment, and a scripted sampler."""

    def __init__(self, folder: Path, does: str, **more: Any) -> None:
        arguments = {"does": does, "marks": str(folder / "mark")}
        fields = {"id": "made", "arguments": arguments}
        self.log = folder / "environment.log"
        self.process = EnvironmentProcess(ProcessSpec(str(MADE), self.log, fields))
        self.sampler: Any = ScriptedSampler(TOKENIZER, lambda text: f"said {len(text)}")
        limits = TurnLimits(turn=50, room=400, turns=4, tokens=0, temperature=1.0)
        given = {"seconds": 0.0, "attempts": 2, "side_by_side": 8, **more}
        self.counts = PlayCounts()
        self.settings = PlaySettings(limits, **given)
        self.playing = self.played_by(self.settings)

    def played_by(self, settings: PlaySettings) -> EnvironmentPlay:
        return EnvironmentPlay(self.process, RENDERER, settings, self.counts)

    def play(self, *tasks: int, members: int = 1) -> list[PlayedUnit]:
        units = [
            Unit("train", task, tuple(np.array([task, n], np.uint32) for n in range(members)))
            for task in tasks
        ]
        return self.playing.play(units, self.sampler, NoStop())


@pytest.fixture
def plays(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Plays]:
    does, more = request.param if isinstance(request.param, tuple) else (request.param, {})
    found = Plays(tmp_path, does, **more)
    yield found
    found.process.end()


@pytest.mark.parametrize("plays", ["chat"], indirect=True)
def test_episodes_are_played_side_by_side(plays: Plays) -> None:
    found = plays.play(0, 1, 2, 3)
    for task, unit in enumerate(found):
        (episode,) = unit.episodes
        assert isinstance(episode.ended, Scored)
        (segment,) = episode.segments
        assert len(segment) == 2
        reward = (len(segment[1].sampled) + task) % 5 / 4
        assert episode.ended.reward == reward
        assert episode.ended.parts == {"half": reward / 2}
        assert f"result {task}" in TOKENIZER.decode(segment[1].observed.tolist())
        assert segment[0].version == "v"
    assert plays.counts.turns == 8
    assert plays.counts.batches <= 4  # at best 2
    assert plays.process.starts == 1


@pytest.mark.parametrize("plays", [("chat", {"side_by_side": 2})], indirect=True)
def test_a_draw_does_not_depend_on_what_is_played_beside_it(plays: Plays) -> None:
    plays.play(0, 1, 2, 3)
    keys = set(plays.sampler.keys)
    plays.sampler.keys.clear()
    plays.play(3, 2, 1, 0)
    assert set(plays.sampler.keys) == keys
    assert len(keys) == 8


@pytest.mark.parametrize("plays", ["grouped"], indirect=True)
def test_a_group_is_one_unit(plays: Plays) -> None:
    (unit,) = plays.play(2, members=3)
    assert len(unit.episodes) == 3
    assert isinstance(unit.ended, Scored)


@pytest.mark.parametrize("plays", ["fail"], indirect=True)
def test_a_failed_episode_is_played_again(plays: Plays) -> None:
    found = plays.play(0, 1)
    assert [unit.episodes[0].attempts for unit in found] == [2, 2]
    assert all(isinstance(unit.ended, Scored) for unit in found)
    assert plays.counts.failed == 2


@pytest.mark.parametrize("plays", ["die"], indirect=True)
def test_a_process_that_dies_is_started_again(plays: Plays) -> None:
    found = plays.play(0, 1, 2)
    assert all(isinstance(unit.ended, Scored) for unit in found)
    assert plays.process.starts == 2
    assert plays.counts.lost == 1


@pytest.mark.parametrize("plays", [("hang", {"seconds": 0.2, "attempts": 1})], indirect=True)
def test_a_process_that_hangs_is_ended(plays: Plays, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_play, "_GRACE", 0.2)
    (unit,) = plays.play(0)
    assert isinstance(unit.ended, Lost)
    assert unit.ended.cause == "timeout"
    assert "config.env.seconds is 0.2" in unit.ended.message


@pytest.mark.parametrize("plays", [("chat", {"seconds": 0.2, "attempts": 1})], indirect=True)
def test_a_sampler_that_takes_long_is_no_silence(
    plays: Plays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that is compiled, or a large model, may take longer than an environment may."""
    monkeypatch.setattr(environment_play, "_GRACE", 1.0)

    def submit(requests: Any) -> Any:
        time.sleep(1.5)
        return ScriptedSampler.submit(plays.sampler, requests)

    plays.sampler.submit = submit
    (unit,) = plays.play(0)
    assert isinstance(unit.ended, Scored)
    assert plays.counts.lost == 0


@pytest.mark.parametrize("plays", ["endless", "raised", "no_number"], indirect=True)
def test_a_failure_is_a_value(plays: Plays, request: pytest.FixtureRequest) -> None:
    (unit,) = plays.play(0)
    assert isinstance(unit.ended, Lost)
    assert unit.ended.cause in request.node.callspec.id
    assert unit.episodes[0].attempts == 2


@pytest.mark.parametrize("plays", ["chat"], indirect=True)
def test_a_turn_that_cannot_be_sampled_fails_its_episode(plays: Plays) -> None:
    plays.sampler.sampled = lambda request: Failure("server", "it is down")
    (unit,) = plays.play(0)
    assert unit.ended == Lost("server", "it is down")


@pytest.mark.parametrize("plays", ["served"], indirect=True)
def test_the_model_speaks_as_soon_as_it_is_asked(plays: Plays, tmp_path: Path) -> None:
    """Its time is no environment's, also while it samples for others and hears nothing."""
    heard = []

    def submit(requests: Any) -> Any:
        ends = time.monotonic() + 10
        while len([*tmp_path.glob("mark*")]) < 2 and time.monotonic() < ends:
            time.sleep(0.01)
        heard.append(len([*tmp_path.glob("mark*")]))
        return ScriptedSampler.submit(plays.sampler, requests)

    with GenerateServer("policy", 400, RENDERER, hands_over(plays.process)) as server:
        served = {"url": server.url, "key": server.key}
        plays.playing = plays.played_by(dataclasses.replace(plays.settings, served=served))
        plays.sampler.submit = submit
        found = plays.play(0, 1)
    assert all(isinstance(unit.ended, Scored) for unit in found)
    assert heard[0] == 2


@pytest.mark.parametrize("plays", ["refuse"], indirect=True)
def test_a_refusal_is_one_sentence(plays: Plays) -> None:
    with pytest.raises(InputError, match=r"^the environment cannot be used; name another\.$"):
        plays.play(0)


@pytest.mark.parametrize("plays", ["end"], indirect=True)
def test_a_process_that_ends_at_once_says_why(plays: Plays) -> None:
    with pytest.raises(ProcessLost, match="it ends at once"):
        plays.process.start(lambda: None)


@pytest.mark.parametrize("plays", ["changes"], indirect=True)
def test_other_tasks_at_another_start_are_refused(plays: Plays) -> None:
    plays.play(0)
    plays.process.end()
    with pytest.raises(InputError, match="give it a seed"):
        plays.play(0)


def test_a_python_that_is_not_there_is_refused(tmp_path: Path) -> None:
    spec = ProcessSpec(str(tmp_path / "nothing"), tmp_path / "log", {})
    with pytest.raises(InputError, match="cannot be run"):
        EnvironmentProcess(spec).start(lambda: None)
