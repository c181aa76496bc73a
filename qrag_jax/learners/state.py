"""The state of training of every policy: what it is made of, where it lives, how it begins."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from qrag_jax.learners.placement import both
from qrag_jax.models.heads.embedding import Params
from qrag_jax.runtime.mesh import Rules, shardings_of


class Critic(NamedTuple):
    """What estimates the return of a state: a tower of its own and a linear map behind it."""

    tower: Params  # parameters of one tower, or of adapters on the policy's base
    weights: Any = None  # float32 `[D]`, zeros at first; None: the tower is that of the policy
    bias: Any = None  # float32 scalar


class TrainState(NamedTuple):
    """The state of training; every leaf is an array."""

    params: Params  # of one model, or of two towers stacked on axis 0; or their adapters alone
    opt_state: optax.OptState  # state of its optimizer
    step: jax.Array  # optimizer steps done, skipped ones too, int32
    env_steps: jax.Array  # actions learned from (passages, searches or tokens), int32
    key: jax.Array  # PRNG key of the run, constant
    target_params: Params | None = None  # the target towers of PQN; else None
    critic: Critic | None = None  # PPO's; None without a critic
    critic_opt_state: optax.OptState | None = None
    # the first parameters of a stage, if a KL is to them; else None
    reference: Params | None = None


class Parts(NamedTuple):
    """What a state is made of besides its parameters."""

    optimizer: optax.GradientTransformation  # of the policy
    critic_optimizer: optax.GradientTransformation | None = None  # None: there is no critic
    keeps_reference: bool = False  # whether the first parameters are kept, for a KL to them
    width: int = 0  # D, of what the critic's linear map takes
    has_targets: bool = False  # the policy is two towers, and there are targets of both

    def build(self, params: Params, key: jax.Array) -> TrainState:
        """The first state; targets, critic and reference are copies of the parameters."""

        # The arrays of a state are donated to its updates: none may be in two of its places.
        def copy() -> Params:
            return jax.tree.map(jnp.copy, params)

        critic = critic_opt_state = None
        if self.critic_optimizer is not None:
            weights, bias = jnp.zeros(self.width, jnp.float32), jnp.zeros((), jnp.float32)
            critic = Critic(copy(), weights, bias)
            critic_opt_state = self.critic_optimizer.init(critic)
        return TrainState(
            params=params,
            opt_state=self.optimizer.init(params),
            step=jnp.zeros((), jnp.int32),
            env_steps=jnp.zeros((), jnp.int32),
            key=key,
            target_params=copy() if self.has_targets else None,
            critic=critic,
            critic_opt_state=critic_opt_state,
            reference=copy() if self.keeps_reference else None,
        )

    def shapes(self, tower: Params) -> TrainState:
        """Shape and dtype of every array of the state, from those of one tower or its adapters."""

        def build(tower: Params, key: jax.Array) -> TrainState:
            return self.build(both(tower) if self.has_targets else tower, key)

        return jax.eval_shape(build, tower, jax.eval_shape(jax.random.key, 0))

    def shardings(self, mesh: Mesh, rules: Rules, tower: Params) -> TrainState:
        """The sharding of every array of the state; what belongs to a parameter follows it."""
        state = self.shapes(tower)
        return shardings_of(mesh, rules, state, state.params)


def episode_keys(state: TrainState, batch: jax.Array, episodes: int) -> jax.Array:
    """The PRNG keys `[episodes]` of a batch; its number is that of the step that learns from it."""
    return jax.random.split(jax.random.fold_in(state.key, batch), episodes)


def dropout_key(state: TrainState) -> jax.Array:
    """The key of this step's dropout, the same on every device; no other draw comes from it."""
    stream = jax.random.fold_in(state.key, 2**32 - 1)  # not the number of any step
    return jax.random.fold_in(stream, state.step)
