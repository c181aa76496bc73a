"""Scores of a query writer's pool against the gold pages (LeReT, arXiv 2410.23214).

With G the gold pages, k the passages that a query finds, n the hop and P(i) the share of gold pages
among the first i passages of the pool, all in [0, 1]:

| name | what |
|---|---|
| `ap` | sum of P(i) over the places i of gold pages, / |G|: LeReT's average precision |
| `ap_min` | the same sum / min(|G|, n k), so that 1 can be reached at each hop |
| `recall` | |pool ∩ G| / |G|, which LeReT's files call `em` |
| `recall@c` | the same of the first c passages, whatever the hop |
| `all_gold` | 1 if all of G are in the pool, else 0 |

A page that is in the pool twice counts at its first place; its second passage takes a place all the
same, as it does in the prompt. LeReT counts it twice, so that its AP may be above 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from qrag_jax.errors import InputError, check_known, check_least

AP, AP_MIN, RECALL, ALL_GOLD = POOL_SCORES = ("ap", "ap_min", "recall", "all_gold")
MEASURES = (AP, AP_MIN, RECALL)
HOP, BEST_LATER = CREDITS = ("hop", "best_later")
_SECTION = "reward"


@dataclasses.dataclass(frozen=True)
class QueryRewardConfig:
    """Section `reward`: what a query is worth."""

    # Of the pool: ap (over all gold pages), ap_min (over those that it can hold) or recall
    measure: str = AP
    # When: hop (right after it, as LeReT has it), or best_later (that of the best later hop that
    # went on from it, if it is higher)
    credit: str = HOP
    hop_cost: float = 0.0  # taken off for each hop that searched
    recall_k: int = 6  # passages of the recall@k that is reported; the same at each hop

    def __post_init__(self) -> None:
        check_known(_SECTION, self, "measure", MEASURES)
        check_known(_SECTION, self, "credit", CREDITS)
        check_least(_SECTION, self, recall_k=1)
        if not 0 <= self.hop_cost < math.inf:
            raise InputError(
                f"config.reward.hop_cost is {self.hop_cost}; it must be a finite number, 0 at "
                "least."
            )

    def of_hop(self, scores: Mapping[str, float], *, searched: bool) -> float:
        """The reward of a try by the pool right after its hop.

        What the hops before have cost is not in it: it is the same for all tries of a state.

        Args:
            scores: as `PoolScores.of` gives them.
            searched: whether the try searched; to stop costs nothing.
        """
        return scores[self.measure] - self.hop_cost * searched


@dataclasses.dataclass(frozen=True)
class PoolScores:
    """Scores pools.

    Attributes:
        k: passages that a query finds.
        cut: c, passages of `recall@c`.
    """

    k: int
    cut: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all scores."""
        return (*POOL_SCORES, f"recall@{self.cut}")

    def of(self, pages: Sequence[str], gold: Sequence[str], hop: int) -> dict[str, float]:
        """Each of `names` of one pool.

        Args:
            pages: keys of the pool's pages, in its order.
            gold: keys of the gold pages, each once.
            hop: n, the hop that the pool is after, from 1. A try that stops counts as one, too, so
                that all tries of a state are measured alike.

        Raises:
            ValueError: there is no gold page, or one is there twice.
        """
        wanted = set(gold)
        if not wanted or len(wanted) < len(gold):
            raise ValueError("a question has one gold page at least, and each once")
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
