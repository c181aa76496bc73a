"""The training state of two towers, and one optimizer step on it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from qrag_jax.learners.optimizers import keep_unless
from qrag_jax.models.heads.embedding import Params


class TrainState(NamedTuple):
    """The state of training; every leaf is an array.

    Attributes:
        params, target_params: two towers stacked on axis 0, or their adapters alone.
        opt_state: state of the optimizer.
        step: optimizer steps done, skipped ones too, int32.
        env_steps: environment steps (transitions) done, int32.
        key: PRNG key of the run, constant.
    """

    params: Params
    target_params: Params
    opt_state: optax.OptState
    step: jax.Array
    env_steps: jax.Array
    key: jax.Array


def init_state(params: Params, optimizer: optax.GradientTransformation, key: jax.Array):
    """The first state of training; the target towers start as a copy of the online ones."""
    return TrainState(
        params=params,
        target_params=jax.tree.map(jnp.copy, params),
        opt_state=optimizer.init(params),
        step=jnp.zeros((), jnp.int32),
        env_steps=jnp.zeros((), jnp.int32),
        key=key,
    )


def episode_keys(state: TrainState, batch: jax.Array, episodes: int) -> jax.Array:
    """The PRNG keys `[episodes]` of a batch; its number is that of the step that learns from it."""
    return jax.random.split(jax.random.fold_in(state.key, batch), episodes)


def dropout_key(state: TrainState) -> jax.Array:
    """The key of this step's dropout, the same on every device; no other draw comes from it."""
    stream = jax.random.fold_in(state.key, 2**32 - 1)  # not the number of any step
    return jax.random.fold_in(stream, state.step)


class Total(NamedTuple):
    """A summed loss and its number of transitions: float32 scalars."""

    loss: jax.Array
    transitions: jax.Array


def optimizer_step(
    params: Params,
    opt_state: optax.OptState,
    gradient: Params,
    optimizer: optax.GradientTransformation,
    finite: jax.Array,
) -> tuple[Params, optax.OptState]:
    """New parameters and moments; the old ones, bit for bit, if `finite` (a scalar) is False.

    No parameter becomes non-finite: an element whose own update overflows keeps its value.

    Args:
        optimizer: keeps its moments if it gets `finite=False` (`make_optimizer`).
    """
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
        gradient, opt_state, params, finite=finite
    )
    moved = optax.apply_updates(params, updates)
    kept = jax.tree.map(lambda n, o: keep_unless(finite & jnp.isfinite(n), n, o), moved, params)
    return kept, opt_state


def apply_update(
    state: TrainState,
    gradient: Params,
    total: Total,
    optimizer: optax.GradientTransformation,
    tau: float,
) -> tuple[TrainState, jax.Array, jax.Array]:
    """One optimizer step on the mean loss, then `target ← (1-τ)·target + τ·online`.

    If the loss or the gradient's norm is not finite, nothing is learned: parameters, targets and
    moments stay the same, bit for bit. The counts of steps and environment steps and the learning
    rate's schedule still advance, so that the next batch has the keys and the rate of its number.
    No parameter becomes non-finite: an element whose own update overflows keeps its value.

    Args:
        optimizer: keeps its moments if it gets `finite=False` (`make_optimizer`).

    Returns:
        the new state, the gradient's global norm before clipping, and whether both were finite.
    """
    gradient = jax.tree.map(lambda g: g / jnp.maximum(total.transitions, 1.0), gradient)
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm) & jnp.isfinite(total.loss)
    params, opt_state = optimizer_step(state.params, state.opt_state, gradient, optimizer, finite)
    target_params = optax.incremental_update(params, state.target_params, tau)
    return (
        TrainState(
            params=params,
            target_params=keep_unless(finite, target_params, state.target_params),
            opt_state=opt_state,
            step=state.step + 1,
            env_steps=state.env_steps + total.transitions.astype(jnp.int32),
            key=state.key,
        ),
        norm,
        finite,
    )
