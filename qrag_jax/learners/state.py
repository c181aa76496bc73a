"""The state of training of every policy: what it is made of, where it lives, how it begins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.models.embedding import Params
from qrag_jax.models.files.model_folder import StoredLeaf
from qrag_jax.runtime.mesh import Rules, shardings_of

if TYPE_CHECKING:  # searches do not need it
    import optax


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


# ------------------------------------------------------------------------ parameters on the mesh


def params_shardings(mesh: Mesh, rules: Rules, tower: Params) -> Params:
    """The shardings of both towers' parameters, from the arrays or shapes of one tower."""
    return shardings_of(mesh, rules, jax.eval_shape(both, tower))


def shapes_on(tree: Any, shardings: Any) -> Any:
    """As `place`, for devices that are described but not here: shapes, dtypes and shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def both_towers(shardings: Params, tower: Params, second: Params | None = None) -> Params:
    """Two towers, or the adapters of two, placed as in training.

    Args:
        tower: parameters of one tower, or of its adapters; both are copies of it.
        second: as `tower`, of the tower of chunks, if that is another.
    """
    one = jax.tree.map(
        lambda both: NamedSharding(both.mesh, PartitionSpec(*both.spec[1:])), shardings
    )
    towers = [place(tree, one) for tree in (tower, second) if tree is not None]
    return jax.jit(both, out_shardings=shardings)(*towers)


def both(tower: Params, second: Params | None = None) -> Params:
    """Two towers stacked on axis 0."""
    second = tower if second is None else second
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), tower, second)


def place(tower: Params, shardings: Params) -> Params:
    """Places one tower on the mesh; each device gets only its part.

    Args:
        tower: host arrays, the same on every host, or `StoredLeaf`s, of which the host reads one
            device's part at a time.
    """

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        return (_read if isinstance(leaf, StoredLeaf) else jax.device_put)(leaf, sharding)

    return jax.tree.map(put, tower, shardings)


def _read(leaf: StoredLeaf, sharding: NamedSharding) -> jax.Array:
    # Not `jax.make_array_from_callback`: it holds the parts of all devices on the host at once,
    # which of a large model's leaf are several gigabytes for each copy along `data`.
    parts: dict[str, np.ndarray] = {}
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        if str(index) not in parts:  # devices with the same part are mostly neighbours
            parts = {str(index): leaf.read(index or ())}
        arrays.append(jax.device_put(parts[str(index)], device).block_until_ready())
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def encoder_key(params: Any, settings: Mapping[str, Any]) -> str:
    """A digest of the parameters and of all other settings that an embedding depends on."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:32]
