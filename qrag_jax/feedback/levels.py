"""Tries of a query writer in levels of equal reward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qrag_jax.feedback.tries import Try

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
