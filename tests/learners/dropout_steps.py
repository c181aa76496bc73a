"""Three training steps with dropout, as a program over two devices: a file for each case."""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.learners import placement
from qrag_jax.learners.step import make_train_step
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.runtime.mesh import AXES, shard_batch
from tests.episodes_maker import tower
from tests.learners.test_pqn_lora import adapters
from tests.learners.three_steps import OPTIMIZER, PEAK, SCHEDULE, STEPS, flat
from tests.rollouts.play_setup import CONFIG, ENCODER, ONE_BUCKET, PQN, episodes, feedback

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
    base_shardings, placed, result = None, [], {}
    if dropout is not OF_TRUNK:
        base_shardings = placement.base_shardings(mesh, (), one)
        placed = [jax.device_put(one, base_shardings)]
        one = jax.tree.map(lambda leaf: leaf[0], adapters("bert", 0))
    shardings = placement.state_shardings(mesh, (), one, OPTIMIZER)
    settings = encoder, ONE_BUCKET, CONFIG, PQN, feedback, OPTIMIZER, SCHEDULE, PEAK
    step = make_train_step(mesh, shardings, *settings, accumulation, base_shardings)
    state = placement.first_state(shardings, one, OPTIMIZER, 42)
    for number in range(STEPS):
        state, metrics = step(state, shard_batch(mesh, episodes(number)), *placed)
        result |= flat({f"metrics {number}": metrics})
    return result | flat({"params": state.params, "target_params": state.target_params})


def main() -> None:
    for name, case in CASES.items():
        np.savez(f"{sys.argv[1]}/{name}.npz", **steps(*case))


if __name__ == "__main__":
    main()
