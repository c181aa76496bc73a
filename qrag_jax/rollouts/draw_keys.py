"""Keys of draws: by the number of a question and of its draw, then by what an episode does."""

from __future__ import annotations

import hashlib
from functools import partial

import jax
import numpy as np


@partial(jax.jit, static_argnums=2)
def draw_keys(key: jax.Array, numbers: jax.Array | np.ndarray, draws: int) -> jax.Array:
    """Data of PRNG keys, `[question, draw, 2]`, uint32.

    Args:
        key: of all of them.
        numbers: `[question]`, uint32.
        draws: of each question.
    """
    of_questions = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
    of_draws = jax.vmap(lambda own: jax.vmap(jax.random.fold_in, (None, 0))(own, np.arange(draws)))
    return jax.random.key_data(of_draws(of_questions))


def key_within(key: np.ndarray, *numbers: int) -> np.ndarray:
    """The key of some of an episode's draws, uint32 `[2]`; of its first ones, if all are 0.

    Args:
        key: uint32 `[2]`, of the episode.
        numbers: of them, such as the attempt and the segment, each from 0.
    """
    if not any(numbers):
        return key
    digest = hashlib.sha256(key.astype("<u4").tobytes() + np.array(numbers, "<u4").tobytes())
    return np.frombuffer(digest.digest()[:8], "<u4").astype(np.uint32)
