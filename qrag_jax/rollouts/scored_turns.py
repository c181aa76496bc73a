"""What the trainer's weights say of turns that another sampler drew."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.models.compute.lora import Adapted, attach
from qrag_jax.models.heads.language_model import LanguageModel
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.policies.tokens import Vocabulary, token_scores

_WIDTHS = 64  # rows are as long as a multiple of this: attention on GPUs wants even lengths


class _Rows(NamedTuple):
    """tokens `[B, L]`, lengths `[B]`; place `[B, S]` before each sampled token, target `[B, S]`."""

    tokens: Any
    lengths: Any
    place: Any
    target: Any


def turn_log_probs(
    model: LanguageModel,
    params: Params | Adapted,
    turns: Sequence[tuple[np.ndarray, np.ndarray]],
    temperatures: Sequence[float],
) -> list[np.ndarray]:
    """Log-probabilities of sampled tokens, in nats; float32 `[S]` for each temperature.

    Args:
        params: of the model, stacked; or a base and adapters.
        turns: the ids before a turn, one at least, and those that were sampled.
        temperatures: that logits are divided by; 0 is taken for 1, as samplers do.

    Returns:
        The tokens of all turns, one turn behind the other.
    """
    longest = max(len(before) + len(sampled) for before, sampled in turns)
    width = -(-longest // _WIDTHS) * _WIDTHS
    most = max(len(sampled) for _, sampled in turns)
    tokens = np.zeros((len(turns), width), np.int32)
    lengths = np.zeros(len(turns), np.int32)
    place, target = (np.zeros((len(turns), most), np.int32) for _ in range(2))
    for row, (before, sampled) in enumerate(turns):
        lengths[row] = len(before) + len(sampled)
        tokens[row, : lengths[row]] = np.concatenate([before, sampled])
        place[row, : len(sampled)] = np.arange(len(before) - 1, lengths[row] - 1)
        target[row, : len(sampled)] = sampled
    is_sampled = np.arange(most)[None] < np.array([len(sampled) for _, sampled in turns])[:, None]
    scored = jax.jit(partial(_scored, model, tuple(each or 1.0 for each in temperatures)))
    found = jax.device_get(scored(params, _Rows(tokens, lengths, place, target)))
    return [np.asarray(each)[is_sampled] for each in found]


def _scored(
    model: LanguageModel,
    temperatures: Sequence[float],
    params: Params | Adapted,
    rows: _Rows,
) -> list[jax.Array]:
    """`[B, S]` for each temperature."""
    whole = attach(params, model.lora_scale) if isinstance(params, Adapted) else params
    hidden = model.trunk.hidden_states(whole, rows.tokens, rows.lengths)
    before = jnp.take_along_axis(hidden, rows.place[..., None], axis=1)
    before = before.reshape(-1, before.shape[-1])
    found = []
    for temperature in temperatures:
        how = Vocabulary(temperature, products=model.trunk.precision.products)
        scores = token_scores(how, before, model.head(whole), rows.target.reshape(-1))
        found.append(scores.log_probs.reshape(rows.target.shape))
    return found
