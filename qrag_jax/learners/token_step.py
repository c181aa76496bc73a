"""What all updates of a token policy share: one optimizer step, and the program around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from qrag_jax.learners.policy_state import PolicyState
from qrag_jax.learners.state import optimizer_step
from qrag_jax.learners.token_policy import TokenPolicy
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.runtime.gpu_options import compiler_options

Metrics = dict[str, jax.Array]
Update = Callable[..., tuple[PolicyState, Metrics]]  # (state, episodes), then a base if any


def learn(
    policy: TokenPolicy,
    state: PolicyState,
    gradient: Params,
    loss: jax.Array,
    *,
    awake: jax.Array | bool = True,
) -> tuple[PolicyState, jax.Array, jax.Array]:
    """One optimizer step; nothing is learned if the loss or the gradient is not finite.

    Args:
        awake: else nothing is learned either.

    Returns:
        the state, whose counts are the old ones; the gradient's norm; whether both were finite.
    """
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    params, opt_state = optimizer_step(
        state.params, state.opt_state, gradient, policy.optimizer, finite & awake
    )
    return state._replace(params=params, opt_state=opt_state), norm, finite


def counted(state: PolicyState, tokens: jax.Array, metrics: Metrics) -> tuple[PolicyState, Metrics]:
    """The state after an update from so many sampled tokens, and the metrics with their sum."""
    env_steps = state.env_steps + tokens.astype(jnp.int32)
    state = state._replace(step=state.step + 1, env_steps=env_steps)
    return state, metrics | {"env_steps": env_steps.astype(jnp.float32)}


def jitted(policy: TokenPolicy, update: Callable[..., Any], episodes: Any) -> Update:
    """The program `(state, episodes) → (state, metrics)`; the state's buffers are donated.

    Args:
        update: takes a base, too, if the policy is adapters.
        episodes: shardings of what is learned from.
    """
    shardings, of_base = policy.shardings, policy.base_shardings
    placed = shardings, episodes
    return jax.jit(
        update,
        donate_argnums=0,
        in_shardings=placed if of_base is None else (*placed, of_base),
        out_shardings=(shardings, NamedSharding(policy.mesh, PartitionSpec())),
        compiler_options=compiler_options(policy.mesh, adapters=of_base is not None),
    )
