"""The training state of ONE model that is a policy, perhaps with a critic, and where it lives."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from qrag_jax.learners.placement import place
from qrag_jax.models.heads.embedding import Params
from qrag_jax.runtime.sharding import Rules, shardings_of


class Critic(NamedTuple):
    """What estimates the return of a state: a tower of its own and a linear map of its embedding.

    Attributes:
        tower: parameters of one tower, or of adapters on the policy's base.
        weights: float32 `[D]`, zeros at first.
        bias: float32 scalar.
    """

    tower: Params
    weights: jax.Array
    bias: jax.Array


class PolicyState(NamedTuple):
    """The state of training; every leaf is an array.

    Attributes:
        params: of one tower, or its adapters.
        opt_state: state of its optimizer.
        critic, critic_opt_state: PPO's; None without a critic.
        reference: the first parameters, if a KL is to them and the base is not what they are; else
            None.
        step: optimizer steps done, skipped ones too, int32.
        env_steps: actions learned from, searches or tokens, int32.
        key: PRNG key of the run, constant.
    """

    params: Params
    opt_state: optax.OptState
    critic: Critic | None
    critic_opt_state: optax.OptState | None
    reference: Params | None
    step: jax.Array
    env_steps: jax.Array
    key: jax.Array


class Parts(NamedTuple):
    """What a state is made of besides its parameters.

    Attributes:
        optimizer: of the policy.
        critic_optimizer: None: there is no critic.
        keeps_reference: whether the first parameters are kept, for a KL to them.
        width: D, of what the critic's linear map takes.
    """

    optimizer: optax.GradientTransformation
    critic_optimizer: optax.GradientTransformation | None
    keeps_reference: bool
    width: int

    def build(self, params: Params, key: jax.Array) -> PolicyState:
        """The first state; `params` are of the tower, or its adapters."""
        critic = critic_opt_state = None
        if self.critic_optimizer is not None:
            weights, bias = jnp.zeros(self.width, jnp.float32), jnp.zeros((), jnp.float32)
            # The arrays of a state are donated to its updates: none may be in two of its places.
            critic = Critic(jax.tree.map(jnp.copy, params), weights, bias)
            critic_opt_state = self.critic_optimizer.init(critic)
        return PolicyState(
            params=params,
            opt_state=self.optimizer.init(params),
            critic=critic,
            critic_opt_state=critic_opt_state,
            reference=jax.tree.map(jnp.copy, params) if self.keeps_reference else None,
            step=jnp.zeros((), jnp.int32),
            env_steps=jnp.zeros((), jnp.int32),
            key=key,
        )


def next_stage(parts: Parts, state: PolicyState) -> PolicyState:
    """The state with which a later stage of training begins: its moments are zero.

    A KL is to the parameters of its start. A critic begins as the policy is then.
    """
    begun = parts.build(state.params, state.key)
    return begun._replace(step=state.step, env_steps=state.env_steps)


def state_shapes(parts: Parts, tower: Params) -> PolicyState:
    """Shape and dtype of every array of the state, from those of the tower or its adapters."""
    return jax.eval_shape(parts.build, tower, jax.eval_shape(jax.random.key, 0))


def state_shardings(mesh: Mesh, rules: Rules, parts: Parts, tower: Params) -> PolicyState:
    """The sharding of every array of the state; moments, critic and reference follow the tower."""
    state = state_shapes(parts, tower)
    return shardings_of(mesh, rules, state, state.params)


def first_state(shardings: PolicyState, parts: Parts, tower: Params, seed: int) -> PolicyState:
    """The first state on the mesh; no device ever holds more than its part of an array.

    Args:
        tower: parameters of the tower, or of its adapters: host arrays, or `StoredLeaf`s.
    """

    def build(tower: Params) -> PolicyState:
        return parts.build(tower, jax.random.key(seed))

    return jax.jit(build, out_shardings=shardings)(place(tower, shardings.params))
