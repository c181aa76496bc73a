"""Pairs of queries, the better one first, from the tries of one state (LeReT, arXiv 2410.23214).

LeReT's rule, which the defaults are:

1. A state whose tries all have one reward is left out.
2. Queries that repeat the opening of the prompt's passages are dropped.
3. The others are sorted, lowest reward first, and by prompt and draw where rewards are equal. Of
   equal queries the first of the highest reward counts.
4. Queries of equal reward are a level; each query of a level is preferred to each of the level
   below it ("adjacent").
5. The last query of the order is the target of SFT.

Three things differ. Queries are equal if they are so without regard to case and white space; the
best of them counts, as a search may mind case and the target of SFT must not be the worse one
(LeReT compares exact texts, whose rewards are equal). A try without a reward is left out before all
else. And where a state is left out, a share may be kept for SFT, so that the policy also sees
states that are solved or hopeless.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from qrag_jax.errors import InputError, check_known, check_least, check_share
from qrag_jax.feedback.next_states import uniform
from qrag_jax.feedback.pool_scores import ALL_GOLD, RECALL
from qrag_jax.feedback.tries import StateKey, Try, by_level, in_order, level_of

ADJACENT, ALL, BEST = PAIRINGS = ("adjacent", "all", "best")
# What became of a state: it has pairs; all rewards are equal and all tries found all gold pages, or
# none, or equally good pools; rewards differ, but no pair is left; no try has a reward.
PAIRED, ALL_SOLVED, ALL_ZERO, TIED, UNPAIRED, UNSCORED = REASONS = (
    "paired",
    "all_solved",
    "all_zero",
    "tied",
    "unpaired",
    "unscored",
)
TIES = (ALL_SOLVED, ALL_ZERO, TIED)
_SLACK = 1e-9  # of a gap that should be `least_gap`


@dataclasses.dataclass(frozen=True)
class PairsConfig:
    """Section `pairs`: which queries are preferred to which."""

    # adjacent (each level of reward above the next lower one, as LeReT), all (above each lower one)
    # or best (the best level above each lower one)
    pairing: str = ADJACENT
    least_gap: float = 0.0  # of the two rewards; they always differ
    cap: int = 0  # pairs of a state at most, those of the largest gaps; 0: all
    weighted_by_gap: bool = False  # a pair counts as much as its rewards differ
    # Of the states without pairs, whose queries are worth the same, shares that SFT learns from:
    solved_share: float = 0.0  # where each try found all gold pages
    tied_share: float = 0.0  # where none did, or not all
    # A query that has one of these in it repeats the prompt's passages, and is dropped
    degenerate: tuple[str, ...] = ("Passages found so far", "[1]")

    def __post_init__(self) -> None:
        check_known("pairs", self, "pairing", PAIRINGS)
        check_least("pairs", self, least_gap=0, cap=0)
        if not math.isfinite(self.least_gap):
            raise InputError(
                f"config.pairs.least_gap is {self.least_gap}; it must be a finite number."
            )
        check_share("pairs", self, "solved_share", "tied_share")
        if not all(normalised_query(text) for text in self.degenerate):
            raise InputError(
                "config.pairs.degenerate has an empty text, which is in every query; leave it out."
            )


class Pair(NamedTuple):
    """Two queries of a state, by their places in `StatePairs.queries`.

    Attributes:
        winner: the better one.
        loser: the other.
        weight: of the pair in the loss, above 0.
    """

    winner: int
    loser: int
    weight: float


@dataclasses.dataclass(frozen=True)
class StatePairs:
    """What is learned at one state.

    Attributes:
        at: the state; None if it has no tries.
        queries: the best try of each distinct query, lowest reward first.
        variants: for each query, the prompts that made the model write it, each once.
        pairs: of these queries.
        target: place of the query that SFT learns; None: this state is not for SFT.
        reason: one of `REASONS`.
        levels: different rewards among all scored tries.
        degenerate: scored tries that were dropped.
    """

    at: StateKey | None
    queries: tuple[Try, ...]
    variants: tuple[tuple[int, ...], ...]
    pairs: tuple[Pair, ...]
    target: int | None
    reason: str
    levels: int
    degenerate: int


def pairs_of(tries: Sequence[Try], config: PairsConfig, seed: Sequence[int] = ()) -> StatePairs:
    """The pairs and the target of one state.

    Args:
        tries: of one state; those without a reward do not count. Their order does not matter.
        seed: with the state, decides whether a state without pairs is kept for SFT, such as (seed,
            iteration).

    Raises:
        ValueError: the tries are of several states.
    """
    states = {each.at for each in tries}
    if len(states) > 1:
        raise ValueError("the tries are of several states")
    at = next(iter(states), None)
    scored = in_order(tries)
    levels = by_level(scored)
    ascending = [each for level in levels for each in level if not _degenerate(each, config)]
    best: dict[str, Try] = {}
    variants: dict[str, list[int]] = {}
    for each in ascending:
        text = normalised_query(each.query)
        if text not in best or level_of(each) > level_of(best[text]):
            best.pop(text, None)  # so that queries stay in ascending order
            best[text] = each
        if each.variant not in (writers := variants.setdefault(text, [])):
            writers.append(each.variant)
    queries = tuple(best.values())
    reason = UNSCORED
    pairs: tuple[Pair, ...] = ()
    if len(levels) == 1:
        reason = _kind_of_tie(scored)
    elif levels:
        pairs = _paired(queries, config)
        reason = PAIRED if pairs else UNPAIRED
    last = [*best].index(normalised_query(ascending[-1].query)) if ascending else None
    return StatePairs(
        at=at,
        queries=queries,
        variants=tuple(tuple(variants[text]) for text in best),
        pairs=pairs,
        target=last if at is not None and _is_for_sft(at, reason, config, seed) else None,
        reason=reason,
        levels=len(levels),
        degenerate=len(scored) - len(ascending),
    )


def normalised_query(query: str) -> str:
    """The query without case, with single blanks for all white space."""
    return " ".join(query.casefold().split())


def _degenerate(each: Try, config: PairsConfig) -> bool:
    query = normalised_query(each.query)
    return any(normalised_query(text) in query for text in config.degenerate)


def _kind_of_tie(scored: Sequence[Try]) -> str:
    if all(each.scores[ALL_GOLD] == 1 for each in scored):
        return ALL_SOLVED
    return ALL_ZERO if all(each.scores[RECALL] == 0 for each in scored) else TIED


def _is_for_sft(at: StateKey, reason: str, config: PairsConfig, seed: Sequence[int]) -> bool:
    if reason not in TIES:
        return reason != UNSCORED
    share = config.solved_share if reason == ALL_SOLVED else config.tied_share
    return uniform("kept_for_sft", seed, at) < share


def _paired(queries: Sequence[Try], config: PairsConfig) -> tuple[Pair, ...]:
    found: list[tuple[float, int, int]] = []
    for lower, higher in _pairs_of_levels(_places(queries), config.pairing):
        for loser in lower:
            for winner in higher:
                gap = level_of(queries[winner]) - level_of(queries[loser])
                if gap > config.least_gap - _SLACK:
                    found.append((gap, winner, loser))
    if config.cap:
        found = sorted(found, key=lambda each: -round(each[0] / _SLACK))[: config.cap]
    return tuple(
        Pair(winner, loser, gap if config.weighted_by_gap else 1.0) for gap, winner, loser in found
    )


def _places(queries: Sequence[Try]) -> list[list[int]]:
    """The places of the queries of each level, the lowest level first."""
    levels: dict[float, list[int]] = {}
    for place, each in enumerate(queries):
        levels.setdefault(level_of(each), []).append(place)
    return [*levels.values()]


def _pairs_of_levels(
    levels: Sequence[list[int]], pairing: str
) -> Iterator[tuple[list[int], list[int]]]:
    """Each level, and each level above it that it is compared with."""
    for number, lower in enumerate(levels):
        above = levels[number + 1 :]
        yield from (
            (lower, h) for h in {ADJACENT: above[:1], ALL: above, BEST: above[-1:]}[pairing]
        )
