"""Three steps with rewards from outside, and the fused step that they are compared with."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.learners.deferred import make_learn_step, make_play_step
from qrag_jax.learners.step import make_train_step
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.rollouts.chunks import Actor
from qrag_jax.rollouts.experience import Played, ScoredEpisodes
from qrag_jax.runtime.mesh import replicate, shard_batch
from tests.devices import mesh_of
from tests.episodes_maker import tower
from tests.learners.three_steps import STEPS, flat, two_towers
from tests.learners.whole_loss import adapters
from tests.rollouts.play_setup import CONFIG, ENCODER, ONE_BUCKET, episodes

ADAPTED = TextEncoder(**(vars(ENCODER) | {"lora_scale": 2.0, "lora_dropout": 0.4}))
# All that a play draws or settles: positions, STOP, dropout, random acting at first.
ROLLOUT = dataclasses.replace(CONFIG, positions="random", stop_action=True)
LONG_EPISODE = 6  # of `episodes`


def score(actions: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """A reward that depends on all that was taken and in which order, `[B, T]` → `[B]`."""
    worth = 0.1 + (actions % 7) * (1.0 + np.arange(actions.shape[1])) / 20
    return (worth * valid).sum(axis=1).astype(np.float32)


def per_step(played: Played, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The reward at the last step of each episode, and the steps of those in `mask`, `[B, T]`."""
    actions, valid = np.asarray(played.actions), np.asarray(played.valid)
    last = valid & ~np.pad(valid[:, 1:], ((0, 0), (0, 1)))
    return np.where(last, score(actions, valid)[:, None], 0), valid & mask[:, None]


def at_the_end(batch, trajectory) -> jax.Array:
    """The same reward inside the program."""
    number = 1.0 + jnp.arange(trajectory.actions.shape[1])[None]
    worth = 0.1 + (trajectory.actions % 7) * number / 20
    total = (worth * trajectory.valid).sum(axis=1, keepdims=True)
    return jnp.where(trajectory.valid & trajectory.done, total, 0.0)


def steps(devices: int, accumulation: int, fused: bool) -> dict[str, np.ndarray]:
    """Adapters and every step's metrics."""
    mesh = mesh_of(devices)
    base, one = tower(ADAPTED, 0), jax.tree.map(lambda leaf: leaf[0], adapters("bert", 0))
    actor = Actor(ADAPTED, ONE_BUCKET, ROLLOUT)
    towers = two_towers(mesh, one, actor, accumulation=accumulation, base=base)
    state, result = towers.first_state(one, 42), {}
    if fused:
        step = towers.bound(make_train_step(towers, at_the_end))
    else:
        play = towers.bound(make_play_step(towers))
        learn = towers.bound(make_learn_step(towers))
    for number in range(STEPS):
        batch = shard_batch(mesh, episodes(number))
        if not fused:
            played = play(state, batch, replicate(mesh, np.int32(number)))
            played = shard_batch(mesh, Played(*map(np.asarray, played)))
            everyone = np.ones(len(played.valid), bool)
            reward = shard_batch(mesh, per_step(jax.device_get(played), everyone))
            batch, step = ScoredEpisodes(batch, played, *reward), learn
        state, metrics = step(state, batch)
        result |= flat({f"metrics {number}": metrics})
    if not fused:
        # Once more, with a reward that is infinite in one episode, on one device, in one part.
        wrong, scored = per_step(jax.device_get(played), everyone)
        wrong[LONG_EPISODE] = np.inf
        reward = shard_batch(mesh, (wrong, scored))
        copied = jax.tree.map(jnp.copy, state)
        after, metrics = learn(copied, ScoredEpisodes(*batch[:2], *reward))
        result["skipped"] = np.asarray(metrics["skipped"])
        for name in ("params", "target_params"):
            same = jax.tree.map(np.array_equal, getattr(state, name), getattr(after, name))
            result[f"kept {name}"] = np.array(jax.tree.leaves(same))
    return result | flat({"params": state.params, "target_params": state.target_params})
