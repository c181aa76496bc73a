"""The training state on the mesh: where its arrays live, and the first one built in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.algorithms.pqn import TrainState, init_state
from qrag_jax.encoders.text_encoder import Params
from qrag_jax.runtime.sharding import Rules, shardings_of


def params_shardings(mesh: Mesh, rules: Rules, tower: Params) -> Params:
    """The shardings of both towers' parameters, from the arrays or shapes of one tower."""
    shapes = jax.eval_shape(_both, tower)
    return shardings_of(mesh, rules, shapes, shapes)


def base_shardings(mesh: Mesh, rules: Rules, base: Params) -> Params:
    """The shardings of the one frozen tower that adapters stand on."""
    return shardings_of(mesh, rules, base, base)


def state_shardings(
    mesh: Mesh, rules: Rules, tower: Params, optimizer: optax.GradientTransformation
) -> TrainState:
    """The sharding of every array of the training state; moments and targets follow parameters."""
    key = jax.eval_shape(jax.random.key, 0)
    state = jax.eval_shape(lambda tower, key: init_state(_both(tower), optimizer, key), tower, key)
    return shardings_of(mesh, rules, state, state.params)


def first_state(
    shardings: TrainState, tower: Params, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """Both towers start from the same one; no device ever holds more than its part of an array.

    Args:
        tower: host arrays of one tower, or of its adapters, the same on every host.
    """

    def build(tower: Params) -> TrainState:
        return init_state(_both(tower), optimizer, jax.random.key(seed))

    return jax.jit(build, out_shardings=shardings)(_place_one(shardings.params, tower))


def both_towers(shardings: Params, tower: Params) -> Params:
    """Two copies of one tower, or of its adapters (host arrays), placed as in training."""
    return jax.jit(_both, out_shardings=shardings)(_place_one(shardings, tower))


def _both(tower: Params) -> Params:
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tower)


def _place_one(shardings: Params, tower: Params) -> Params:
    def without_towers_axis(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))

    placed: Any = jax.device_put(tower, jax.tree.map(without_towers_axis, shardings))
    return placed
