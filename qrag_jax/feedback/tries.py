"""What a query writer tried: one query at one state, what it found, and what that is worth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from qrag_jax.environments.queries import OUTCOMES, SEARCHED, STOPPED
from qrag_jax.llm.outcomes import CAUSES, ENDS
from qrag_jax.runtime import typed_json


class StateKey(NamedTuple):
    """Which state.

    Attributes:
        question: its number.
        hop: from 1.
        state: number of the state among those of this question at this hop, from 0.
    """

    question: int
    hop: int
    state: int


class TryKey(NamedTuple):
    """Which try; `variant` and `draw` are its own, the rest is its state's."""

    question: int
    hop: int
    state: int
    variant: int
    draw: int


@dataclasses.dataclass(frozen=True, slots=True)
class Try:
    """One query at one state. Its prompt follows from the state and is not kept.

    Attributes:
        question: number of the question.
        hop: from 1.
        state: number of the state among those of this question at this hop.
        variant: number of the prompt that asked; 0 is the bare one.
        draw: number of the draw among those of this prompt.
        query: its text, on one line; "" if there is none.
        sampled: the ids that were sampled, with the one that ended the turn.
        log_probs: of these, in nats, by the distribution that they were drawn from.
        finish: "stop", "length" if it was cut off, or "" if the model said nothing.
        outcome: one of `state.OUTCOMES`, or the cause of a failure.
        found: ids and scores of the passages that the query found, best first.
        pool: ids of the passages after the hop, in the pool's order.
        scores: of this pool; none if the try is not scored.
        reward: None: it has none, since it is empty, too long or failed.
        version: of the weights that sampled it.

    Raises:
        ValueError: an attribute cannot be, or does not agree with another.
    """

    question: int
    hop: int
    state: int
    variant: int
    draw: int
    query: str
    sampled: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: str
    outcome: str
    found: tuple[tuple[str, float], ...] = ()
    pool: tuple[str, ...] = ()
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    reward: float | None = None
    version: str = ""

    def __post_init__(self) -> None:
        if len(self.sampled) != len(self.log_probs):
            raise ValueError(
                f"a try has {len(self.sampled)} tokens and {len(self.log_probs)} log-probabilities"
            )
        if self.outcome not in (*OUTCOMES, *CAUSES):
            raise ValueError(f"a try does not end by {self.outcome!r}")
        if self.finish not in ("", *ENDS):
            raise ValueError(f"a turn ends by {' or '.join(ENDS)}, not {self.finish!r}")
        if self.reward is None:
            return
        if self.outcome not in (SEARCHED, STOPPED):
            raise ValueError(f"a try that ended by {self.outcome!r} has no reward")
        if not math.isfinite(self.reward):
            raise ValueError(f"the reward of a try is {self.reward}")

    @property
    def scored(self) -> bool:
        """Whether it has a reward, and may be learned from."""
        return self.reward is not None

    @property
    def searched(self) -> bool:
        """Whether its query was searched for, so that it may go on to the next hop."""
        return self.outcome == SEARCHED

    @property
    def at(self) -> StateKey:
        """Its state."""
        return StateKey(self.question, self.hop, self.state)

    @property
    def key(self) -> TryKey:
        """What tells it from all other tries of an iteration."""
        return TryKey(self.question, self.hop, self.state, self.variant, self.draw)

    def to_json(self) -> dict[str, Any]:
        """The try as JSON values; `from_json` reads it, to the last bit."""
        return {
            "question": self.question,
            "hop": self.hop,
            "state": self.state,
            "variant": self.variant,
            "draw": self.draw,
            "query": self.query,
            "sampled": list(self.sampled),
            "log_probs": list(self.log_probs),
            "finish": self.finish,
            "outcome": self.outcome,
            "found": [list(each) for each in self.found],
            "pool": list(self.pool),
            "scores": dict(self.scores),
            "reward": self.reward,
            "version": self.version,
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Try:
        """Reads what `to_json` gave.

        Raises:
            ValueError: it is no try.
        """
        return typed_json.made(cls, saved)


# Rewards that are equal in this many decimals are one level: equal ones may differ in their last
# bits, by the order of sums. In pools of a dozen passages, those that do differ are 1e-5 apart.
_DECIMALS = 9


def in_order(tries: Iterable[Try]) -> list[Try]:
    """The scored tries, in the order of state, prompt and draw."""
    return sorted((each for each in tries if each.scored), key=lambda each: each.key)


def level_of(each: Try) -> float:
    """The level of a scored try: its reward, rounded."""
    assert each.reward is not None
    return round(each.reward, _DECIMALS)


def by_level(tries: Sequence[Try]) -> list[list[Try]]:
    """Scored tries of equal reward together, the lowest first; they keep their order inside."""
    levels: dict[float, list[Try]] = {}
    for each in tries:
        levels.setdefault(level_of(each), []).append(each)
    return [levels[level] for level in sorted(levels)]
