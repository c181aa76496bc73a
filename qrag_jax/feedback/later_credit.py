"""Credit from later hops: a query is worth what the best try that went on from it came to.

LeReT judges a query by the pool right after its hop alone (`credit` "hop"), so the first hop learns
nothing of what it made possible. With `credit` "best_later" the value V of a try is

    V = max(its own reward, max over the tries t of the states that went on from it: V(t) - c)

with c the cost of a hop. Tries of a state that end in the same pool lead to the same next state, so
they share what came of it. A try that did not go on has its own reward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from qrag_jax.feedback.pool_scores import BEST_LATER, QueryRewardConfig
from qrag_jax.feedback.tries import StateKey, Try, TryKey


def credited(
    tries: Sequence[Try], grown_from: Mapping[StateKey, TryKey], config: QueryRewardConfig
) -> list[Try]:
    """The tries with the rewards that they are learned from, in their order.

    Args:
        tries: of all hops, each with the reward of its own hop (`QueryRewardConfig.of_hop`).
        grown_from: for each state behind the first hop, the try that it grew from.

    Raises:
        ValueError: a state grew from a try that is not there, did not search, or is not of the hop
            before.
    """
    if config.credit != BEST_LATER:
        return list(tries)
    states_after = _states_after({each.key: each for each in tries}, grown_from)
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


def _states_after(
    tries: Mapping[TryKey, Try], grown_from: Mapping[StateKey, TryKey]
) -> dict[tuple[StateKey, tuple[str, ...]], list[StateKey]]:
    """The next states by the state and the pool that they grew from."""
    found: dict[tuple[StateKey, tuple[str, ...]], list[StateKey]] = {}
    for state, key in grown_from.items():
        parent = tries.get(key)
        if parent is None or not parent.searched:
            raise ValueError(f"{state} grew from {key}, which did not search")
        if (key.question, key.hop) != (state.question, state.hop - 1):
            raise ValueError(f"{state} grew from {key}, which is not of the hop before")
        found.setdefault((parent.at, parent.pool), []).append(state)
    return found
