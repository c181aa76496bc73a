"""What the tries of an iteration came to: how many states have pairs, and why others have none.

LeReT drops every state whose tries are worth the same, and does not say how many those are.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.feedback.pool_scores import RECALL
from qrag_jax.feedback.preference_pairs import (
    ALL_SOLVED,
    ALL_ZERO,
    PAIRED,
    REASONS,
    TIED,
    TIES,
    UNPAIRED,
    UNSCORED,
    StatePairs,
)
from qrag_jax.feedback.tries import Try


@dataclasses.dataclass(frozen=True)
class PairsReport:
    """Counts over states.

    Attributes:
        states: number of states by their reason, each of `REASONS`.
        pairs: number of pairs.
        targets: number of states that SFT learns from.
        queries: mean number of distinct queries of a state that has a scored try.
        levels: mean number of different rewards of such a state.
        degenerate: tries that were dropped, since they repeat the prompt.
        wins: pairs by the prompt that made the model write the winner. A query that several
            prompts led to counts for each.
        best: targets by prompt, likewise.
    """

    states: Mapping[str, int]
    pairs: int
    targets: int
    queries: float
    levels: float
    degenerate: int
    wins: Mapping[int, int]
    best: Mapping[int, int]

    @property
    def total(self) -> int:
        """Number of all states."""
        return sum(self.states.values())

    def share(self, *reasons: str) -> float:
        """Share of the states that have one of these reasons; 0 if there are no states."""
        return sum(self.states[each] for each in reasons) / self.total if self.total else 0.0

    def to_json(self) -> dict[str, Any]:
        """Everything, and the shares of the states, as JSON values."""
        told = dataclasses.asdict(self)
        shares = {each: self.share(each) for each in REASONS}
        by_name = {name: {str(n): count for n, count in told[name].items()} for name in _BY_PROMPT}
        return told | by_name | {"shares": shares, "all_ties": self.share(*TIES)}


_BY_PROMPT = ("wins", "best")


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
            f"{report.share(UNPAIRED):.0%}; lower config.pairs.least_gap, or see which queries "
            "config.pairs.degenerate drops."
        )
    raise InputError(
        f"no state of {report.total} has pairs: in {report.share(*TIES):.0%} all tries are worth "
        f"the same ({solved:.0%} found every gold page, {nothing:.0%} none, "
        f"{report.share(TIED):.0%} some); take more prompts, a higher config.sampling.temperature, "
        f"more samples of each prompt, or {'harder' if solved > nothing else 'easier'} questions."
    )
