"""PQN with λ-returns and twin soft Q-values (Gallici et al., arXiv 2407.04811; Q-RAG, 2511.07328).

One update: play whole episodes with the current weights, score them, form λ-returns under the
target towers, regress both critics on them. The loss reaches the towers through the embeddings:
its gradient with respect to them is taken in closed form and pulled back through each tower in
length-sorted blocks, so only the states and the chosen chunks are encoded with gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from qrag_jax.algorithms.adam import keep_unless
from qrag_jax.algorithms.returns import lambda_returns
from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.environments.chunks import with_stop
from qrag_jax.models.compute.dropout import with_key
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.ragged import BlockShapes, TokenCount, pull_back
from qrag_jax.models.compute.rope import rotate
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.rollouts.chunks import RolloutConfig, Trajectory, rollout

Feedback = Callable[[EpisodeBatch, Trajectory], jax.Array]


@dataclasses.dataclass(frozen=True)
class PQNConfig:
    """Constants of the update, with the paper's symbols.

    Attributes:
        gamma: γ, discount. lambda_: λ of the returns. tau: τ, step of the target towers.
        alpha: α_0, temperature at the full learning rate.
        learning_start: the first 2·learning_start environment steps act at random.
    """

    gamma: float
    lambda_: float
    tau: float
    alpha: float
    learning_start: int


class TrainState(NamedTuple):
    """All that training changes; every leaf is an array.

    params, target_params: two towers stacked on axis 0, or their adapters alone. step: optimizer
    steps done, skipped ones too, int32. env_steps: environment steps (transitions) done, int32.
    key: PRNG key of the run, constant.
    """

    params: Params
    target_params: Params
    opt_state: optax.OptState
    step: jax.Array
    env_steps: jax.Array
    key: jax.Array


class Sums(NamedTuple):
    """Totals over transitions or episodes of a batch: divide by a count to get a mean."""

    transitions: jax.Array
    episodes: jax.Array
    loss: jax.Array
    q: jax.Array
    target: jax.Array
    td_error: jax.Array
    entropy: jax.Array
    reward: jax.Array
    solved: jax.Array
    real_tokens: jax.Array
    computed_tokens: jax.Array


def init_state(params: Params, optimizer: optax.GradientTransformation, key: jax.Array):
    """The first state of training; the target towers start as a copy of the online ones."""
    return TrainState(
        params=params,
        target_params=jax.tree.map(jnp.copy, params),
        opt_state=optimizer.init(params),
        step=jnp.zeros((), jnp.int32),
        env_steps=jnp.zeros((), jnp.int32),
        key=key,
    )


def episode_keys(state: TrainState, batch: jax.Array, episodes: int) -> jax.Array:
    """The PRNG keys `[episodes]` of the batch with this number, that of the step that learns it."""
    return jax.random.split(jax.random.fold_in(state.key, batch), episodes)


def dropout_key(state: TrainState) -> jax.Array:
    """The key of this step's dropout, the same on every device; no other draw comes from it."""
    stream = jax.random.fold_in(state.key, 2**32 - 1)  # which is no number of a step
    return jax.random.fold_in(stream, state.step)


def alpha_at(alpha: float, learning_rate: jax.Array, peak: float) -> jax.Array:
    """α_t = α_0·lr_t / lr_0, kept above 1e-6·α_0 so that a division by it stays finite."""
    return alpha * jnp.maximum(learning_rate / peak, 1e-6)


def targets(trajectory: Trajectory, rewards: jax.Array, config: PQNConfig) -> jax.Array:
    """λ-returns `[B, T]` of whole episodes from the soft values of the target towers.

    `values[:, t+1]` is the value of the state step t led to; the last step of a whole episode
    ends it, so nothing is bootstrapped there. Of a trajectory `done` and `values` are read.
    """
    discount = config.gamma * (1.0 - trajectory.done.astype(jnp.float32))
    next_values = jnp.pad(trajectory.values[:, 1:], ((0, 0), (0, 1)))
    returns = jax.vmap(lambda_returns, (0, 0, 0, None))
    return returns(rewards, discount, next_values, config.lambda_)


