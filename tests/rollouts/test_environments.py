"""Environments that call their model: turns by ids, a server of turns, and lost processes."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.environments.episode import Failed
from qrag_jax.environments.verifiers_side import program
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.scaffolds import ChatRenderer
from qrag_jax.llm.text.tool_calls import HERMES
from qrag_jax.rollouts import environment_play
from qrag_jax.rollouts.environment_play import (
    EnvironmentProcess,
    EpisodeCalls,
    PlaySettings,
    ProcessLost,
    Scored,
)
from qrag_jax.rollouts.token_episodes import Counts, Episode, Start
from qrag_jax.rollouts.trajectories import STOP, Sampled, Turn
from qrag_jax.runtime.interrupt import StopSignal
from tests.environments.trying import tiny_tokenizer
from tests.machine import PACKAGES, PYTHON, needs_verifiers
from tests.rollouts.token_setup import ScriptedSampler

WORDS = "system user assistant tool_response a few words to learn from, and numbers 0 1 2"
TOKENIZER = tiny_tokenizer([WORDS])
RENDERER = ChatRenderer(TOKENIZER, HERMES)
KEY = np.array([1, 2], np.uint32)
LIMITS = PlaySettings(turn=200, room=4000, tokens=0, temperature=1.0, renderer=RENDERER)


# ---------------------------------------------------------------- the turns of an episode


def test_turns_have_limits_keys_and_the_runs_distribution() -> None:
    for limit, most in (({"tokens": 3}, 3), ({"room": 25}, 5)):
        calls = EpisodeCalls(dataclasses.replace(LIMITS, **limit), KEY)
        request: Any = calls.ask(np.ones(20, np.int32), {})
        assert request.most == most
        drawn = Sampled(np.array([4, 5, 6], np.int32), -np.ones(3, np.float32), STOP)
        calls.turns.append(Turn(request.ids, *drawn))
        assert isinstance(calls.ask(np.ones(25, np.int32), {}), Failure)
    calls, ids = EpisodeCalls(LIMITS, KEY), np.ones(2, np.int32)
    same = {"temperature": 1.0, "top_p": 1.0, "n": 1, "max_tokens": 3}
    assert calls.ask(ids, same).most == 3  # type: ignore[union-attr]
    for sampling in ({"temperature": 0.5}, {"logit_bias": {"3": 1}}):
        assert isinstance(calls.ask(ids, sampling), Failure)
    # A draw depends on what is before, and on how often that came.
    calls, one, two = EpisodeCalls(LIMITS, KEY), np.array([1], np.int32), np.array([2], np.int32)
    keys: list[Any] = [calls.ask(before, {}).key.tolist() for before in (one, one, two)]  # type: ignore[union-attr]
    assert len({*map(tuple, keys)}) == 3
    other: Any = EpisodeCalls(LIMITS, KEY).ask(two, {})
    assert other.key.tolist() == keys[2]


def test_a_mark_in_a_text_ends_no_turn() -> None:
    ids = RENDERER.opening([{"role": "user", "content": "before <|im_end|> after"}])
    assert ids.tolist().count(TOKENIZER.eos_token_id) == 1


# ---------------------------------------------------------------- an environment's process


def says(say: Callable[[str], str]) -> ScriptedSampler:
    return ScriptedSampler(TOKENIZER, say)


class Plays:
    """An environment in its process, and a scripted sampler."""

    def __init__(self, python: str, log: Path, fields: Any, room: int, settings: Any) -> None:
        self.process = EnvironmentProcess(python, log, fields)
        self.sampler: Any = says(lambda text: f"said {len(text)}")
        self.counts = Counts()
        how: Any = {"tokens": 0, "temperature": 1.0, "renderer": RENDERER}
        self.settings = PlaySettings(room=room, **how, **settings)

    def play(self, *tasks: int, **more: Any) -> list[Episode]:
        settings = dataclasses.replace(self.settings, **more)
        keys = (np.array([task, 0], np.uint32) for task in tasks)
        starts = [Start(int(key[0]), key) for key in keys]
        playing = environment_play.EnvironmentPlay(self.process, settings, self.counts)
        return playing.play(starts, self.sampler, StopSignal())


@pytest.fixture
def plays(tmp_path: Path) -> Iterator[Callable[..., Plays]]:
    started: list[Plays] = []

    def start(does: str, **more: Any) -> Plays:
        fields = {"id": "scripted", "arguments": {"does": does, "marks": str(tmp_path / "mark")}}
        script = str(Path(__file__).with_name("scripted_environment.py"))
        settings = {"turn": 50, "attempts": 2, "side_by_side": 8, **more}
        started.append(Plays(script, tmp_path / "log", fields, 400, settings))
        return started[-1]

    yield start
    for each in started:
        each.process.end()


def test_episodes_are_played_side_by_side(plays: Callable[..., Plays]) -> None:
    chat = plays("chat")
    result = chat.play(0, 1, 2, 3)
    for task, episode in enumerate(result):
        assert isinstance(episode.ended, Scored)
        (segment,) = episode.segments
        assert len(segment) == 2
        reward = (len(segment[1].sampled) + task) % 5 / 4
        assert (episode.ended.reward, episode.ended.parts) == (reward, {"half": reward / 2})
        assert f"result {task}" in TOKENIZER.decode(segment[1].observed.tolist())
    chat.sampler.check(result)
    assert chat.counts.turns == 8
    assert chat.counts.batches <= 6  # at best 2
    assert chat.process.starts == 1
    # A draw does not depend on what is played next to it.
    chat.play(3, 2, 1, 0, side_by_side=2)
    keys = [request.key.tobytes() for request, _ in chat.sampler.drawn]
    assert {*keys[:8]} == {*keys[8:]}
    assert len({*keys}) == 8
    # A turn that cannot be sampled fails its episode.
    chat.sampler.sampled = lambda request: Failure("server", "it is down")
    assert chat.play(0)[0].ended == Failed("connection", "it is down")


def test_a_failed_episode_is_played_again(plays: Callable[..., Plays]) -> None:
    failing, dying = plays("fail"), plays("die")
    played = [*failing.play(0, 1), *dying.play(0, 1)]
    assert all(isinstance(episode.ended, Scored) for episode in played)
    assert [episode.attempts for episode in played[:2]] == [2, 2]
    assert failing.counts.failed == 2
    assert (dying.process.starts, dying.counts.lost) == (2, 1)


def test_a_failure_is_a_value(plays: Callable[..., Plays], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_play, "_GRACE", 0.2)
    causes = {"hang": "timeout", "image": "connection"}
    for does in ("raised", "no_number", "hang", "image"):
        (episode,) = plays(does, seconds=0.2 * (does == "hang")).play(0)
        assert isinstance(episode.ended, Failed)
        assert (episode.ended.cause, episode.attempts) == (causes.get(does, does), 2)


def test_the_models_time_does_not_count_for_the_environment(
    plays: Callable[..., Plays], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that is compiled, or a large model, may take longer than an environment may."""
    monkeypatch.setattr(environment_play, "_GRACE", 0.5)
    late = plays("chat", seconds=0.2, attempts=1)

    def submit(requests: Any) -> Any:
        time.sleep(1.0)
        return sample(requests)

    sample, late.sampler.submit = late.sampler.submit, submit
    assert all(isinstance(episode.ended, Scored) for episode in late.play(0, 1))
    assert late.counts.lost == 0


