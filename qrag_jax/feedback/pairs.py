"""What is learned from the tries of a query writer (LeReT, arXiv 2410.23214).

`choose` says which try of a hop goes on to the next one, and `pairs_of` makes pairs of queries of
one state, the better one first. LeReT's rule of pairs is:

1. A state whose tries all have one reward is left out.
2. Queries that repeat the opening of the prompt's passages are dropped.
3. The others are sorted, lowest reward first, and by prompt and draw where rewards are equal. Of
   equal queries the first of the highest reward counts.
4. Queries of equal reward are a level; each query of a level is preferred to each of the level
   below it.
5. The last query of the order is the target of SFT.

Two things differ. Queries are equal if they are so without regard to case and white space (LeReT
compares exact texts); the best of them counts, as a search may mind case. And a try without a
reward is left out before all else.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from qrag_jax.data.records import TEXT, get, read_records, refused
from qrag_jax.environments.queries import SEARCHED
from qrag_jax.errors import InputError, one_of
from qrag_jax.metrics import ranking
from qrag_jax.runtime.whole_files import write_whole


class StateKey(NamedTuple):
    question: int  # its number
    hop: int  # from 1


@dataclasses.dataclass(frozen=True, slots=True)
class Try:
    question: int  # its number
    hop: int  # from 1
    variant: int  # number of the prompt that asked; 0 is the bare one
    draw: int  # its number among those of this prompt
    query: str  # on one line; "" if there is none
    sampled: tuple[int, ...]  # the ids, with the one that ended the turn
    outcome: str  # one of `state.OUTCOMES`, or the cause of a failure
    # ids and scores of the passages that the query found, best first
    found: tuple[tuple[str, float], ...] = ()
    pool: tuple[str, ...] = ()  # ids of the passages after the hop, in the pool's order
    # of this pool; none if the try is not scored
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    reward: float | None = None  # None: it has none, since it is empty, too long or failed

    @property
    def scored(self) -> bool:
        return self.reward is not None

    @property
    def at(self) -> StateKey:
        return StateKey(self.question, self.hop)


# Rewards that are equal in this many decimals are one level: equal ones may differ in their last
# bits, by the order of sums. In pools of a dozen passages, those that do differ are 1e-5 apart.
_DECIMALS = 9


def in_order(tries: Iterable[Try]) -> list[Try]:
    """The scored tries, in the order of state, prompt and draw."""
    scored = (t for t in tries if t.scored)
    return sorted(scored, key=lambda t: (t.at, t.variant, t.draw))


def level_of(tried: Try) -> float:
    assert tried.reward is not None
    return round(tried.reward, _DECIMALS)


def by_level(tries: Iterable[Try]) -> list[list[Try]]:
    """Scored tries of equal reward together, the lowest first; they keep their order inside."""
    together = itertools.groupby(sorted(tries, key=level_of), level_of)
    return [[*level] for _, level in together]


# ---------------------------------------------------------------- what a pool is worth
# With G the gold pages, k the passages that a query finds, n the hop and P(i) the share of gold
# pages among the first i passages of the pool, all in [0, 1]:
#
# | name | what |
# |---|---|
# | `ap` | sum of P(i) over the places i of gold pages, / |G|: LeReT's average precision |
# | `ap_min` | the same sum / min(|G|, n k), so that 1 can be reached at each hop |
# | `recall` | |pool ∩ G| / |G|, which LeReT's files call `em` |
# | `recall@6` | the same of the first 6 passages, whatever the hop |
# | `all_gold` | 1 if all of G are in the pool, else 0 |
#
# A page that is in the pool twice counts at its first place; its second passage takes a place all
# the same, as it does in the prompt. LeReT (arXiv 2410.23214) counts it twice, so that its AP may
# be above 1.

AP, AP_MIN, RECALL, ALL_GOLD = POOL_SCORES = ("ap", "ap_min", "recall", "all_gold")
MEASURES = (AP, AP_MIN, RECALL)
_CUT = 6  # passages of the recall that is alike at all hops


@dataclasses.dataclass(frozen=True)
class QueryRewardConfig:
    # Of the pool: ap (over all gold pages), ap_min (over those that it can hold) or recall
    measure: Annotated[str, one_of(MEASURES)] = AP


def pool_scores(pages: Sequence[str], gold: Sequence[str], hop: int, k: int) -> dict[str, float]:
    """The scores of one pool after hop n (from 1), by the keys of its pages, in its order.

    A query finds k passages. A try that stops counts as a hop, too, so that all tries of a state
    are measured alike.
    """
    grades = dict.fromkeys(gold, 1)
    ap, recall = ranking.average_precision(pages, grades), ranking.recall(pages, grades)
    return {
        AP: ap,
        AP_MIN: ap * max(1.0, len(grades) / (hop * k)),
        RECALL: recall,
        ALL_GOLD: float(recall == 1),
        f"recall@{_CUT}": ranking.recall(pages, grades, _CUT),
    }


# ---------------------------------------------------------------- which try goes on
# LeReT's rule: tries with an average precision of 1 are discarded; the others are in buckets of
# equal reward; a bucket is drawn with the weight of its average precision, the best one with 0.5
# more, and a try is drawn uniformly inside it. So a bucket of 0 is drawn only where it is the only
# one. Levels 0, 0.25 and 0.5 have the probabilities 0, 0.2 and 0.8.

_BONUS = 0.5  # of the best bucket


def choose(tries: Sequence[Try], seed: Sequence[int]) -> Try | None:
    """The try whose pool is the state of the next hop; None: the question ends.

    Only tries that searched and are scored go on; the order of `tries`, which are of one question
    at one hop, does not matter. `seed` is what the draw is of: (seed, iteration, hop, question).
    """
    # An average precision is exactly 1 only if all gold pages come first.
    going = [t for t in in_order(tries) if t.outcome == SEARCHED and t.scores[AP] != 1]
    if not going:
        return None
    levels = by_level(going)
    weights = [math.fsum(t.scores[AP] for t in level) / len(level) for level in levels]
    weights[-1] += _BONUS
    sums = [*itertools.accumulate(weights)]
    spot = uniform("level", seed) * sums[-1]
    # A level of weight 0 ends where it begins, so no spot is below its end and not below others'.
    level = levels[next(n for n, end in enumerate(sums) if spot < end)]
    return level[int(uniform("try", seed) * len(level))]


def uniform(what: str, seed: Sequence[int]) -> float:
    """A number in [0, 1), uniform over all that is drawn and all seeds."""
    digest = hashlib.sha256("/".join([what, *map(str, seed)]).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


# ---------------------------------------------------------------- pairs

# What became of a state: all rewards are equal and all tries found all gold pages, or none, or
# equally good pools; it has pairs; rewards differ, but no pair is left; no try has a reward.
REASONS = ("paired", "all_solved", "all_zero", "tied", "unpaired", "unscored")
PAIRED, ALL_SOLVED, ALL_ZERO, TIED, UNPAIRED, UNSCORED = REASONS


@dataclasses.dataclass(frozen=True)
class PairsConfig:
    """Section `pairs`: which queries are preferred to which."""

    # File of pairs (JSON lines with TRL's columns prompt, chosen and rejected, as other runs keep
    # them in tries/iteration-1/pairs.jsonl) of which the first iteration learns; "": of tries
    path: str = ""
    # A query that has one of these in it repeats the prompt's passages, and is dropped
    degenerate: tuple[str, ...] = ("Passages found so far", "[1]")

    def __post_init__(self) -> None:
        if not all(normalised_query(text) for text in self.degenerate):
            raise InputError("config.pairs.degenerate has an empty text; leave it out.")


COLUMNS = ("prompt", "chosen", "rejected")  # TRL's


def read_pairs(path: str) -> list[tuple[str, str, str]]:
    """The pairs of a file of records, as `COLUMNS`; a prompt is text of the chat template."""
    pairs = list[tuple[str, str, str]]()
    for where, row in read_records(Path(path).expanduser()) if path else ():
        with refused(where):
            prompt, chosen, rejected = (get(row, TEXT, name) for name in COLUMNS)
        pairs.append((prompt, chosen, rejected))
    return pairs


def write_pairs(path: Path, pairs: Iterable[tuple[str, str, str]]) -> None:
    # ASCII alone, so that half surrogate pairs, which models do write, survive.
    lines = (json.dumps(dict(zip(COLUMNS, pair, strict=True))) for pair in pairs)
    write_whole(path, "".join(f"{line}\n" for line in lines))


@dataclasses.dataclass(frozen=True)
class StatePairs:
    at: StateKey
    queries: tuple[Try, ...]  # the best try of each distinct query, lowest reward first
    pairs: tuple[tuple[int, int], ...]  # places of the winner and the loser among the queries
    target: int | None  # place of the query that SFT learns; None: this state is not for SFT
    reason: str  # one of `REASONS`


def pairs_of(tries: Sequence[Try], config: PairsConfig) -> StatePairs:
    """The pairs and the target of one state; tries without a reward do not count."""
    scored = in_order(tries)
    levels = by_level(scored)
    dropped = [*map(normalised_query, config.degenerate)]
    ascending = [
        t
        for t in itertools.chain(*levels)
        if not any(text in normalised_query(t.query) for text in dropped)
    ]
    best: dict[str, Try] = {}
    for t in ascending:
        text = normalised_query(t.query)
        if text not in best or level_of(t) > level_of(best[text]):
            best.pop(text, None)  # so that queries stay in ascending order
            best[text] = t
    queries = tuple(best.values())
    reason, target = UNSCORED, None
    pairs: tuple[tuple[int, int], ...] = ()
    if len(levels) == 1:
        none = all(t.scores[RECALL] == 0 for t in scored)
        all_gold = all(t.scores[ALL_GOLD] == 1 for t in scored)
        reason = ALL_SOLVED if all_gold else ALL_ZERO if none else TIED
    elif levels:
        pairs = tuple(_adjacent(queries))
        reason = PAIRED if pairs else UNPAIRED
        if ascending:
            target = [*best].index(normalised_query(ascending[-1].query))
    return StatePairs(tries[0].at, queries, pairs, target, reason)


def normalised_query(query: str) -> str:
    """The query without case, with single blanks for all white space."""
    return " ".join(query.casefold().split())


def _adjacent(queries: Sequence[Try]) -> Iterator[tuple[int, int]]:
    """Pairs of queries, whose rewards ascend: of each level and the next one."""
    by = itertools.groupby(range(len(queries)), lambda place: level_of(queries[place]))
    for lower, higher in itertools.pairwise([[*places] for _, places in by]):
        yield from ((winner, loser) for loser in lower for winner in higher)


# ---------------------------------------------------------------- their report
# LeReT drops every state whose tries are worth the same, and does not say how many those are.


def report_of(states: Sequence[StatePairs]) -> str:
    """What the states of an iteration came to; queries are a mean over those with a scored try."""
    scored = max(sum(s.reason != UNSCORED for s in states), 1)
    return (
        f"{sum(len(s.pairs) for s in states)} pairs and "
        f"{sum(s.target is not None for s in states)} best queries of {len(states)} states "
        f"({_reasons(states)}), {sum(len(s.queries) for s in states) / scored:.2f} "
        "different queries a state"
    )


def _reasons(states: Sequence[StatePairs]) -> str:
    counts = collections.Counter(s.reason for s in states)
    return ", ".join(f"{name} {counts[name]}" for name in REASONS if counts[name])


def check_found(tries: Sequence[Try]) -> None:
    """Refuses tries none of which found anything: then no reward tells queries apart."""
    scored = [t for t in tries if t.scored]
    if scored and all(t.scores[RECALL] == 0 for t in scored):
        raise InputError(
            f"none of {len(scored)} tries found a gold page; see whether config.search.index and "
            "config.search.gold_by fit the questions, or let the model learn from demonstrations."
        )


def check_pairs(states: Sequence[StatePairs]) -> None:
    """Refuses tries from which no preference can be learned."""
    if not any(s.reason == PAIRED for s in states):
        raise InputError(
            f"no state of {len(states)} has pairs ({_reasons(states)}); raise "
            "config.sampling.temperature, take more samples, or see config.pairs.degenerate."
        )
