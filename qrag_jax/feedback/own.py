"""Rewards from a user's own function over texts, by the path of its file.

    def score(question, answers, taken, gold):
        return float(any(answer in text for answer in answers for text in taken))

`question` is a text; `answers`, `taken` (the chunks, in the order taken) and `gold` (the supporting
ones, if the data know them) are lists of texts. The function returns a number, or None for no
reward. If it raises, returns None or something that is no finite number, the episode is left out of
the update and counted, never scored 0. It runs in this process, one call at a time, beside the
device: there is no sandbox.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from qrag_jax.data.sample import Sample
from qrag_jax.feedback.llm import (
    NO_NUMBER,
    NO_REWARD,
    RAISED,
    Completion,
    DeferredReward,
    PendingService,
    Reward,
    Rewards,
    Scorer,
    Unscored,
    sums_of_all,
)
from qrag_jax.runtime import own_code
from qrag_jax.runtime.own_code import OwnCode

OWN = "own"
PATH = "config.reward.path"
TAKES = ("question", "answers", "taken", "gold")


@dataclasses.dataclass(frozen=True)
class OwnReward(DeferredReward):
    """Section `reward`, for rewards from a function of the user's own."""

    path: str = ""  # FILE.py:FUNCTION of (question, answers, taken, gold); it runs without sandbox

    def __post_init__(self) -> None:
        own_code.check_form(self.path, PATH)


def number_of(code: OwnCode, call: Callable[[], Any], name: str) -> Reward:
    """The number that a user's function gives for the question of this name, or why not."""
    try:
        value = call()
    except (Exception, SystemExit) as error:
        return Unscored(RAISED, f"{code.spec} raised for {name}: {own_code.told(error)}")
    if value is None:
        return Unscored(NO_REWARD, f"{code.spec} gave no reward (None) for {name}")
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        return Unscored(NO_NUMBER, f"{code.spec} gave {value!r:.60} for {name}, no finite number")
    return float(value)


@contextlib.contextmanager
def open_own(
    reward: OwnReward, *, never_terminate: bool, log: Callable[[str], None]
) -> Iterator[PendingService]:
    """Loads the function, and scores with it until the end of the block.

    With `never_terminate` an episode continues after it is complete.
    """
    code = own_code.load(reward.path, PATH, TAKES)
    log(f"rewards by {code.spec}, which runs in this process, without a sandbox")
    failures = Counter[str]()

    def one(sample: Sample, taken: Sequence[int]) -> Reward:
        chunks = sample.chunks  # an index beyond them is STOP
        texts = {
            "question": sample.question,
            "answers": list(sample.answers),
            "taken": [chunks[index] for index in taken if index < len(chunks)],
            "gold": [chunks[index] for index in sample.support],
        }
        value = number_of(code, lambda: code.function(**texts), sample.id)
        if isinstance(value, Unscored):
            failures[value.cause] += 1
            return value
        return reward.scale * value

    def asked(sample: Sample, taken: Sequence[int]) -> tuple[Sample, Sequence[int]]:
        return sample, taken

    scorer = Scorer(lambda every: [one(*each) for each in every])
    rewards = Rewards(
        scorer,
        asked,
        reward.max_failure_share,
        log,
        counts=lambda: sums_of_all({f"reward/failures_{why}": n for why, n in failures.items()}),
        completion=Completion(reward.completion_threshold, not never_terminate),
        remedy=f"mend {code.spec}, or raise config.reward.max_failure_share",
    )
    try:
        yield PendingService(lambda stop: rewards, asked, {PATH: f"{code.spec} {code.digest}"})
    finally:
        scorer.close()
