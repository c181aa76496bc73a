"""One training step as ONE program: rollout, feedback, targets and update over the mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.learners import pqn
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.ragged import BlockShapes
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.rollouts.chunks import RolloutConfig
from qrag_jax.runtime.sharding import BATCH_AXES, gather, specs_of, sum_to_parts

Metrics = dict[str, jax.Array]
TrainStep = Callable[..., tuple[pqn.TrainState, Metrics]]  # (state, batch), then a base if any


def make_train_step(
    mesh: Mesh,
    shardings: pqn.TrainState,
    encoder: TextEncoder,
    block_shapes: BlockShapes,
    rollout_config: RolloutConfig,
    config: pqn.PQNConfig,
    feedback: pqn.Feedback,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    peak_learning_rate: float,
    accumulation: int = 1,
    base_shardings: Params | None = None,
) -> TrainStep:
    """The jitted `(state, batch) → (state, metrics)`; the state's buffers are donated.

    Where the state's towers are adapters it is `(state, batch, base)`: one frozen base serves
    both towers, online and target, and is neither changed nor donated.

    The batch is split over the mesh's batch axes and, on each device, into `accumulation`
    micro-batches. Losses are sums with their counts, and every episode has its own PRNG key, so
    any split gives the numbers of the whole batch. So it does with dropout, whose masks depend on
    the step and the content of rows (`models.compute.dropout`).

    The state lives as `shardings` say. Parameters split over `fsdp` are gathered to be computed
    with, each device gets its part of the summed gradient back, and the optimizer and the target
    towers work on parts alone (Rajbhandari et al., arXiv 1910.02054, ZeRO stage 3, with the
    gathering once a step instead of once a layer).

    Args:
        shardings: of the state, as `learners.placement.state_shardings` gives them.
        base_shardings: of the base that adapters stand on, None where whole towers are trained.

    Metrics are float32 scalars: means over transitions (`loss`, `mean_q`, `mean_target`,
    `td_error`, `entropy`), over episodes (`return`, `fact_em` of the acting policy), and
    `grad_norm`, `learning_rate`, `alpha`, `padding_share`, `env_steps`, and `skipped`, 1 where the
    loss or the gradient was not finite and nothing was learned (`pqn.apply_update`).
    """
    sums_of = partial(pqn.gradient_sums, encoder, block_shapes, rollout_config, config, feedback)
    drops = encoder.drops(base_shardings is not None)
    return make_step(
        mesh,
        shardings,
        sums_of,
        config,
        optimizer,
        schedule,
        peak_learning_rate,
        accumulation,
        drops,
        base_shardings,
    )


def make_step(
    mesh: Mesh,
    shardings: pqn.TrainState,
    sums_of: Callable[..., tuple[Params, pqn.Sums]],
    config: pqn.PQNConfig,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    peak_learning_rate: float,
    accumulation: int,
    drops: bool,
    base_shardings: Params | None,
    more_metrics: Callable[[Any, Metrics], Metrics] = lambda episodes, metrics: metrics,
) -> TrainStep:
    """`make_train_step` for any way from episodes to the gradient of their summed loss.

    Args:
        sums_of: `(params, target_params, episodes, keys, alpha, uniform, dropout_key)` to what
            `pqn.gradient_sums` returns; episodes are a pytree with the batch on axis 0.
        drops: whether there is dropout. more_metrics: adds to them what episodes tell.
    """
    specs, base_specs = specs_of(shardings.params), specs_of(base_shardings)

    def on_device(params, target_params, base, episodes, keys, alpha, uniform, dropout_key):
        params, target_params = gather(params, specs), gather(target_params, specs)
        if base is not None:
            base = gather(base, base_specs)
            params, target_params = Adapted(base, params), Adapted(base, target_params)

        def total_over_mesh(totals):
            gradient, sums = totals
            return sum_to_parts(gradient, specs), jax.lax.psum(sums, BATCH_AXES)

        def micro(episodes, keys):
            settings = alpha, uniform, dropout_key
            return sums_of(params, target_params, episodes, keys, *settings)

        def add(total, micro_batch):
            return jax.tree.map(jnp.add, total, micro(*micro_batch)), None

        if accumulation == 1:
            return total_over_mesh(micro(episodes, keys))
        split = jax.tree.map(
            lambda leaf: leaf.reshape(accumulation, -1, *leaf.shape[1:]), (episodes, keys)
        )
        shapes = jax.eval_shape(micro, *jax.tree.map(lambda leaf: leaf[0], split))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return total_over_mesh(jax.lax.scan(add, zeros, split)[0])

    replicated, by_episode = PartitionSpec(), PartitionSpec(BATCH_AXES)
    over_mesh = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(specs, specs, base_specs, by_episode, by_episode, *[replicated] * 3),
        out_specs=(specs, replicated),
        check_vma=False,
    )

    def train_step(state: pqn.TrainState, episodes: Any, base: Params | None = None):
        learning_rate = schedule(state.step)
        alpha = pqn.alpha_at(config.alpha, learning_rate, peak_learning_rate)
        keys = pqn.episode_keys(state, state.step, jax.tree.leaves(episodes)[0].shape[0])
        uniform = state.env_steps < 2 * config.learning_start
        dropout_key = pqn.dropout_key(state) if drops else None
        gradient, sums = over_mesh(
            state.params, state.target_params, base, episodes, keys, alpha, uniform, dropout_key
        )
        new_state, grad_norm, finite = pqn.apply_update(
            state, gradient, sums, optimizer, config.tau
        )
        transitions = jnp.maximum(sums.transitions, 1.0)
        played = jnp.maximum(sums.episodes, 1.0)
        metrics = {
            "loss": sums.loss / transitions,
            "mean_q": sums.q / transitions,
            "mean_target": sums.target / transitions,
            "td_error": sums.td_error / transitions,
            "entropy": sums.entropy / transitions,
            "return": sums.reward / played,
            "fact_em": sums.solved / played,
            "grad_norm": grad_norm,
            "skipped": 1.0 - finite.astype(jnp.float32),
            "learning_rate": learning_rate,
            "alpha": alpha,
            "padding_share": 1.0 - sums.real_tokens / jnp.maximum(sums.computed_tokens, 1.0),
            "env_steps": new_state.env_steps.astype(jnp.float32),
        }
        return new_state, more_metrics(episodes, metrics)

    placed = shardings, NamedSharding(mesh, by_episode)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=placed if base_shardings is None else (*placed, base_shardings),
        out_shardings=(shardings, NamedSharding(mesh, replicated)),
    )
