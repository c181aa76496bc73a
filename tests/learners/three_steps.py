"""Three training steps of the small problem on a mesh."""

from __future__ import annotations

import jax
import numpy as np

from qrag_jax.learners import placement
from qrag_jax.learners.optimizers import (
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
)
from qrag_jax.learners.state import TrainState, init_state
from qrag_jax.learners.step import TrainStep, make_train_step
from qrag_jax.learners.two_towers import TwoTowers
from qrag_jax.models.heads.embedding import Params
from qrag_jax.rollouts.chunks import Actor
from qrag_jax.runtime.mesh import replicate, shard_batch
from qrag_jax.runtime.sharding import Rules
from tests.rollouts.play_setup import ONE_BUCKET_ACTOR, PQN, episodes, feedback, online

PEAK = 1e-3
OPTIMIZER_CONFIG = OptimizerConfig(
    learning_rate=PEAK,
    weight_decay=0.01,
    beta1=0.9,
    beta2=0.98,
    eps=1e-6,
    clip_norm=0.2,
    schedule="linear",
    final_ratio=0.0,
    warmup_steps=2,
    total_steps=10,
)
SCHEDULE = learning_rate_schedule(OPTIMIZER_CONFIG)
OPTIMIZER = make_optimizer(OPTIMIZER_CONFIG)
STEPS = 3


def two_towers(
    mesh: jax.sharding.Mesh,
    tower: Params,
    actor: Actor = ONE_BUCKET_ACTOR,
    *,
    rules: Rules = (),
    accumulation: int = 1,
    base: Params | None = None,
) -> TwoTowers:
    """How towers like this one, or adapters on a base, are trained in these tests."""
    shardings = placement.state_shardings(mesh, rules, tower, OPTIMIZER)
    of_base = None if base is None else placement.base_shardings(mesh, rules, base)
    placed = None if base is None else jax.device_put(base, of_base)
    return TwoTowers(
        mesh=mesh,
        shardings=shardings,
        actor=actor,
        config=PQN,
        optimizer=OPTIMIZER,
        schedule=SCHEDULE,
        peak=PEAK,
        accumulation=accumulation,
        base_shardings=of_base,
        base=placed,
    )


def build(mesh: jax.sharding.Mesh, accumulation: int = 1) -> TrainStep:
    tower = jax.tree.map(lambda leaf: leaf[0], online())
    return make_train_step(two_towers(mesh, tower, accumulation=accumulation), feedback)


def first_state(mesh: jax.sharding.Mesh) -> TrainState:
    return replicate(mesh, init_state(online(), OPTIMIZER, jax.random.key(42)))


def flat(tree) -> dict[str, np.ndarray]:
    """Leaves by their path, as NumPy arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def three_steps(mesh: jax.sharding.Mesh, step: TrainStep) -> dict[str, np.ndarray]:
    """Parameters, target parameters and every step's metrics."""
    state, result = first_state(mesh), {}
    for number in range(STEPS):
        state, metrics = step(state, shard_batch(mesh, episodes(number)))
        result |= flat({f"metrics {number}": metrics})
    return result | flat({"params": state.params, "target_params": state.target_params})