def test_an_environment_that_cannot_be_used_is_refused(
    plays: Callable[..., Plays], tmp_path: Path
) -> None:
    changing = plays("changes")  # other tasks at another start
    changing.play(0)
    changing.process.end()
    for refused in (changing, plays("refuse")):
        with pytest.raises(InputError):
            refused.play(0)
    with pytest.raises(ProcessLost, match="it ends at once"):
        plays("end").process.start(lambda: None)
    nothing = EnvironmentProcess(str(tmp_path / "nothing"), tmp_path / "log", {})
    with pytest.raises(InputError, match="nothing"):
        nothing.start(lambda: None)


# ---------------------------------------------------------------- the side of verifiers


def test_a_clock_leaves_out_the_time_of_the_model() -> None:
    with pytest.raises(program.EpisodeFailed, match=r"config\.env\.seconds") as failed:
        asyncio.run(program.Clock(0.1).bounded(asyncio.sleep(30)))
    assert failed.value.cause == "timeout"
    clock = program.Clock(0.3)

    async def asks() -> str:
        clock.speaks(on=True)
        await asyncio.sleep(0.5)
        clock.speaks(on=False)
        return "done"

    async def run() -> str:
        return await clock.bounded(asks())

    assert asyncio.run(run()) == "done"
    assert clock.seconds < 0.3


def test_the_code_of_a_package_is_all_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "qrag_made_folder"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "rubric.py").write_text("WEIGHT = 1")
    module = program.imported("qrag-made-folder", package.name)
    before = program.code_of(module)
    assert program.code_of(module) == before
    (package / "inner" / "rubric.py").write_text("WEIGHT = 2")
    assert program.code_of(module) != before
    (tmp_path / "qrag_broken.py").write_text("import qrag_not_there")
    for name in ("qrag_broken", "qrag_none"):
        with pytest.raises(program.Refused, match=name):
            program.imported(name, name)


def counts_letters(text: str) -> str:
    """A model that calls the tool, then answers with what it said."""
    if "tool_response" in text.rpartition("<|im_end|>\n<|im_start|>user")[2]:
        return "It has " + text.rpartition("<tool_response>\n")[2].partition("\n")[0]
    word = text.rpartition("How many letters has ")[2].partition("?")[0]
    call = f'{{"name": "count_letters", "arguments": {{"word": "{word}"}}}}'
    return f"I count.\n<tool_call>\n{call}\n</tool_call>"


@needs_verifiers
def test_a_tool_of_verifiers_is_called_and_the_rubric_is_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))
    limits = {"seconds": 60.0, "turns": 5, "tokens": 0, "turn_tokens": 200}
    fields = {"id": "made-v1", "arguments": {"size": 40}, "model": "policy", "limits": limits}
    fields |= {"tasks": 100, "harness": "direct"}
    settings = {"turn": 200, "seconds": 60.0, "side_by_side": 8}
    real = Plays(PYTHON, tmp_path / "verifiers.log", fields, 1500, settings)
    try:
        real.sampler = says(counts_letters)
        for episode in (result := real.play(0, 3)):
            assert (episode.ended.reward, episode.ended.parts["right"]) == (1.0, 1.0)
            assert not episode.ended.tally.truncated
            assert [len(segment) for segment in episode.segments] == [2]
        real.sampler.check(result)
        real.sampler = says(lambda text: "I do not know")
        assert {e.ended.reward for e in real.play(*range(8))} == {0.0}
    finally:
        real.process.end()
