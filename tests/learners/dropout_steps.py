"""Three training steps with dropout, as a program over two devices: a file for each case."""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.learners.step import make_train_step
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.rollouts.chunks import Actor
from qrag_jax.runtime.mesh import AXES, shard_batch
from tests.episodes_maker import tower
from tests.learners.test_pqn_lora import adapters
from tests.learners.three_steps import STEPS, flat, two_towers
from tests.rollouts.play_setup import CONFIG, ENCODER, ONE_BUCKET, episodes, feedback

OF_TRUNK = {"dropout": 0.2, "attention_dropout": 0.3}  # whole towers are trained
CASES = {  # devices, micro-batches on each, what drops
    "whole": (1, 1, {"lora_dropout": 0.4}),
    "split": (2, 2, {"lora_dropout": 0.4}),
    "undropped": (1, 1, {"lora_dropout": 0.0}),
    "trunk whole": (1, 1, OF_TRUNK),
    "trunk split": (2, 2, OF_TRUNK),
}


def steps(devices: int, accumulation: int, dropout: dict[str, float]) -> dict[str, np.ndarray]:
    """Adapters (or towers) and every step's metrics."""
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1, 1), AXES)
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


def main() -> None:
    for name, case in CASES.items():
        np.savez(f"{sys.argv[1]}/{name}.npz", **steps(*case))


if __name__ == "__main__":
    main()