def loss(
    state_embeddings: jax.Array, chunk_embeddings: jax.Array, target: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`½(2q_1 - G)² + ½(2q_2 - G)²` summed over valid transitions, and their number.

    Args:
        state_embeddings, chunk_embeddings: `[..., 2D]`, halves are the critics; the chunks' as
            rotated at their positions.
        target: `[...]` λ-returns G; valid: `[...]` bool.
    """
    product = state_embeddings * chunk_embeddings
    twin = product.reshape(*product.shape[:-1], 2, -1).sum(-1)
    errors = 0.5 * jnp.square(2.0 * twin - target[..., None]).sum(-1)
    return jnp.where(valid, errors, 0.0).sum(), valid.sum().astype(jnp.float32)


def gradient_sums(
    encoder: TextEncoder,
    block_shapes: BlockShapes,
    rollout_config: RolloutConfig,
    config: PQNConfig,
    feedback: Feedback,
    params: Params | Adapted,
    target_params: Params | Adapted,
    batch: EpisodeBatch,
    keys: jax.Array,
    alpha: jax.Array,
    uniform: jax.Array,
    dropout_key: jax.Array | None = None,
) -> tuple[Params, Sums]:
    """Plays a batch and returns the gradient of the SUMMED loss, with the sums to divide by.

    Towers that share a frozen base (`Adapted`) have the gradient of their adapters. With
    `dropout_key` the online towers drop, or adapters see their inputs, through the masks of
    `models.compute.dropout`. Play and learning see the same ones, so the policy acts on the very
    embeddings that are regressed: dropout adds to its exploration. The target towers drop by
    masks of their own, as in Q-RAG, where all towers stay in torch's training mode; on a base with
    adapters they drop nothing.
    """
    if rollout_config.stop_action:
        batch = with_stop(batch)
    params = with_dropout(params, dropout_key)
    target_params = target_with_dropout(target_params, dropout_key)
    trajectory = rollout(
        encoder,
        block_shapes,
        rollout_config,
        (params, target_params),
        batch,
        keys,
        alpha,
        uniform,
    )
    rewards = feedback(batch, trajectory)
    target = targets(trajectory, rewards, config)
    embeddings = (trajectory.state_embeddings, trajectory.chunk_embeddings)
    last = rollout_config.last_position(batch.chunk_mask.shape[1])

    def loss_of(states: jax.Array, chunks: jax.Array) -> tuple[jax.Array, jax.Array]:
        return loss(states, rotate(chunks, trajectory.positions, last), target, trajectory.valid)

    (total, _), cotangents = jax.value_and_grad(loss_of, (0, 1), has_aux=True)(*embeddings)
    rows = _tower_rows(trajectory)
    cotangents = jnp.stack([c.reshape(-1, encoder.width) for c in cotangents])

    def of_tower(tower: tuple) -> tuple[Params, TokenCount]:
        one, *rows_and_cotangents = tower
        return pull_back(encoder, block_shapes.gradients, one, *rows_and_cotangents)

    gradient, used = _over_towers(of_tower, params, (*rows, cotangents))
    tokens = TokenCount.total([trajectory.tokens, used])
    return gradient, sums_of(batch, trajectory, rewards, target, total, tokens)


def with_dropout(params: Params | Adapted, key: jax.Array | None) -> Params | Adapted:
    """Online towers, or their adapters, with a key of dropout each, from the one of this step."""
    if key is None:
        return params
    if isinstance(params, Adapted):
        return params._replace(dropout_key=jax.random.split(key, 2))
    return with_key(params, jax.random.split(key, (2, 2))[0])


def target_with_dropout(params: Params | Adapted, key: jax.Array | None) -> Params | Adapted:
    """Target towers with keys of their own; adapters as they are, for they drop nothing there."""
    if key is None or isinstance(params, Adapted):
        return params
    return with_key(params, jax.random.split(key, (2, 2))[1])


def sums_of(
    batch: EpisodeBatch,
    trajectory: Trajectory,
    rewards: jax.Array,
    target: jax.Array,
    total: jax.Array,
    tokens: TokenCount,
) -> Sums:
    """The sums over valid steps, `total` being the loss. Of a trajectory `actions`, `valid`, `q`
    and `entropy` are read."""
    present = batch.chunk_mask.any(axis=1) & trajectory.valid.any(axis=1)
    unsolved = batch.support.at[
        jnp.arange(present.shape[0])[:, None],
        jnp.where(trajectory.valid, trajectory.actions, batch.support.shape[1]),
    ].set(False, mode="drop")

    def over_transitions(values: jax.Array) -> jax.Array:
        return jnp.where(trajectory.valid, values, 0.0).sum()

    return Sums(
        transitions=trajectory.valid.sum().astype(jnp.float32),
        episodes=present.sum().astype(jnp.float32),
        loss=total,
        q=over_transitions(trajectory.q),
        target=over_transitions(target),
        td_error=over_transitions(jnp.abs(trajectory.q - target)),
        entropy=over_transitions(trajectory.entropy),
        reward=over_transitions(rewards),
        solved=(present & ~unsolved.any(axis=1)).sum().astype(jnp.float32),
        real_tokens=tokens.real,
        computed_tokens=tokens.computed,
    )


def apply_update(
    state: TrainState,
    gradient: Params,
    sums: Sums,
    optimizer: optax.GradientTransformation,
    tau: float,
) -> tuple[TrainState, jax.Array, jax.Array]:
    """One optimizer step on the mean loss, then `target ← (1-τ)·target + τ·online`.

    Where the loss or the gradient's norm is not finite nothing is learned: parameters, targets and
    moments stay bit for bit. Time goes on: the step, the environment steps and the learning rate's
    schedule, which all count batches, so that the next batch has the keys and the rate of its turn.
    Nothing non-finite is ever put in: an element whose own update overflows keeps its value.

    Args:
        optimizer: keeps its own state where it is told `finite=False` (`make_optimizer`).

    Returns:
        the new state, the gradient's global norm before clipping, and whether both were finite.
    """
    gradient = jax.tree.map(lambda g: g / jnp.maximum(sums.transitions, 1.0), gradient)
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
        gradient, state.opt_state, state.params, finite=finite
    )
    params = optax.apply_updates(state.params, updates)
    params = jax.tree.map(
        lambda n, o: keep_unless(finite & jnp.isfinite(n), n, o), params, state.params
    )
    target_params = optax.incremental_update(params, state.target_params, tau)
    return (
        TrainState(
            params=params,
            target_params=keep_unless(finite, target_params, state.target_params),
            opt_state=opt_state,
            step=state.step + 1,
            env_steps=state.env_steps + sums.transitions.astype(jnp.int32),
            key=state.key,
        ),
        norm,
        finite,
    )


def _over_towers(
    compute: Callable[[tuple], Any], params: Params | Adapted, rows: tuple[jax.Array, ...]
) -> Any:
    """`compute((one tower, *its rows))` for each of the two, compiled once.

    Args:
        params: whole towers, or adapters on one base, stacked on axis 0. rows: stacked so too.
    """
    if not isinstance(params, Adapted):
        return jax.lax.map(compute, (params, *rows))
    base = params.base

    def of_adapters(tower: tuple) -> Any:
        adapters, key, *own = tower
        return compute((Adapted(base, adapters, key), *own))

    return jax.lax.map(of_adapters, (params.adapters, params.dropout_key, *rows))


def _tower_rows(trajectory: Trajectory) -> tuple[jax.Array, jax.Array]:
    """States and chosen chunks as rows of one width: tokens `[2, B·T, L]`, lengths `[2, B·T]`."""
    states, chunks = trajectory.state_tokens, trajectory.chunk_tokens
    width = max(states.shape[-1], chunks.shape[-1])

    def rows(tokens: jax.Array) -> jax.Array:
        tokens = tokens.reshape(-1, tokens.shape[-1])
        return jnp.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))

    lengths = (trajectory.state_lengths.reshape(-1), trajectory.chunk_lengths.reshape(-1))
    return jnp.stack([rows(states), rows(chunks)]), jnp.stack(lengths)
