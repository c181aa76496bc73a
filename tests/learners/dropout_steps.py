"""Three training steps with dropout, however they are split."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np

from qrag_jax.learners.step import make_train_step
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.rollouts.chunks import Actor
from qrag_jax.runtime.mesh import shard_batch
from tests.devices import mesh_of
from tests.episodes_maker import tower
from tests.learners.three_steps import STEPS, flat, two_towers
from tests.learners.whole_loss import adapters
from tests.rollouts.play_setup import CONFIG, ENCODER, ONE_BUCKET, episodes, feedback

OF_TRUNK = {"dropout": 0.2, "attention_dropout": 0.3}  # whole towers are trained
CASES = {  # devices, micro-batches on each, what drops
    "whole": (1, 1, {"lora_dropout": 0.4}),
    "split": (2, 2, {"lora_dropout": 0.4}),
    "undropped": (1, 1, {"lora_dropout": 0.0}),
    "trunk whole": (1, 1, OF_TRUNK),
    "trunk split": (2, 2, OF_TRUNK),
}


@cache
def ran(case: str) -> dict[str, np.ndarray]:
    """Adapters (or towers) and every step's metrics."""
    devices, accumulation, dropout = CASES[case]
    mesh = mesh_of(devices)
    encoder = TextEncoder(**(vars(ENCODER) | {"lora_scale": 2.0} | dropout))
    one = tower(encoder, 0)
    base = None
    if dropout is not OF_TRUNK:
        base, one = one, jax.tree.map(lambda leaf: leaf[0], adapters("bert", 0))
    actor = Actor(encoder, ONE_BUCKET, CONFIG)
    towers = two_towers(mesh, one, actor, accumulation=accumulation, base=base)
    step = towers.bound(make_train_step(towers, feedback))
    state, result = towers.first_state(one, 42), {}
    for number in range(STEPS):
        state, metrics = step(state, shard_batch(mesh, episodes(number)))
        result |= flat({f"metrics {number}": metrics})
    return result | flat({"params": state.params, "target_params": state.target_params})
