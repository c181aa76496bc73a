"""Plays episodes again that broke, while too many of a batch are broken.

A model server that is down for a while costs time, and no questions: episodes without an answer are
masked only where they are few.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from qrag_jax.environments.rag.episode import MALFORMED_CALL, NO_RETRIEVAL, OWN_CODE, Broken
from qrag_jax.feedback.llm import FIRST_PAUSE, LONGEST_PAUSE, PERMANENT, FeedbackLost
from qrag_jax.metrics.answer_table import causes_text
from qrag_jax.rollouts.agents import Checks

_LOOK_EVERY = 0.1  # seconds between looks for a signal to stop
# Playing again, even later, does not change these.
HOPELESS = (*PERMANENT, NO_RETRIEVAL, MALFORMED_CALL, OWN_CODE)

PlayAll = Callable[[Sequence[Any]], list[Any]]
ADVICE = (
    "use a model that follows the agent's prompts, raise config.llm.max_tokens or "
    "config.agent.max_broken_share, or give prompts of your own (config.agent.prompts); an agent "
    "of your own (config.agent.path) must be mended"
)


@dataclasses.dataclass(frozen=True)
class Patience:
    """How many episodes of a batch may break.

    Attributes:
        max_broken_share: above it the run pauses, and plays the broken episodes again.
        stop: looked at during a pause.
        log: receives lines for people.
        broken: the class of what an episode's `ended` is if it broke; it has a cause and a message.
        advice: what to do if playing again is in vain.
    """

    max_broken_share: float
    stop: Checks
    log: Callable[[str], None]
    broken: type = Broken
    advice: str = ADVICE

    def play(self, starts: Sequence[Any], play: PlayAll) -> list[Any]:
        """The episodes, of which at most the allowed share is broken.

        Raises:
            FeedbackLost: too many episodes would break again.
        """
        episodes, pause = play(starts), FIRST_PAUSE
        while broken := self._too_many(episodes):
            hopeless = [each for each in broken.values() if each.cause in HOPELESS]
            if len(hopeless) > self.max_broken_share * len(episodes):
                raise FeedbackLost(
                    f"{len(hopeless)} of {len(episodes)} episodes broke, and playing them again "
                    f"would change nothing ({_told(hopeless)}); {self.advice}"
                )
            self.log(
                f"paused: {len(broken)} of {len(episodes)} episodes broke "
                f"({_told([*broken.values()])}); playing them again in {pause:.0f} s. Stopped and "
                "given again, the command goes on from here."
            )
            ends = time.monotonic() + pause
            while time.monotonic() < ends:
                self.stop.check()
                time.sleep(_LOOK_EVERY)
            pause = min(2 * pause, LONGEST_PAUSE)
            places = [*broken]
            for place, each in zip(places, play([starts[p] for p in places]), strict=True):
                episodes[place] = each
        return episodes

    def _too_many(self, episodes: Sequence[Any]) -> dict[int, Any]:
        """The broken episodes by their places, if they are too many; else none."""
        broken = {
            place: each.ended
            for place, each in enumerate(episodes)
            if isinstance(each.ended, self.broken)
        }
        return broken if len(broken) > self.max_broken_share * len(episodes) else {}


def _told(broken: Sequence[Any]) -> str:
    """How many broke for which cause, and one message."""
    return f"{causes_text(broken)}; for example: {broken[0].message.rstrip('.')}"
