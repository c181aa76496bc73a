"""Rewards that come later: a model's answers, a user's own function, and the server behind them."""

from __future__ import annotations

import concurrent.futures
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.sample import Sample
from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.feedback.llm import Asking, model_rewards
from qrag_jax.feedback.rewards import (
    Asked,
    EpisodeRewards,
    Reward,
    RewardConfig,
    Rewards,
    episode_rewards,
    open_own,
    parts_asked,
)
from qrag_jax.llm.config import LlmConfig, ServerConfig, leave_room
from qrag_jax.llm.outcomes import Answer, ChatRequest, Failure, Outcome
from qrag_jax.llm.server.server import open_model
from qrag_jax.llm.text.generation import Generation
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from tests.entry_points import wait_until
from tests.llm.stand_in import StandIn, model_folder, running, stand_in

__all__ = ["model_folder", "stand_in"]
LOST = Failure("timeout", "too late")


def test_rewards_of_an_episodes_steps() -> None:
    """Asked once, the last step has the reward; else the threshold completes the episode."""
    assert (parts_asked([4, 1, 7], None), parts_asked([], None)) == ([[4, 1, 7]], [[]])
    assert (parts_asked([4, 1, 7], 1.0), parts_asked([], 1.0)) == ([[4], [4, 1], [4, 1, 7]], [[]])
    assert episode_rewards([0.5], 3, None) == ((0.0, 0.0, 0.5), 3)
    assert episode_rewards([LOST], 2, None) == LOST
    assert episode_rewards([0.0], 0, None) == ((), 0)
    # As the public code does it: rewards below the threshold count, those after it do not.
    each_step: list[tuple[list[Reward], int, bool, Any]] = [
        ([0.2, 1.0, 1.0], 3, True, ((0.2, 1.0, 0.0), 2)),
        ([0.0, 0.4, 0.0], 3, True, ((0.0, 0.4, 0.0), 3)),
        ([0.2, 1.0, 1.0], 3, False, ((0.2, 1.0, 0.0), 3)),
        ([0.0, LOST, 1.0], 3, False, LOST),  # a lost answer matters up to completion alone
        ([1.0, LOST, LOST], 3, True, ((1.0, 0.0, 0.0), 1)),
    ]
    for rewards, steps, ends, expected in each_step:
        assert episode_rewards(rewards, steps, 1.0, ends) == expected


# ---------------------------------------------------------------- a model's answers

GOLD = ("Ada Lovelace", "Countess of Lovelace")


def reads(prompt: str) -> Outcome:
    """What stands behind "says:" in the passages; a word in capitals is a failure."""
    if "Given answer:" in prompt:
        answer = prompt.rpartition("Given answer:")[2]
        verdict = "yes" if "Countess" in answer else "no"
        return Answer("I cannot tell." if "Babbage" in answer else f"Final answer: {verdict}")
    answer = prompt.partition("says:")[2].split("\n")[0].strip()
    if answer.isupper():
        return Failure(answer.lower(), "as scripted")
    return Answer(f"Hm.\nFinal answer: {answer}" if answer else "...")


GENERATION = Generation()


def asked(name: str, *golds: str) -> Sample:
    return Sample(name, "Who wrote it?", support=(0,), answers=golds or GOLD)


def scored(
    metric: str, *says: str, generation: Generation = GENERATION, scale: float = 1.0
) -> tuple[list, list[str]]:
    """The rewards of questions whose passages say these answers, and the prompts of the model."""
    prompts: list[str] = []

    def ask(requests: Sequence[ChatRequest]) -> list[Outcome]:
        prompts.extend(own := [request.messages[-1][1] for request in requests])
        return [*map(reads, own)]

    asking = Asking(metric="squad")
    questions = [
        asking.question("test", asked(f"q{i}"), [(4, f"says: {item}")])
        for i, item in enumerate(says)
    ]
    return model_rewards(ask, generation, metric, scale, questions), prompts


def test_the_metric_of_the_answer_times_the_scale() -> None:
    says = ("Ada Lovelace", "the countess of Lovelace!", "Ada King", "Babbage")
    assert scored("answer_em", *says)[0] == [1.0, 1.0, 0.0, 0.0]
    assert scored("answer_f1", *says, scale=2.0)[0] == [2.0, 2.0, 1.0, 0.0]
    with pytest.raises(InputError, match="sample q9"):
        Asking().question("test", asked("q9", "  "), [])
    small = Generation(max_prompt_tokens=3, count=lambda messages: 9)
    (lost,), prompts = scored("answer_em", says[0], generation=small)
    assert (lost.cause, prompts) == ("too_long", [])


def test_what_has_no_answer_has_no_reward() -> None:
    result, _ = scored("answer_f1", "Ada Lovelace", "TIMEOUT", "", "Ada King", "FILTERED")
    assert (result[0], result[3]) == (1.0, 0.5)
    assert result[1] == Failure("timeout", "as scripted")
    assert [result[place].cause for place in (2, 4)] == ["no_text", "filtered"]


def test_the_verdict_of_a_judge() -> None:
    says = ("Countess Lovelace", "somebody", "Babbage", "SERVER")
    result, prompts = scored("judge", *says, scale=0.5)
    assert result[:2] == [0.5, 0.0]
    assert [item.cause for item in result[2:]] == ["unclear_verdict", "server"]
    # What failed is not judged; the judge sees the right answers and the one that was given.
    judged = [prompt for prompt in prompts if "Given answer:" in prompt]
    assert len(judged) == 3
    assert all(item in judged[0] for item in (*GOLD, says[0]))


