"""One training step as ONE program: rollout, feedback, targets and update over the mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from qrag_jax.learners.pqn import Feedback, FusedGradient, Towers
from qrag_jax.learners.state import Total, TrainState, apply_update, dropout_key
from qrag_jax.learners.two_towers import TwoTowers
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.heads.embedding import Params
from qrag_jax.rollouts.chunks import Draws
from qrag_jax.runtime.platform import compiler_options
from qrag_jax.runtime.sharding import BATCH_AXES, specs_of, sum_over_data

Metrics = dict[str, jax.Array]
TrainStep = Callable[..., tuple[TrainState, Metrics]]  # (state, batch), then a base if any


def make_train_step(towers: TwoTowers, feedback: Feedback) -> TrainStep:
    """Makes the jitted `(state, batch) → (state, metrics)`; the state's buffers are donated.

    If the state holds adapters, it is `(state, batch, base)`: both towers, online and target, share
    one frozen base, which is neither changed nor donated.

    The batch is split over the mesh's batch axes and, on each device, into `accumulation`
    micro-batches. Losses are sums with their counts, and every episode has its own PRNG key, so
    any split gives the same numbers as the whole batch. This also holds with dropout, whose masks
    depend on the step and the content of rows (`models.compute.dropout`).

    The state lives where `shardings` say. A kernel that is split over `fsdp` is gathered when its
    layer is computed, forward and backward. Each device gets back its part of the summed gradient,
    and the optimizer and the target towers work on parts alone (Rajbhandari et al., arXiv
    1910.02054, ZeRO stage 3). Layers that are split over `tensor` are computed where they are.

    Metrics are float32 scalars: means over transitions (`loss`, `mean_q`, `mean_target`,
    `td_error`, `entropy`), means over episodes (`return`, `fact_em` of the acting policy), and
    `grad_norm`, `learning_rate`, `alpha`, `padding_share`, `env_steps` and `skipped`. `skipped` is
    1 if the loss or the gradient was not finite and nothing was learned (`state.apply_update`).
    """
    return make_step(towers, FusedGradient(towers.actor, towers.config, feedback))


def make_step(
    towers: TwoTowers,
    gradient_of: Callable[..., tuple[Params, Any]],
    more_metrics: Callable[[Any, Metrics], Metrics] = lambda episodes, metrics: metrics,
) -> TrainStep:
    """As `make_train_step`, with any function that gives the gradient of the summed loss.

    Args:
        gradient_of: `(towers, episodes, draws, dropout_key)` → the gradient and its sums, such as
            `FusedGradient`; episodes are a pytree with the batch on axis 0, and the sums have
            `loss`, `transitions` and `means()`.
        more_metrics: `(episodes, metrics)` → the metrics with more of them from the episodes.
    """
    mesh, shardings, config = towers.mesh, towers.shardings, towers.config
    base_shardings, accumulation, drops = towers.base_shardings, towers.accumulation, towers.drops
    specs, base_specs = specs_of(shardings.params), specs_of(base_shardings)

    def on_device(parts: Towers, base, episodes, draws: Draws, dropout_key):
        if base is not None:
            parts = Towers(*(Adapted(base, adapters) for adapters in parts))

        def total_over_mesh(totals):
            gradient, sums = totals
            return sum_over_data(gradient, specs), jax.lax.psum(sums, BATCH_AXES)

        def micro(episodes, keys):
            return gradient_of(parts, episodes, draws._replace(keys=keys), dropout_key)

        def add(total, micro_batch):
            return jax.tree.map(jnp.add, total, micro(*micro_batch)), None

        if accumulation == 1:
            return total_over_mesh(micro(episodes, draws.keys))
        split = jax.tree.map(
            lambda leaf: leaf.reshape(accumulation, -1, *leaf.shape[1:]),
            (episodes, draws.keys),
        )
        shapes = jax.eval_shape(micro, *jax.tree.map(lambda leaf: leaf[0], split))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return total_over_mesh(jax.lax.scan(add, zeros, split)[0])

    replicated, by_episode = PartitionSpec(), PartitionSpec(BATCH_AXES)
    over_mesh = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(
            Towers(specs, specs),
            base_specs,
            by_episode,
            Draws.specs(),
            replicated,
        ),
        out_specs=(specs, replicated),
        check_vma=False,
    )

    def train_step(state: TrainState, episodes: Any, base: Params | None = None):
        learning_rate = towers.schedule(state.step)
        draws = towers.draws(state, state.step, jax.tree.leaves(episodes)[0].shape[0])
        key = dropout_key(state) if drops else None
        parts = Towers(state.params, state.target_params)
        gradient, sums = over_mesh(parts, base, episodes, draws, key)
        total = Total(sums.loss, sums.transitions)
        new_state, grad_norm, finite = apply_update(
            state, gradient, total, towers.optimizer, config.tau
        )
        metrics = sums.means() | {
            "grad_norm": grad_norm,
            "skipped": 1.0 - finite.astype(jnp.float32),
            "learning_rate": learning_rate,
            "alpha": draws.alpha,
            "env_steps": new_state.env_steps.astype(jnp.float32),
        }
        return new_state, more_metrics(episodes, metrics)

    placed = shardings, NamedSharding(mesh, by_episode)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=placed if base_shardings is None else (*placed, base_shardings),
        out_shardings=(shardings, NamedSharding(mesh, replicated)),
        compiler_options=compiler_options(mesh, adapters=base_shardings is not None),
    )
