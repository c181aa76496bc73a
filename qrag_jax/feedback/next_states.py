"""Which tries of a hop go on to the next one (LeReT, arXiv 2410.23214).

"weighted" is LeReT's rule: tries with an average precision of 1 are discarded; the others are in
buckets of equal reward; a bucket is drawn with the weight of its average precision, the best one
with 0.5 more, and a try is drawn uniformly inside it. So a bucket of 0 is drawn only where it is
the only one. Levels 0, 0.25 and 0.5 have the probabilities 0, 0.2 and 0.8.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Sequence

from qrag_jax.errors import check_known, check_least
from qrag_jax.feedback.pool_scores import AP
from qrag_jax.feedback.tries import Try, by_level, in_order

WEIGHTED, GREEDY, SEVERAL = CHOICES = ("weighted", "greedy", "several")
_BONUS = 0.5  # of the best bucket


@dataclasses.dataclass(frozen=True)
class NextStatesConfig:
    """Section `next_state`: the states of the next hop."""

    # weighted (one state, drawn by reward, as LeReT), greedy (the best) or several
    choice: str = WEIGHTED
    count: int = 2  # states of "several" at most: pools that differ, the best first
    # A pool with average precision 1 goes on, too, so that the model learns not to spoil it
    solved_go_on: bool = False

    def __post_init__(self) -> None:
        check_known("next_state", self, "choice", CHOICES)
        check_least("next_state", self, count=1)


def choose(tries: Sequence[Try], config: NextStatesConfig, seed: Sequence[int]) -> list[Try]:
    """The tries whose pools are the states of the next hop; none: the question ends.

    Only tries that searched and are scored go on. Equal rewards are in the order of state, prompt
    and draw, so that the order of `tries` does not matter.

    Args:
        tries: of one question at one hop.
        seed: what the draw is of, such as (seed, iteration, hop, question).

    Raises:
        ValueError: the tries are of several questions or hops.
    """
    if len({(each.question, each.hop) for each in tries}) > 1:
        raise ValueError("the tries are of several questions or hops")
    # An average precision is exactly 1 only if all gold pages come first.
    going = [
        each
        for each in in_order(tries)
        if each.searched and (config.solved_go_on or each.scores[AP] != 1)
    ]
    if not going:
        return []
    best_first = [each for level in reversed(by_level(going)) for each in level]
    if config.choice == GREEDY:
        return best_first[:1]
    if config.choice == SEVERAL:
        distinct: dict[tuple[str, ...], Try] = {}
        for each in best_first:
            distinct.setdefault(each.pool, each)
        return [*distinct.values()][: config.count]
    return [_drawn(by_level(going), seed)]


def _drawn(levels: Sequence[Sequence[Try]], seed: Sequence[int]) -> Try:
    """One try by LeReT's rule; the levels ascend."""
    weights = [math.fsum(each.scores[AP] for each in level) / len(level) for level in levels]
    weights[-1] += _BONUS
    sums = [*itertools.accumulate(weights)]
    spot = uniform("level", seed) * sums[-1]
    # A level of weight 0 ends where it begins, so no spot is below its end and not below others'.
    level = levels[next(n for n, end in enumerate(sums) if spot < end)]
    return level[int(uniform("try", seed) * len(level))]


def uniform(*parts: int | str | Sequence[int]) -> float:
    """A number in [0, 1), uniform over all `parts` there may be.

    Args:
        parts: what the draw is of, such as `("next_state", (seed, iteration, hop, question))`.
    """
    flat = [str(p) for each in parts for p in ([each] if isinstance(each, int | str) else each)]
    digest = hashlib.sha256("/".join(flat).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53
