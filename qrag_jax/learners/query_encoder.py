"""A query encoder over the mesh: the gradients of its losses, log-probabilities, and values.

The loss depends on the encoder only through the embeddings of states, and that of a state on its
own pool and draw alone. So a state is embedded once: its cotangent is known in the block in which
it is computed (`models.compute.ragged.embed_and_pull_back`). Blocks bound the memory, whatever the
batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from qrag_jax.algorithms.policy_gradient import (
    Departure,
    clipped,
    clipped_value_loss,
    departure,
    kl_k3,
    weighted_sum,
)
from qrag_jax.learners.policy_config import GRPOConfig, PPOConfig
from qrag_jax.learners.policy_state import Critic, PolicyState
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.precision import EXACT
from qrag_jax.models.compute.ragged import (
    CotangentsOf,
    TokenCount,
    TokenRows,
    embed_and_pull_back,
    embed_rows,
)
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.policies import plackett_luce
from qrag_jax.runtime.sharding import BATCH_AXES, specs_of, sum_over_data


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryEncoder:
    """A query encoder, or adapters on a frozen base, and how it learns.

    Attributes:
        shardings: where the training state lives (`policy_state.state_shardings`).
        encoder: maps rows of tokens to embeddings.
        blocks: how rows are packed.
        config: GRPO or PPO.
        tau: τ, the policy's temperature.
        weights: of the episode's rewards `[E]` and of a search's rewards `[H]`.
        optimizer, critic_optimizer: of the policy and of PPO's critic.
        schedule: optimizer step → learning rate.
        base_shardings: where the frozen base of adapters lives; None if whole towers are trained.
        is_fresh: the weights that acted are those that learn, so that a batch's first ratio is
            exactly 1.
    """

    mesh: Mesh
    shardings: PolicyState
    encoder: TextEncoder
    blocks: Blocks
    config: GRPOConfig | PPOConfig
    tau: float
    weights: tuple[tuple[float, ...], tuple[float, ...]]
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    critic_optimizer: optax.GradientTransformation | None = None
    base_shardings: Params | None = None
    is_fresh: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoder", self.encoder.on(self.mesh))

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps that one batch gives."""
        return self.config.epochs * self.config.minibatches


class Searches(NamedTuple):
    """What is learned from each search; `[N, T, …]`, or of rows `[R, …]`.

    Attributes:
        pool, present, actions: as in `HopBatch`.
        old: log-probabilities by the weights that acted.
        reference: by the first weights; zeros if nothing needs them.
        advantages: A.
        weight: of the search's loss in the sum; 0: it is not learned from.
        value, returns: PPO's: the value before the update, and what it is regressed on.
    """

    pool: jax.Array
    present: jax.Array
    actions: jax.Array
    old: jax.Array
    reference: jax.Array
    advantages: jax.Array
    weight: jax.Array
    value: jax.Array
    returns: jax.Array


class Sums(NamedTuple):
    """Totals over searches."""

    loss: jax.Array
    value_loss: jax.Array
    entropy: jax.Array
    gap: jax.Array  # |log π − log π_old| as stored
    departure: Departure
    tokens: TokenCount


