"""What was done in an episode of searches, as JSON: it is kept while the episode is in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from qrag_jax.retrieval.protocol import NONE
from qrag_jax.rollouts.hop_batch import Rewarded
from qrag_jax.rollouts.pool_search import Drawn as Search


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