def test_only_failures_that_may_pass_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qrag_jax.feedback.rewards.FIRST_PAUSE", 0.0)
    asked: list[list[str]] = []

    def score(names: Sequence[str]) -> list[Reward]:
        asked.append([*names])
        known: list[Reward] = [0.25, LOST, Failure("server", ""), Failure("no_text", "")]
        return known if len(asked) == 1 else [1.0, 0.5]

    samples = [Sample(name, "Where?", ("A",), (), ("A",), "own") for name in "abcd"]
    settings = RewardConfig(max_failure_share=0.25)
    rewards = Rewards(score, lambda sample, taken: sample.id, settings, print)
    found = rewards.wait(rewards.begin(samples, [[0]] * 4), StopSignal())
    rewards.close()
    got = [each.rewards if isinstance(each, EpisodeRewards) else each.cause for each in found]
    assert got == [(0.25,), (1.0,), (0.5,), "no_text"]
    assert asked == [["a", "b", "c", "d"], ["b", "c"]]


# ---------------------------------------------------------------- a user's own function

SAMPLE = Sample("s1", "Where?", ("In Oslo.", "No.", "Bergen"), (2,), ("Oslo",), "own")
NAMES = ("s1", "s2", "s3")
OTHERS = [Sample(f"s{n}", "Where?", SAMPLE.chunks, (), ("Oslo",), "own") for n in range(2, 5)]
CODE = """
import math
import numpy as np

def score(question, answers, taken, gold):
    if "No." in taken:
        raise ValueError("no, not\\nthat")
    if not taken:
        return None
    if taken == ["Bergen"]:
        return "west"
    return np.float32(sum(answers[0] in text for text in taken) - 0.25 * len(gold))

def endless(question, answers, taken, gold):
    return math.inf
"""


def rewards_of(
    settings: RewardConfig, samples: list[Sample], taken: list[list[int]]
) -> tuple[list[Any], dict[str, float]]:
    lines: list[str] = []
    opened = open_own(settings, never_terminate=True, log=lines.append)
    with opened as rewards, StopSignal() as stop:
        assert len(lines) == 1
        assert settings.path in lines[0]  # a user is warned which code runs
        rewards.check(samples)
        rewards.ready(stop)
        return rewards.wait(rewards.begin(samples, taken), stop), rewards.counts()


def test_a_users_function(tmp_path: Path) -> None:
    """Its number is the reward of the last step; failures are counted and never 0."""
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    settings = RewardConfig(name="own", path=f"{file}:score", scale=2.0)
    result, _ = rewards_of(settings, [SAMPLE, OTHERS[0]], [[2, 0], [0, 3]])
    assert result == [EpisodeRewards((0.0, 1.5), 2), EpisodeRewards((0.0, 2.0), 2)]  # 3 is STOP
    settings = RewardConfig(name="own", path=f"{file}:score", max_failure_share=0.75)
    result, counts = rewards_of(settings, [SAMPLE, *OTHERS], [[1, 0], [], [2], [0]])
    causes = ("raised", "no_reward", "no_number")
    assert [(item.cause, name in item.message) for item, name in zip(result[:3], NAMES)] == [
        (cause, True) for cause in causes
    ]
    assert result[3] == EpisodeRewards((1.0,), 1)
    assert counts == {f"reward/failures_{cause}": 1 for cause in causes}
    # Too many end the run, with an example; what is infinite is no number.
    with pytest.raises(FeedbackLost, match=r"s1.*config\.reward\.max_failure_share"):
        rewards_of(RewardConfig(name="own", path=f"{file}:endless"), [SAMPLE], [[0]])


# ---------------------------------------------------------------- a run's own server


def test_jax_leaves_room_for_a_server_on_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fraction = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.delenv(fraction, raising=False)
    leave_room(LlmConfig("http://127.0.0.1:8000/v1", "tiny"))
    leave_room(LlmConfig(server=ServerConfig("org/name", devices="1", memory_share=0.9)))
    assert fraction not in os.environ
    for given, left in (("", "0.50"), ("0.2", "0.2")):  # or as the user has it
        if given:
            monkeypatch.setenv(fraction, given)
        leave_room(LlmConfig(server=ServerConfig("org/name", memory_share=0.45)))
        assert os.environ[fraction] == left


def test_an_answer_longer_than_the_server_holds_is_refused(tmp_path: Path) -> None:
    server = ServerConfig("org/name", python=sys.executable, max_model_len=8192)
    llm = LlmConfig(max_tokens=9000, server=server)
    with (
        pytest.raises(InputError, match=r"config\.llm\.max_tokens"),
        open_model(llm, tmp_path, 0, print),
    ):
        pass


def test_a_wait_ends_when_the_server_is_lost_or_the_run_is_to_stop() -> None:
    lost = ""
    waiting = Rewards(lambda every: [], Asking().of, RewardConfig(), print, lost=lambda: lost)
    never, stop = Asked([], concurrent.futures.Future()), StopSignal()
    stop.requested = True
    with pytest.raises(Stopped):
        waiting.wait(never, stop)
    lost = "vLLM was given up"
    with pytest.raises(FeedbackLost, match="given up"):
        waiting.wait(never, StopSignal())


def test_a_stop_while_the_server_starts(
    stand_in: StandIn, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "hangs")
    server = ServerConfig(str(model_folder), python=str(stand_in.python), max_model_len=0)
    stop = StopSignal()
    with open_model(LlmConfig(server=server), tmp_path, 0, print) as model:
        wait_until(stand_in.pids)
        stop.requested = True
        with pytest.raises(Stopped):
            model.wait(stop)
    assert not any(map(running, stand_in.pids()))
