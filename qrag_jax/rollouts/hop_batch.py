"""Played episodes of agents as arrays, for the update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from qrag_jax.policies.plackett_luce import NOTHING, PlackettLuceConfig
from qrag_jax.retrieval.protocol import NONE
from qrag_jax.rollouts.pool_search import Drawn
from qrag_jax.rollouts.pool_search import Drawn as Search


class HopShape(NamedTuple):
    """Static sizes of a batch.

    Attributes:
        hops: T, most searches of an episode.
        tokens: L, longest state.
        width: D, of vectors.
        episode_rewards: E, number of rewards of a whole episode.
        hop_rewards: H, of rewards of a search.
    """

    hops: int
    tokens: int
    width: int
    episode_rewards: int
    hop_rewards: int


class HopBatch(NamedTuple):
    """N episodes of at most T searches; those of one group are neighbours.

    Attributes:
        tokens: `[N, T, L]` int32, the states.
        lengths: `[N, T]` int32, 0 where there was no search.
        pool: `[N, T, K, D]` float32, vectors of the pools' passages.
        present: `[N, T, K]` bool, whether there is a passage.
        actions: `[N, T, k]` int32, places in the pool in the order drawn.
        log_probs: `[N, T]` float32, by the weights that acted.
        scored: `[N]` bool, whether the episode has rewards; others are not learned from.
        episode_rewards: `[N, E]` float32, without weights.
        hop_rewards: `[N, T, H]` float32, without weights.
    """

    tokens: jax.Array
    lengths: jax.Array
    pool: jax.Array
    present: jax.Array
    actions: jax.Array
    log_probs: jax.Array
    scored: jax.Array
    episode_rewards: jax.Array
    hop_rewards: jax.Array


class Rewarded(NamedTuple):
    """What is learned from one episode.

    Attributes:
        searches: what the policy did; no more than `HopShape.hops`.
        episode: `[E]` rewards of the episode; None: it has none and is masked.
        hops: `[T][H]` rewards of its searches.
    """

    searches: Sequence[Drawn]
    episode: Sequence[float] | None
    hops: Sequence[Sequence[float]] = ()


def hop_batch(
    episodes: Sequence[Rewarded], shape: HopShape, config: PlackettLuceConfig
) -> HopBatch:
    """The arrays of these episodes, on the host."""
    arrays = _empty(len(episodes), shape, config)
    for row, episode in enumerate(episodes):
        for hop, drawn in enumerate(episode.searches):
            at = row, hop
            arrays["tokens"][row, hop, : len(drawn.row)] = drawn.row
            arrays["lengths"][at] = len(drawn.row)
            arrays["pool"][at], arrays["present"][at] = drawn.vectors, drawn.pool != NONE
            arrays["actions"][at], arrays["log_probs"][at] = drawn.actions, drawn.log_prob
        if episode.episode is not None and len(episode.searches):
            arrays["scored"][row] = True
            arrays["episode_rewards"][row] = episode.episode
            for hop, rewards in enumerate(episode.hops):
                arrays["hop_rewards"][row, hop] = rewards
    return HopBatch(**arrays)


def batch_shapes(episodes: int, shape: HopShape, config: PlackettLuceConfig) -> HopBatch:
    """Shapes and dtypes of a batch."""
    arrays = _empty(episodes, shape, config)
    shapes: Any = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in arrays.items()}
    return HopBatch(**shapes)


def _empty(episodes: int, shape: HopShape, config: PlackettLuceConfig) -> dict[str, Any]:
    """A batch of episodes in which nothing happened."""
    searches = episodes, shape.hops
    return {
        "tokens": np.zeros((*searches, shape.tokens), np.int32),
        "lengths": np.zeros(searches, np.int32),
        "pool": np.zeros((*searches, config.pool, shape.width), np.float32),
        "present": np.zeros((*searches, config.pool), bool),
        "actions": np.full((*searches, config.passages), NOTHING, np.int32),
        "log_probs": np.zeros(searches, np.float32),
        "scored": np.zeros(episodes, bool),
        "episode_rewards": np.zeros((episodes, shape.episode_rewards), np.float32),
        "hop_rewards": np.zeros((*searches, shape.hop_rewards), np.float32),
    }


def saved(episode: Rewarded) -> dict[str, Any]:
    """What was done in an episode and its rewards, as JSON."""
    return {
        "searches": [
            {
                "row": each.row.tolist(),
                "pool": each.pool.tolist(),
                "actions": each.actions.tolist(),
                "log_prob": each.log_prob,
            }
            for each in episode.searches
        ],
        "episode": None if episode.episode is None else [*map(float, episode.episode)],
        "hops": [[*map(float, rewards)] for rewards in episode.hops],
    }


def restored(kept: Mapping[str, Any], vectors: Callable[[np.ndarray], np.ndarray]) -> Rewarded:
    """The inverse of `saved`; `vectors` gives float32 `[n, D]` of passages by their numbers."""
    searches = []
    for each in kept["searches"]:
        pool = np.array(each["pool"], np.int64)
        present = pool != NONE
        known = vectors(pool[present])
        found = np.zeros((len(pool), known.shape[1]), np.float32)
        found[present] = known
        row, actions = np.array(each["row"], np.int32), np.array(each["actions"], np.int32)
        searches.append(Search(row, pool, found, actions, each["log_prob"], 0.0, (), False))
    return Rewarded(searches, kept["episode"], kept["hops"])
