"""What a query writer tried: one query at one state, what it found, and what that is worth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

from qrag_jax.environments.queries import SEARCHED
from qrag_jax.errors import Count, Weight, one_of


class StateKey(NamedTuple):
    """Which state."""

    question: int  # its number
    hop: int  # from 1
    state: int  # number of the state among those of this question at this hop, from 0


class TryKey(NamedTuple):
    """Which try; `variant` and `draw` are its own, the rest is its state's."""

    question: int
    hop: int
    state: int
    variant: int
    draw: int


@dataclasses.dataclass(frozen=True, slots=True)
class Try:
    """One query at one state. Its prompt follows from the state and is not kept."""

    question: int  # number of the question
    hop: int  # from 1
    state: int  # number of the state among those of this question at this hop
    variant: int  # number of the prompt that asked; 0 is the bare one
    draw: int  # number of the draw among those of this prompt
    query: str  # its text, on one line; "" if there is none
    sampled: tuple[int, ...]  # the ids that were sampled, with the one that ended the turn
    log_probs: tuple[float, ...]  # of these, in nats, by the distribution that they were drawn from
    finish: str  # "stop", "length" if it was cut off, or "" if the model said nothing
    outcome: str  # one of `state.OUTCOMES`, or the cause of a failure
    # ids and scores of the passages that the query found, best first
    found: tuple[tuple[str, float], ...] = ()
    pool: tuple[str, ...] = ()  # ids of the passages after the hop, in the pool's order
    # of this pool; none if the try is not scored
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    reward: float | None = None  # None: it has none, since it is empty, too long or failed
    version: str = ""  # of the weights that sampled it

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


# ---------------------------------------------------------------- what a pool is worth
# With G the gold pages, k the passages that a query finds, n the hop and P(i) the share of gold
# pages among the first i passages of the pool, all in [0, 1]:
#
# | name | what |
# |---|---|
# | `ap` | sum of P(i) over the places i of gold pages, / |G|: LeReT's average precision |
# | `ap_min` | the same sum / min(|G|, n k), so that 1 can be reached at each hop |
# | `recall` | |pool ∩ G| / |G|, which LeReT's files call `em` |
# | `recall@c` | the same of the first c passages, whatever the hop |
# | `all_gold` | 1 if all of G are in the pool, else 0 |
#
# A page that is in the pool twice counts at its first place; its second passage takes a place all
# the same, as it does in the prompt. LeReT (arXiv 2410.23214) counts it twice, so that its AP may
# be above 1.

AP, AP_MIN, RECALL, ALL_GOLD = POOL_SCORES = ("ap", "ap_min", "recall", "all_gold")
MEASURES = (AP, AP_MIN, RECALL)
HOP, BEST_LATER = CREDITS = ("hop", "best_later")


@dataclasses.dataclass(frozen=True)
class QueryRewardConfig:
    """Section `reward`: what a query is worth."""

    # Of the pool: ap (over all gold pages), ap_min (over those that it can hold) or recall
    measure: Annotated[str, one_of(MEASURES)] = AP
    # When: hop (right after it, as LeReT has it), or best_later (that of the best later hop that
    # went on from it, if it is higher)
    credit: Annotated[str, one_of(CREDITS)] = HOP
    hop_cost: Weight = 0.0  # taken off for each hop that searched
    recall_k: Count = 6  # passages of the recall@k that is reported; the same at each hop

    def of_hop(self, scores: Mapping[str, float], *, searched: bool) -> float:
        """The reward of a try by the scores of the pool right after its hop; to stop costs nothing.

        What the hops before have cost is not in it: it is the same for all tries of a state.
        """
        return scores[self.measure] - self.hop_cost * searched


@dataclasses.dataclass(frozen=True)
class PoolScores:
    """Scores pools."""

    k: int  # passages that a query finds
    cut: int  # c, passages of `recall@c`

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all scores."""
        return (*POOL_SCORES, f"recall@{self.cut}")

    def of(self, pages: Sequence[str], gold: Sequence[str], hop: int) -> dict[str, float]:
        """Each of `names` of one pool after hop n (from 1), by the keys of its pages, in its order.

        A try that stops counts as a hop, too, so that all tries of a state are measured alike.
        """
        wanted = set(gold)
        left, found_early = set(wanted), 0
        precisions: list[float] = []
        for place, page in enumerate(pages, 1):
            if page not in left:
                continue
            left.remove(page)
            precisions.append((len(precisions) + 1) / place)
            found_early += place <= self.cut
        total = math.fsum(precisions)
        return {
            AP: total / len(wanted),
            AP_MIN: total / min(len(wanted), hop * self.k),
            RECALL: len(precisions) / len(wanted),
            ALL_GOLD: float(not left),
            f"recall@{self.cut}": found_early / len(wanted),
        }
