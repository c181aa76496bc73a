"""Rewards by a user's own function: numbers, failures that are counted, and the deferred path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.sample import Sample
from qrag_jax.errors import InputError
from qrag_jax.feedback.completion import EpisodeRewards
from qrag_jax.feedback.language_model import Unscored
from qrag_jax.feedback.own_reward import OwnReward, Texts, open_own
from qrag_jax.feedback.service import FeedbackLost, PendingService
from qrag_jax.runtime.interrupt import StopSignal

SAMPLE = Sample("s1", "Where?", ("In Oslo.", "No.", "Bergen"), (2,), ("Oslo",), "own")
OTHERS = [Sample(f"s{n}", "Where?", SAMPLE.chunks, (), ("Oslo",), "own") for n in range(2, 5)]
CODE = """
import math
import numpy as np

def score(question, answers, taken, gold):
    assert isinstance(answers, list) and isinstance(taken, list) and isinstance(gold, list)
    if "No." in taken:
        raise ValueError("no, not\\nthat")
    if not taken:
        return None
    if taken == ["Bergen"]:
        return "west"
    return np.float32(sum(answers[0] in text for text in taken) - 0.25 * len(gold))

def truth(question, answers, taken, gold):
    return answers[0] in " ".join(taken)

def endless(question, answers, taken, gold):
    return math.inf
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def rewards_of(
    settings: OwnReward, samples: list[Sample], taken: list[list[int]], *, goes_on: bool = True
) -> tuple[list[Any], dict[str, float]]:
    lines: list[str] = []
    opened = open_own(settings, never_terminate=goes_on, log=lines.append)
    with opened as service, StopSignal() as stop:
        assert isinstance(service, PendingService)
        said = f"rewards by {settings.path}, which runs in this process, without a sandbox"
        assert lines == [said]
        service.check(samples)
        rewards = service.ready(stop)
        return rewards.wait(rewards.begin(samples, taken), stop), rewards.counts()


def test_numbers_become_the_reward_of_the_last_step(file: Path) -> None:
    settings = OwnReward(name="own", path=f"{file}:score", scale=2.0)
    found, counts = rewards_of(settings, [SAMPLE, *OTHERS[:1]], [[2, 0], [0, 3]])
    assert found == [EpisodeRewards((0.0, 1.5), 2), EpisodeRewards((0.0, 2.0), 2)]  # 3 is STOP
    assert counts == {}


def test_failures_are_counted_and_never_0(file: Path) -> None:
    settings = OwnReward(name="own", path=f"{file}:score", max_failure_share=0.75)
    found, counts = rewards_of(settings, [SAMPLE, *OTHERS], [[1, 0], [], [2], [0]])
    assert [each.cause for each in found[:3]] == ["raised", "no_reward", "no_number"]
    assert all(isinstance(each, Unscored) for each in found[:3])
    assert found[0].message == f"{file}:score raised for s1: ValueError: no, not that"
    assert "gave no reward (None) for s2" in found[1].message
    assert "gave 'west' for s3, no finite number" in found[2].message
    assert found[3] == EpisodeRewards((1.0,), 1)
    causes = ("raised", "no_reward", "no_number")
    assert counts == {f"reward/failures_{cause}": 1 for cause in causes}
    endless = OwnReward(name="own", path=f"{file}:endless", max_failure_share=0.9)
    with pytest.raises(FeedbackLost, match="inf for s1"):
        rewards_of(endless, [SAMPLE], [[0]])


def test_too_many_failures_end_the_run_with_the_example(file: Path) -> None:
    settings = OwnReward(name="own", path=f"{file}:score")
    with pytest.raises(FeedbackLost) as caught:
        rewards_of(settings, [SAMPLE, *OTHERS[:1]], [[1], [1]])
    text = str(caught.value)
    assert "2 of 2 episodes have no reward" in text
    assert "raised for s1: ValueError: no, not that" in text
    assert text.endswith(f"mend {file}:score, or raise config.reward.max_failure_share")


def test_a_threshold_asks_after_every_step_and_ends_the_episode(file: Path) -> None:
    settings = OwnReward(name="own", path=f"{file}:truth", completion_threshold=1.0)
    found, _ = rewards_of(settings, [SAMPLE], [[2, 0, 1]], goes_on=False)
    assert found == [EpisodeRewards((0.0, 1.0, 0.0), 2)]


def test_texts_are_in_the_order_taken() -> None:
    texts = Texts.of(SAMPLE, [2, 0, 3])
    assert (texts.taken, texts.gold) == (("Bergen", "In Oslo."), ("Bergen",))


def test_senseless_settings(file: Path) -> None:
    with pytest.raises(InputError, match=r"config\.reward\.path"):
        OwnReward(name="own")
    with pytest.raises(InputError, match=r"config\.reward\.scale is 0\.0"):
        OwnReward(name="own", path=f"{file}:score", scale=0.0)
