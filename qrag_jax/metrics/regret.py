"""The best return of a question of Q-RAG in any number of steps, by supporting facts' rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Field of a run's config → attribute here; the defaults are those of the config.
_FIELDS = {
    "pqn.gamma": "gamma",
    "env.max_steps": "steps",
    "env.stop_action": "stops",
    "env.never_terminate": "goes_on",
    "reward.penalize_extra_steps": "penalized",
    "reward.per_fact_reward": "per_fact",
    "reward.step_cost": "step_cost",
}


@dataclasses.dataclass(frozen=True)
class BestReturn:
    """What returns depend on; see `feedback.facts`.

    Attributes:
        gamma: γ, the discount of a step.
        steps: T, steps of an episode.
        stops: whether there is a STOP action.
        goes_on: whether an episode goes on when all facts are found.
        penalized: whether more steps than facts make the reward smaller.
        per_fact: reward of each new fact.
        step_cost: cost of a chunk that is no fact.
    """

    gamma: float
    steps: int
    stops: bool = False
    goes_on: bool = True
    penalized: bool = True
    per_fact: float = 0.0
    step_cost: float = 0.0

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> BestReturn | None:
        """From fields of a run's config by their dotted names; None: γ or T is not known.

        Fields of another kind than is needed count as missing, since a log may be anybody's.
        """
        known: dict[str, Any] = {}
        for name, attribute in _FIELDS.items():
            value = fields.get(name)
            is_switch = attribute in ("stops", "goes_on", "penalized")
            if isinstance(value, bool) == is_switch and isinstance(value, bool | int | float):
                known[attribute] = value
        if not 0 <= known.get("gamma", -1) <= 1 or not 0 < known.get("steps", 0) < 10**6:
            return None
        return cls(**known | {"steps": int(known["steps"])})

    def __call__(self, facts: int) -> float:
        """The return of the episode that takes the facts first, in more than T steps if it must.

        Args:
            facts: number of supporting facts, at least 1.
        """
        reward = 0.5 + 0.5 * facts / (facts + 1e-5) if self.penalized else 1.0
        best = sum(self.gamma**t * self.per_fact for t in range(facts))
        best += self.gamma ** (facts - 1) * reward
        if self.goes_on and not self.stops:  # the other steps must take chunks that are no fact
            best -= sum(self.gamma**t * self.step_cost for t in range(facts, self.steps))
        return best
