"""Keys of draws that depend on the number of a question and of its draw alone."""

from __future__ import annotations

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
