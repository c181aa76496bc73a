"""What is learned from the tries of a query writer (LeReT, arXiv 2410.23214).

`choose` says which tries of a hop go on to the next one, `credited` gives them what came of them
later, and `pairs_of` makes pairs of queries of one state, the better one first. LeReT's rule of
pairs, which the defaults are:

1. A state whose tries all have one reward is left out.
2. Queries that repeat the opening of the prompt's passages are dropped.
3. The others are sorted, lowest reward first, and by prompt and draw where rewards are equal. Of
   equal queries the first of the highest reward counts.
4. Queries of equal reward are a level; each query of a level is preferred to each of the level
   below it ("adjacent").
5. The last query of the order is the target of SFT.

Two things differ. Queries are equal if they are so without regard to case and white space; the best
of them counts, as a search may mind case and the target of SFT must not be the worse one (LeReT
compares exact texts, whose rewards are equal). And a try without a reward is left out before all
else.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from qrag_jax.errors import InputError, one_of
from qrag_jax.feedback.tries import (
    ALL_GOLD,
    AP,
    BEST_LATER,
    RECALL,
    QueryRewardConfig,
    StateKey,
    Try,
    TryKey,
    by_level,
    in_order,
    level_of,
)

# ---------------------------------------------------------------- which tries go on
# "weighted" is LeReT's rule: tries with an average precision of 1 are discarded; the others are in
# buckets of equal reward; a bucket is drawn with the weight of its average precision, the best one
# with 0.5 more, and a try is drawn uniformly inside it. So a bucket of 0 is drawn only where it is
# the only one. Levels 0, 0.25 and 0.5 have the probabilities 0, 0.2 and 0.8.

WEIGHTED, GREEDY = CHOICES = ("weighted", "greedy")
_BONUS = 0.5  # of the best bucket


@dataclasses.dataclass(frozen=True)
class NextStatesConfig:
    """Section `next_state`: the state of the next hop."""

    # weighted (drawn by reward, as LeReT) or greedy (the best)
    choice: Annotated[str, one_of(CHOICES)] = WEIGHTED
    # A pool with average precision 1 goes on, too, so that the model learns not to spoil it
    solved_go_on: bool = False


def choose(tries: Sequence[Try], config: NextStatesConfig, seed: Sequence[int]) -> Try | None:
    """The try whose pool is the state of the next hop; None: the question ends.

    Only tries that searched and are scored go on. Equal rewards are in the order of state, prompt
    and draw, so that the order of `tries` (of one question at one hop) does not matter. `seed` is
    what the draw is of, such as (seed, iteration, hop, question).
    """
    # An average precision is exactly 1 only if all gold pages come first.
    levels = by_level(
        [
            each
            for each in in_order(tries)
            if each.searched and (config.solved_go_on or each.scores[AP] != 1)
        ]
    )
    if not levels:
        return None
    if config.choice == GREEDY:
        return levels[-1][0]
    weights = [math.fsum(each.scores[AP] for each in level) / len(level) for level in levels]
    weights[-1] += _BONUS
    sums = [*itertools.accumulate(weights)]
    spot = uniform("level", seed) * sums[-1]
    # A level of weight 0 ends where it begins, so no spot is below its end and not below others'.
    level = levels[next(n for n, end in enumerate(sums) if spot < end)]
    return level[int(uniform("try", seed) * len(level))]


def uniform(*parts: int | str | Sequence[int]) -> float:
    """A number in [0, 1), uniform over all `parts` there may be.

    They are what the draw is of, such as `("next_state", (seed, iteration, hop, question))`.
    """
    flat = [str(p) for each in parts for p in ([each] if isinstance(each, int | str) else each)]
    digest = hashlib.sha256("/".join(flat).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


# ---------------------------------------------------------------- credit from later hops
# LeReT judges a query by the pool right after its hop alone (`credit` "hop"), so the first hop
# learns nothing of what it made possible. With `credit` "best_later" the value V of a try is
#
#     V = max(its own reward, max over the tries t of the states that went on from it: V(t) - c)
#
# with c the cost of a hop. Tries of a state that end in the same pool lead to the same next state,
# so they share what came of it. A try that did not go on has its own reward.


def credited(
    tries: Sequence[Try], grown_from: Mapping[StateKey, TryKey], config: QueryRewardConfig
) -> list[Try]:
    """The tries of all hops with the rewards that they are learned from, in their order.

    They come with the rewards of their own hops (`QueryRewardConfig.of_hop`); `grown_from` has, for
    each state behind the first hop, the try that it grew from.
    """
    if config.credit != BEST_LATER:
        return list(tries)
    by_key = {each.key: each for each in tries}
    states_after: dict[tuple[StateKey, tuple[str, ...]], list[StateKey]] = {}
    for state, key in grown_from.items():
        states_after.setdefault((by_key[key].at, by_key[key].pool), []).append(state)
    best: dict[StateKey, float] = {}  # the highest value of a state's tries
    values: dict[TryKey, float] = {}
    for each in sorted(tries, key=lambda each: -each.hop):
        if each.reward is None:
            continue
        value = each.reward
        if each.searched:
            later = [best[s] for s in states_after.get((each.at, each.pool), ()) if s in best]
            value = max([value, *(one - config.hop_cost for one in later)])
        values[each.key] = value
        best[each.at] = max(best.get(each.at, value), value)
    return [dataclasses.replace(each, reward=values.get(each.key)) for each in tries]


# ---------------------------------------------------------------- pairs

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


@dataclasses.dataclass(frozen=True)
class PairsConfig:
    """Section `pairs`: which queries are preferred to which."""

    # adjacent (each level of reward above the next lower one, as LeReT), all (above each lower one)
    # or best (the best level above each lower one)
    pairing: Annotated[str, one_of(PAIRINGS)] = ADJACENT
    # A query that has one of these in it repeats the prompt's passages, and is dropped
    degenerate: tuple[str, ...] = ("Passages found so far", "[1]")

    def __post_init__(self) -> None:
        if not all(normalised_query(text) for text in self.degenerate):
            raise InputError(
                "config.pairs.degenerate has an empty text, which is in every query; leave it out."
            )


class Pair(NamedTuple):
    """Two queries of a state, by their places in `StatePairs.queries`; the winner is better."""

    winner: int
    loser: int


@dataclasses.dataclass(frozen=True)
class StatePairs:
    """What is learned at one state."""

    at: StateKey | None  # the state; None if it has no tries
    queries: tuple[Try, ...]  # the best try of each distinct query, lowest reward first
    # for each query, the prompts that made the model write it, each once
    variants: tuple[tuple[int, ...], ...]
    pairs: tuple[Pair, ...]  # of these queries
    target: int | None  # place of the query that SFT learns; None: this state is not for SFT
    reason: str  # one of `REASONS`
    levels: int  # different rewards among all scored tries
    degenerate: int  # scored tries that were dropped


def pairs_of(tries: Sequence[Try], config: PairsConfig) -> StatePairs:
    """The pairs and the target of one state; tries without a reward do not count."""
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
    reason, target = UNSCORED, None
    pairs: tuple[Pair, ...] = ()
    if len(levels) == 1:
        reason = _kind_of_tie(scored)
    elif levels:
        pairs = tuple(_paired(queries, config.pairing))
        reason = PAIRED if pairs else UNPAIRED
        if ascending:
            target = [*best].index(normalised_query(ascending[-1].query))
    return StatePairs(
        at=tries[0].at if tries else None,
        queries=queries,
        variants=tuple(tuple(variants[text]) for text in best),
        pairs=pairs,
        target=target,
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


def _paired(queries: Sequence[Try], pairing: str) -> Iterator[Pair]:
    """Pairs of queries, whose rewards ascend: of each level and each above it that is compared."""
    places: dict[float, list[int]] = {}
    for place, each in enumerate(queries):
        places.setdefault(level_of(each), []).append(place)
    levels = [*places.values()]
    for number, lower in enumerate(levels):
        above = levels[number + 1 :]
        for higher in {ADJACENT: above[:1], ALL: above, BEST: above[-1:]}[pairing]:
            yield from (Pair(winner, loser) for loser in lower for winner in higher)


# ---------------------------------------------------------------- their report
# LeReT drops every state whose tries are worth the same, and does not say how many those are.


@dataclasses.dataclass(frozen=True)
class PairsReport:
    """Counts over states."""

    states: Mapping[str, int]  # number of states by their reason, each of `REASONS`
    pairs: int  # number of pairs
    targets: int  # number of states that SFT learns from
    queries: float  # mean number of distinct queries of a state that has a scored try
    levels: float  # mean number of different rewards of such a state
    degenerate: int  # tries that were dropped, since they repeat the prompt
    # pairs by the prompt that made the model write the winner. A query that several prompts led to
    # counts for each
    wins: Mapping[int, int]
    best: Mapping[int, int]  # targets by prompt, likewise

    @property
    def total(self) -> int:
        """Number of all states."""
        return sum(self.states.values())

    def share(self, *reasons: str) -> float:
        """Share of the states that have one of these reasons; 0 if there are no states."""
        return sum(self.states[each] for each in reasons) / self.total if self.total else 0.0

    def to_json(self) -> dict[str, Any]:
        """Everything, and the shares of the states, as JSON values."""
        by_name = {
            name: {str(prompt): count for prompt, count in getattr(self, name).items()}
            for name in ("wins", "best")
        }
        shares = {each: self.share(each) for each in REASONS}
        found = dataclasses.asdict(self) | by_name
        return found | {"shares": shares, "all_ties": self.share(*TIES)}


def report_of(states: Sequence[StatePairs]) -> PairsReport:
    """Counts what the states of an iteration came to."""
    reasons = collections.Counter(each.reason for each in states)
    with_tries = [each for each in states if each.reason != UNSCORED]
    wins: collections.Counter[int] = collections.Counter()
    best: collections.Counter[int] = collections.Counter()
    for each in states:
        for pair in each.pairs:
            wins.update(each.variants[pair.winner])
        if each.target is not None:
            best.update(each.variants[each.target])
    count = max(len(with_tries), 1)
    return PairsReport(
        states={reason: reasons[reason] for reason in REASONS},
        pairs=sum(len(each.pairs) for each in states),
        targets=sum(each.target is not None for each in states),
        queries=sum(len(each.queries) for each in with_tries) / count,
        levels=sum(each.levels for each in with_tries) / count,
        degenerate=sum(each.degenerate for each in states),
        wins=dict(sorted(wins.items())),
        best=dict(sorted(best.items())),
    )


def check_found(tries: Sequence[Try]) -> None:
    """Refuses tries none of which found anything: then no reward tells queries apart."""
    scored = [each for each in tries if each.scored]
    if scored and all(each.scores[RECALL] == 0 for each in scored):
        raise InputError(
            f"none of {len(scored)} tries with a score found a gold page, so every score is 0; see "
            "whether the corpus (config.search.index) and the gold pages of the questions belong "
            "together (config.search.gold_by), or let the model learn from demonstrations first."
        )


def check_pairs(report: PairsReport) -> None:
    """Refuses tries from which no preference can be learned."""
    if report.states[PAIRED]:
        return
    if report.share(UNSCORED) == 1 or not report.total:
        raise InputError(
            f"none of the {report.total} states has a try with a score, so there are no pairs; see "
            "in the log whether queries are empty, too long or failed."
        )
    solved, nothing = report.share(ALL_SOLVED), report.share(ALL_ZERO)
    if not any(report.states[each] for each in TIES):
        raise InputError(
            f"no state of {report.total} has pairs, though rewards differ in "
            f"{report.share(UNPAIRED):.0%}; see which queries "
            "config.pairs.degenerate drops."
        )
    raise InputError(
        f"no state of {report.total} has pairs: in {report.share(*TIES):.0%} all tries are worth "
        f"the same ({solved:.0%} found every gold page, {nothing:.0%} none, "
        f"{report.share(TIED):.0%} some); take more prompts, a higher config.sampling.temperature, "
        f"more samples of each prompt, or {'harder' if solved > nothing else 'easier'} questions."
    )
