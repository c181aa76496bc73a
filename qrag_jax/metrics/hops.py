"""How well an episode of several searches finds the gold passages, as a whole and hop by hop.

`found` is `[hop][place]`: the names of the passages of each search, in the order in which they were
read. `relevant` is the set of gold passages. All scores are in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

Found = Sequence[Sequence[str]]


def recall(relevant: Collection[str], found: Found) -> float:
    """Share of the gold passages that any hop found.

    Raises:
        ValueError: there is no gold passage.
    """
    gold = _gold(relevant)
    return len(gold.intersection(_ranking(found))) / len(gold)


def ndcg(relevant: Collection[str], found: Found) -> float:
    """nDCG of the episode's passages as one ranking; one that comes again does not count again.

    The gain is 1 for a gold passage, and the discount 1 / log2(place + 1).

    Raises:
        ValueError: there is no gold passage.
    """
    return _ndcg(_gold(relevant), _ranking(found))


def hop_recall(relevant: Collection[str], found: Found) -> tuple[float, ...]:
    """`[hop]`: share of the gold passages that this hop was the first to find.

    The sum over the hops is `recall`, so that finding a passage again is worth nothing.

    Raises:
        ValueError: there is no gold passage.
    """
    gold = _gold(relevant)
    return tuple(len(gold.intersection(names)) / len(gold) for names in _new(found))


def hop_ndcg(relevant: Collection[str], found: Found) -> tuple[float, ...]:
    """`[hop]`: nDCG of the hop's passages, where the gold passages of earlier hops do not count.

    A passage that comes again within the hop takes no place, as in `ndcg`. A hop before
    which all gold passages were found has 0.

    Raises:
        ValueError: there is no gold passage.
    """
    left, scores = _gold(relevant), []
    for names in found:
        scores.append(_ndcg(left, _ranking([names])) if left else 0.0)
        left = left.difference(names)
    return tuple(scores)


def novelty(found: Found) -> tuple[float, ...]:
    """`[hop]`: share of the hop's passages that no earlier hop found; 0 for a hop without any."""
    return tuple(
        len(new) / len(set(names)) if names else 0.0 for new, names in zip(_new(found), found)
    )


def _gold(relevant: Collection[str]) -> frozenset[str]:
    if not relevant:
        raise ValueError("there is no gold passage: retrieval is scored against at least one")
    return frozenset(relevant)


def _ranking(found: Found) -> list[str]:
    return list(dict.fromkeys(name for names in found for name in names))


def _new(found: Found) -> list[set[str]]:
    """The passages that each hop was the first to find."""
    seen: set[str] = set()
    new = []
    for names in found:
        new.append(set(names) - seen)
        seen.update(names)
    return new


def _ndcg(gold: frozenset[str], ranking: Sequence[str]) -> float:
    best = math.fsum(_discount(place) for place in range(len(gold)))
    gain = math.fsum(_discount(place) for place, name in enumerate(ranking) if name in gold)
    return gain / best


def _discount(place: int) -> float:
    return 1.0 / math.log2(place + 2)
