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
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from qrag_jax.data.sample import Sample
from qrag_jax.errors import check_known
from qrag_jax.feedback.completion import Completion
from qrag_jax.feedback.deferred_reward import DeferredReward, sums_of_all
from qrag_jax.feedback.language_model import NO_NUMBER, NO_REWARD, RAISED, Reward, Unscored
from qrag_jax.feedback.service import PendingService, Rewards
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
        check_known("reward", self, "name", (OWN,))
        super().__post_init__()
        own_code.check_form(self.path, PATH)


@dataclasses.dataclass(frozen=True)
class Texts:
    """What the function is called with.

    Attributes:
        id: the sample's, for messages.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    taken: tuple[str, ...]
    gold: tuple[str, ...]

    @classmethod
    def of(cls, sample: Sample, taken: Sequence[int]) -> Texts:
        """The texts of a sample; an index beyond its chunks is STOP, which has none."""
        return cls(
            sample.id,
            sample.question,
            sample.answers,
            tuple(sample.chunks[index] for index in taken if index < len(sample.chunks)),
            tuple(sample.chunks[index] for index in sample.support),
        )


class OwnFeedback:
    """Scores batches by a user's function on a thread, while the caller continues."""

    def __init__(self, code: OwnCode, scale: float = 1.0) -> None:
        self._code, self._scale = code, scale
        self._failures: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="own-reward")

    def begin(
        self, questions: Sequence[Texts], known: Sequence[Reward] | None = None
    ) -> Future[list[Reward]]:
        """Starts to score; the future has one reward per question, in order.

        Args:
            known: rewards of an earlier call; they stay, because the function would fail again.
        """
        if known is not None:
            return self._pool.submit(list, known)
        return self._pool.submit(lambda: [self._reward(each) for each in questions])

    def counts(self) -> dict[str, float]:
        """Failures of all hosts since the start of the run, by cause; all call this together."""
        return sums_of_all({f"reward/failures_{each}": n for each, n in self._failures.items()})

    def close(self) -> None:
        """Cancels batches that have not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _reward(self, texts: Texts) -> Reward:
        reward = scored(self._code, texts)
        if isinstance(reward, Unscored):
            self._failures[reward.cause] += 1
            return reward
        return self._scale * reward


def scored(code: OwnCode, texts: Texts) -> Reward:
    """Calls the function; what is no finite number is a failure, never a reward of 0."""
    given = {name: getattr(texts, name) for name in TAKES}
    lists = {name: list(each) if isinstance(each, tuple) else each for name, each in given.items()}
    return number_of(code, lambda: code.function(**lists), texts.id)


def number_of(code: OwnCode, call: Callable[[], Any], name: str) -> Reward:
    """The number that a call of a user's function gives, or why it gives none.

    Args:
        name: of the question, for messages.
    """
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

    Args:
        never_terminate: whether an episode continues after it is complete.
        log: receives lines for people.
    """
    code = own_code.load(reward.path, PATH, TAKES)
    log(f"rewards by {code.spec}, which runs in this process, without a sandbox")
    feedback = OwnFeedback(code, reward.scale)
    rewards = Rewards(
        feedback,
        Texts,
        reward.max_failure_share,
        log,
        counts=feedback.counts,
        completion=Completion(reward.completion_threshold, not never_terminate),
        remedy=f"mend {code.spec}, or raise config.reward.max_failure_share",
    )
    try:
        yield PendingService(lambda stop: rewards, Texts, {PATH: f"{code.spec} {code.digest}"})
    finally:
        feedback.close()
