"""Settings of rewards that come from outside the device, after an episode is played."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping

from qrag_jax.errors import InputError, check_least
from qrag_jax.feedback.ground_truth import FactReward
from qrag_jax.llm import counters
from qrag_jax.runtime import hosts


@dataclasses.dataclass(frozen=True)
class DeferredReward(FactReward):
    """What rewards of a language model and of a user's own code have in common.

    The fields of `FactReward` are for the returns of evaluations that ask neither.
    """

    scale: float = 1.0  # factor on the reward
    # None: ask once, at the end. A number: ask after every step; the first reward (times scale)
    # that is not below this number completes the episode, and later steps get no reward
    completion_threshold: float | None = None
    # K: updates between playing an episode and learning from it; the rewards may be found
    # meanwhile, while the device continues. 0: strictly on-policy
    staleness: int = 1
    max_failure_share: float = 0.5  # share of a batch without rewards above which the run pauses

    def __post_init__(self) -> None:
        check_least("reward", self, step_cost=0, staleness=0)
        if not 0 < self.scale < math.inf:
            raise InputError(f"config.reward.scale is {self.scale}; use a number above 0.")
        threshold = self.completion_threshold
        if threshold is not None and not 0 < threshold < math.inf:
            raise InputError(
                f"config.reward.completion_threshold is {threshold}; use a number above 0, or None."
            )
        if not 0 <= self.max_failure_share < 1:
            raise InputError(
                f"config.reward.max_failure_share is {self.max_failure_share}; use a share of 0 or "
                "more and below 1."
            )


def metrics_of_all(own: counters.Counters) -> dict[str, float]:
    """The counters of all hosts' clients together, as metrics; all hosts call this together.

    Counts, tokens and seconds are sums; percentiles are those of all latencies.
    """
    return counters.Counters.of_all(hosts.texts_of_each(own.as_text())).as_metrics()


def sums_of_all(counts: Mapping[str, int]) -> dict[str, float]:
    """Sums over the hosts, each of which has names of its own; all hosts call this together."""
    total = Counter[str]()
    for text in hosts.texts_of_each(json.dumps(counts)):
        total.update(json.loads(text))
    return {name: float(count) for name, count in total.items()}
