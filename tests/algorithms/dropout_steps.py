"""Three training steps with dropout on adapters, as a program over two devices: `OUT.npz`."""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.algorithms import placement
from qrag_jax.algorithms.train_step import make_train_step
from qrag_jax.encoders.text_encoder import TextEncoder
from qrag_jax.runtime.mesh import AXES, shard_batch
from tests.algorithms.play_setup import CONFIG, ENCODER, ONE_BUCKET, PQN, episodes, feedback
from tests.algorithms.test_pqn_lora import adapters
from tests.algorithms.three_steps import OPTIMIZER, PEAK, SCHEDULE, STEPS, flat
from tests.episodes_maker import tower

CASES = {  # devices, micro-batches on each, dropout
    "whole": (1, 1, 0.4),
    "split": (2, 2, 0.4),
    "undropped": (1, 1, 0.0),
}


def steps(devices: int, accumulation: int, dropout: float) -> dict[str, np.ndarray]:
    """Adapters and every step's metrics."""
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1, 1), AXES)
    encoder = TextEncoder(**(vars(ENCODER) | {"lora_scale": 2.0, "lora_dropout": dropout}))
    base, one = tower(encoder, 0), jax.tree.map(lambda leaf: leaf[0], adapters("bert", 0))
    shardings = placement.state_shardings(mesh, (), one, OPTIMIZER)
    base_shardings = placement.base_shardings(mesh, (), base)
    settings = encoder, ONE_BUCKET, CONFIG, PQN, feedback, OPTIMIZER, SCHEDULE, PEAK
    step = make_train_step(mesh, shardings, *settings, accumulation, base_shardings)
    state = placement.first_state(shardings, one, OPTIMIZER, 42)
    placed, result = jax.device_put(base, base_shardings), {}
    for number in range(STEPS):
        state, metrics = step(state, shard_batch(mesh, episodes(number)), placed)
        result |= flat({f"metrics {number}": metrics})
    return result | flat({"params": state.params, "target_params": state.target_params})


def main() -> None:
    for name, case in CASES.items():
        np.savez(f"{sys.argv[1]}/{name}.npz", **steps(*case))


if __name__ == "__main__":
    main()
