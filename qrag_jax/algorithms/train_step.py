"""One training step as ONE program: rollout, feedback, targets and update over the mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.algorithms import pqn
from qrag_jax.algorithms.rollout import RolloutConfig
from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.encoders.ragged import Plan
from qrag_jax.encoders.text_encoder import TextEncoder

BATCH_AXES = ("data", "fsdp")

TrainStep = Callable[[pqn.TrainState, EpisodeBatch], tuple[pqn.TrainState, dict[str, jax.Array]]]


def make_train_step(
    mesh: Mesh,
    encoder: TextEncoder,
    plan: Plan,
    rollout_config: RolloutConfig,
    config: pqn.PQNConfig,
    feedback: pqn.Feedback,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    peak_learning_rate: float,
    accumulation: int = 1,
) -> TrainStep:
    """The jitted `(state, batch) → (state, metrics)`; the state's buffers are donated.

    The batch is split over the mesh's batch axes and, on each device, into `accumulation`
    micro-batches. Losses are sums with their counts, and every episode has its own PRNG key, so
    any split gives the numbers of the whole batch.

    Metrics are float32 scalars: means over transitions (`loss`, `mean_q`, `mean_target`,
    `td_error`, `entropy`), over episodes (`return`, `fact_em` of the acting policy), and
    `grad_norm`, `learning_rate`, `alpha`, `padding_share`, `env_steps`.
    """
    gradient_sums = partial(pqn.gradient_sums, encoder, plan, rollout_config, config, feedback)

    def on_device(params, target_params, batch, keys, alpha, uniform):
        def micro(batch, keys):
            return gradient_sums(params, target_params, batch, keys, alpha, uniform)

        def add(total, micro_batch):
            return jax.tree.map(jnp.add, total, micro(*micro_batch)), None

        if accumulation == 1:
            return jax.lax.psum(micro(batch, keys), BATCH_AXES)
        split = jax.tree.map(
            lambda leaf: leaf.reshape(accumulation, -1, *leaf.shape[1:]), (batch, keys)
        )
        shapes = jax.eval_shape(micro, *jax.tree.map(lambda leaf: leaf[0], split))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.psum(jax.lax.scan(add, zeros, split)[0], BATCH_AXES)

    replicated, by_episode = PartitionSpec(), PartitionSpec(BATCH_AXES)
    over_mesh = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(replicated, replicated, by_episode, by_episode, replicated, replicated),
        out_specs=replicated,
        check_vma=False,
    )

    def train_step(state: pqn.TrainState, batch: EpisodeBatch):
        learning_rate = schedule(state.step)
        alpha = pqn.alpha_at(config.alpha, learning_rate, peak_learning_rate)
        step_key = jax.random.fold_in(state.key, state.step)
        keys = jax.random.split(step_key, batch.sample.shape[0])
        uniform = state.env_steps < 2 * config.learning_start
        gradient, sums = over_mesh(state.params, state.target_params, batch, keys, alpha, uniform)
        new_state, grad_norm = pqn.apply_update(state, gradient, sums, optimizer, config.tau)
        transitions = jnp.maximum(sums.transitions, 1.0)
        episodes = jnp.maximum(sums.episodes, 1.0)
        metrics = {
            "loss": sums.loss / transitions,
            "mean_q": sums.q / transitions,
            "mean_target": sums.target / transitions,
            "td_error": sums.td_error / transitions,
            "entropy": sums.entropy / transitions,
            "return": sums.reward / episodes,
            "fact_em": sums.solved / episodes,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "alpha": alpha,
            "padding_share": 1.0 - sums.real_tokens / jnp.maximum(sums.computed_tokens, 1.0),
            "env_steps": new_state.env_steps.astype(jnp.float32),
        }
        return new_state, metrics

    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(NamedSharding(mesh, replicated), NamedSharding(mesh, replicated)),
    )