class Passes:
    """Forward and backward passes over the mesh."""

    def __init__(self, learner: QueryEncoder) -> None:
        self.learner = learner
        self._specs = specs_of(learner.shardings)
        self._base_specs = specs_of(learner.base_shardings)

    def gradients(
        self, state: PolicyState, base: Params | None, rows: TokenRows, searches: Searches
    ) -> tuple[tuple[Params, Critic | None], Sums]:
        """The gradients of the summed losses, and the sums."""
        specs = self._specs

        def on_device(params: Params, critic: Critic | None, base, rows, searches):
            rows, searches = _flat(rows), jax.tree.map(_flattened, searches)
            of_policy, sums = self._policy(params, base, rows, searches)
            of_policy = sum_over_data(of_policy, specs.params)
            of_critic = None
            if critic is not None:
                tower, head, sums = self._critic(critic, base, rows, searches, sums)
                tower = sum_over_data(tower, specs.critic.tower)
                of_critic = Critic(tower, *jax.lax.psum(head, BATCH_AXES))
            largest = jax.lax.pmax(sums.departure.largest, BATCH_AXES)
            sums = jax.lax.psum(sums, BATCH_AXES)
            sums = sums._replace(departure=sums.departure._replace(largest=largest))
            return (of_policy, of_critic), sums

        out = (specs.params, specs.critic), PartitionSpec()
        return self._mapped(on_device, (specs.params, specs.critic), out)(
            state.params, state.critic, base, rows, searches
        )

    def log_probs(
        self, params: Params, base: Params | None, rows: TokenRows, searches: Searches
    ) -> jax.Array:
        """Log-probabilities `[N, T]` by these parameters."""

        def on_device(params: Params, base, rows, searches):
            embedded = self._embedded(params, base, _flat(rows))
            found = self._log_prob(embedded, jax.tree.map(_flattened, searches))
            return found.reshape(rows.lengths.shape)

        by_episode = PartitionSpec(BATCH_AXES)
        return self._mapped(on_device, (self._specs.params,), by_episode)(
            params, base, rows, searches
        )

    def values(self, state: PolicyState, base: Params | None, rows: TokenRows) -> jax.Array:
        """The critic's values `[N, T]`; 0 where there was no search."""

        def on_device(critic: Critic, base, rows, _):
            embedded = self._embedded(critic.tower, base, _flat(rows))
            values = _valued(embedded, critic).reshape(rows.lengths.shape)
            return jnp.where(rows.lengths > 0, values, 0.0)

        by_episode = PartitionSpec(BATCH_AXES)
        return self._mapped(on_device, (self._specs.critic,), by_episode)(
            state.critic, base, rows, rows.lengths
        )

    def _mapped(self, on_device: Callable[..., Any], own: tuple[Any, ...], out: Any) -> Any:
        """Over the mesh: parameters by their own specs, then the base, rows and their values."""
        by_episode = PartitionSpec(BATCH_AXES)
        return jax.shard_map(
            on_device,
            mesh=self.learner.mesh,
            in_specs=(*own, self._base_specs, by_episode, by_episode),
            out_specs=out,
            check_vma=False,
        )

    def _embedded(self, params: Params, base: Params | None, rows: TokenRows) -> jax.Array:
        encoder = self.learner.encoder
        one = encoder.alone(params if base is None else Adapted(base, params))
        return embed_rows(encoder, self.learner.blocks, one, rows)[0]

    def _pulled_back(
        self, params: Params, base: Params | None, rows: TokenRows, cotangents: CotangentsOf
    ) -> tuple[Params, jax.Array, TokenCount]:
        learner = self.learner
        whole = params if base is None else Adapted(base, params)
        return embed_and_pull_back(learner.encoder, learner.blocks, whole, rows, cotangents)

    def _policy(
        self, params: Params, base: Params | None, rows: TokenRows, searches: Searches
    ) -> tuple[Params, Sums]:
        def total(embedded: jax.Array, searches: Searches) -> jax.Array:
            return weighted_sum(self._losses(embedded, searches), searches.weight)

        gradient, embedded, tokens = self._pulled_back(
            params, base, rows, CotangentsOf(jax.grad(total), searches)
        )
        valid = searches.weight > 0
        logits = self._logits(embedded, searches)
        log_prob = plackett_luce.log_prob(logits, searches.actions)
        old = jax.lax.stop_gradient(log_prob) if self._fresh else searches.old
        gap = jnp.where(valid, jnp.abs(log_prob - searches.old), 0.0).sum()
        return gradient, Sums(
            loss=total(embedded, searches),
            value_loss=jnp.zeros((), jnp.float32),
            entropy=jnp.where(valid, plackett_luce.entropy(logits), 0.0).sum(),
            gap=gap,
            departure=departure(
                log_prob, old, searches.advantages, valid, self.learner.config.clip
            ),
            tokens=tokens,
        )

    def _critic(
        self,
        critic: Critic,
        base: Params | None,
        rows: TokenRows,
        searches: Searches,
        sums: Sums,
    ) -> tuple[Params, tuple[jax.Array, jax.Array], Sums]:
        config = self.learner.config
        assert isinstance(config, PPOConfig)

        def total(embedded: jax.Array, head: tuple[jax.Array, jax.Array], searches: Searches):
            values = _valued(embedded, Critic(None, *head))
            each = clipped_value_loss(values, searches.value, searches.returns, config.value_clip)
            return weighted_sum(each, searches.weight)

        head = critic.weights, critic.bias

        def cotangents(embedded: jax.Array, searches: Searches) -> jax.Array:
            return jax.grad(total)(embedded, head, searches)

        gradient, embedded, tokens = self._pulled_back(
            critic.tower, base, rows, CotangentsOf(cotangents, searches)
        )
        loss, of_head = jax.value_and_grad(total, 1)(embedded, head, searches)
        tokens = TokenCount.total([sums.tokens, tokens])
        return gradient, of_head, sums._replace(value_loss=loss, tokens=tokens)

    @property
    def _fresh(self) -> bool:
        return self.learner.is_fresh and self.learner.updates_per_batch == 1

    def _logits(self, embedded: jax.Array, searches: Searches) -> jax.Array:
        tau = self.learner.tau
        return plackett_luce.pool_logits(embedded, searches.pool, searches.present, tau)

    def _log_prob(self, embedded: jax.Array, searches: Searches) -> jax.Array:
        return plackett_luce.log_prob(self._logits(embedded, searches), searches.actions)

    def _losses(self, embedded: jax.Array, searches: Searches) -> jax.Array:
        """The loss of each search, `[R]`."""
        config, logits = self.learner.config, self._logits(embedded, searches)
        log_prob = plackett_luce.log_prob(logits, searches.actions)
        old = jax.lax.stop_gradient(log_prob) if self._fresh else searches.old
        losses = clipped(log_prob, old, searches.advantages, config.clip)
        if isinstance(config, GRPOConfig) and config.beta:
            losses += config.beta * kl_k3(log_prob, searches.reference)
        if config.entropy:
            losses -= config.entropy * plackett_luce.entropy(logits)
        return losses


def _valued(embedded: jax.Array, critic: Critic) -> jax.Array:
    return jnp.einsum("rd,d->r", embedded, critic.weights, precision=EXACT) + critic.bias


def _flat(rows: TokenRows) -> TokenRows:
    """`[N, T, L]` and `[N, T]` → `[N·T, L]` and `[N·T]`."""
    return TokenRows(rows.tokens.reshape(-1, rows.tokens.shape[-1]), rows.lengths.reshape(-1))


def _flattened(leaf: jax.Array) -> jax.Array:
    return leaf.reshape(-1, *leaf.shape[2:])
