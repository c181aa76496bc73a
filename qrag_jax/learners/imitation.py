"""Imitation: both towers learn from the labels which passages each state needs next.

The states of a question are the question alone, the question with supporting facts already taken
and, as an option, what the towers' own greedy search reaches (DAgger, Ross et al., arXiv
1011.0686). Q / temperature are the logits of a softmax over all passages not taken yet. The loss
depends on the towers only through embeddings, so its gradient is pulled back through them in
blocks, as that of PQN, by the same update (`learners.two_towers.make_update`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qrag_jax.algorithms.advantages import ends_of, gae
from qrag_jax.algorithms.two_towers import imitation_loss, needed_next, twin_loss
from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.environments.chunks import NOT_TAKEN
from qrag_jax.learners.config import ImitateConfig, PQNConfig
from qrag_jax.learners.two_towers import (
    Feedback,
    Towers,
    over_towers,
    pull_back_both,
    tower_rows,
    with_dropout,
)
from qrag_jax.learners.update import Sums
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.ragged import TokenCount, TokenRows, embed_rows, first_of_its_kind
from qrag_jax.models.compute.rope import rotate
from qrag_jax.models.heads.embedding import Params
from qrag_jax.policies import soft_q
from qrag_jax.rollouts.chunks import CHUNK, Actor, Draws, positions_of, rollout
from qrag_jax.rollouts.experience import Played


class States(NamedTuple):
    """What a batch learns in; S states of each question. The first T follow the facts' own path."""

    taken: jax.Array  # `[B, S, T]`, passages in the order taken, `NOT_TAKEN` for steps to come
    # `[B, S]`, whether the state is learned in. No state of a question is there twice.
    valid: jax.Array
    available: jax.Array  # `[B, S, C]`, passages that may be taken
    needed: jax.Array  # `[B, S, C]`, those that should be; of a state that needs none, STOP


@dataclasses.dataclass(frozen=True)
class ImitationGradient:
    """The gradient of the SUMMED loss of a batch, with the sums to divide by."""

    actor: Actor
    config: ImitateConfig  # of the stage
    pqn: PQNConfig  # γ of the returns, and the usual temperature
    feedback: Feedback  # gives the rewards on the facts' own path

    def __call__(
        self, towers: Towers, batch: EpisodeBatch, draws: Draws, dropout_key: jax.Array | None
    ) -> tuple[Params, Sums]:
        """The gradient of the online towers (or of their adapters), and sums over states.

        Args:
            draws: its keys order facts whose order is not known.
        """
        actor, encoder, blocks = self.actor, self.actor.encoder, self.actor.block_shapes.gradients
        batch = actor.playable(batch)
        params = with_dropout(towers.online, dropout_key)
        states = self.states(params, batch, draws)
        where = positions_of(actor.config, batch, draws.keys)
        # Nothing is taken in a first state: it has all passages that the loss is over.
        batch = batch._replace(chunk_mask=states.available[:, 0])
        tokens, lengths = jax.vmap(partial(actor.state_rows, batch), 1, 1)(states.taken)
        rows = tower_rows(
            TokenRows(tokens, jnp.where(states.valid, lengths, 0)), actor.chunk_rows(batch)
        )

        def embed(tower: tuple) -> tuple[jax.Array, TokenCount]:
            one, rows = tower
            alone = encoder.alone(one)
            return embed_rows(encoder, blocks, alone, rows)

        (of_states, of_chunks), used = over_towers(embed, params, (rows,))
        count, chunks = states.valid.size, batch.chunk_mask.size
        embedded = (
            of_states[:count].reshape(*states.valid.shape, -1),
            of_chunks[:chunks].reshape(*batch.chunk_mask.shape, -1),
        )
        learn = partial(self._loss, batch=batch, where=where, states=states, rows=rows)
        (total, by_state), cotangents = jax.value_and_grad(learn, (0, 1), has_aux=True)(*embedded)
        gradient, again = pull_back_both(actor, params, rows, cotangents)
        number = states.valid.sum().astype(jnp.float32)
        means = {name: (each, number) for name, each in ({"loss": total} | by_state).items()}
        return gradient, Sums(total, TokenCount.total([used, again]), means, {})

    def states(self, params: Params | Adapted, batch: EpisodeBatch, draws: Draws) -> States:
        """The states of a batch: of two orders of the facts, and of the own search if asked for.

        Facts of equal rank come in a random order and in its reverse, which for two facts are all
        orders there are. Where the order is known the second one is the first, and drops out.
        """
        steps, stop = self.actor.config.max_steps, self.actor.config.stop_action
        support = batch.support
        facts = support.sum(axis=1)
        noise = _noise(draws, 2**31 - 2, support)
        place, column = jnp.arange(steps)[None], jnp.arange(support.shape[1])[None, None]
        paths = []
        for tie in (noise, 1 - noise):
            # The noise orders facts of equal rank alone.
            order = jnp.lexsort((tie, batch.rank, ~support), axis=1)[:, :steps]
            order = jnp.pad(order, ((0, 0), (0, steps - order.shape[1])))
            order = jnp.where(place < facts[:, None], order, NOT_TAKEN)
            paths.append((order, place <= facts[:, None]))
        if self.config.own_states:
            own = rollout(self.actor, (params,), batch, Draws.greedy())
            paths.append((own.actions, own.valid))
        # State t of a path has the first t of its passages. All paths have the start in common.
        before = jnp.tri(steps, k=-1, dtype=bool)[None]
        of_paths = [(jnp.where(before, path[:, None], NOT_TAKEN), valid) for path, valid in paths]
        parts = [of_paths[0], *((taken[:, 1:], valid[:, 1:]) for taken, valid in of_paths[1:])]
        taken, valid = (jnp.concatenate(leaves, axis=1) for leaves in zip(*parts, strict=True))
        was_taken = (taken[..., None] == column[None]).any(axis=2)
        available = self._shown(batch, draws)[:, None] & ~was_taken
        needed = needed_next(batch.rank[:, None], available)
        if stop:
            known = (facts > 0)[:, None, None] & ~needed.any(axis=-1, keepdims=True)
            needed |= known & (column == support.shape[1] - 1)
        valid &= needed.any(axis=-1)
        same = jnp.sort(taken, axis=-1) if self.actor.config.sort_by_index else taken
        twice = (same[:, :, None] == same[:, None]).all(axis=-1) & valid[:, None]
        twice &= jnp.tri(taken.shape[1], k=-1, dtype=bool)[None]
        return States(taken, valid & ~twice.any(axis=-1), available, needed)

    def _shown(self, batch: EpisodeBatch, draws: Draws) -> jax.Array:
        """`[B, C]`, the facts, STOP and the distractors of each question that the loss is over."""
        wrong = batch.chunk_mask & ~batch.support
        if self.actor.config.stop_action:
            wrong = wrong.at[:, -1].set(False)
        noise = jnp.where(wrong, _noise(draws, 2**31 - 3, wrong), 2.0)
        place = jnp.argsort(jnp.argsort(noise, axis=1), axis=1)
        most = self.config.distractors or wrong.shape[1]
        return batch.chunk_mask & (~wrong | (place < most))

    def _loss(
        self,
        of_states: jax.Array,
        of_chunks: jax.Array,
        *,
        batch: EpisodeBatch,
        where: Callable[[jax.Array], jax.Array],
        states: States,
        rows: TokenRows,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The summed loss of embeddings `[B, S, D]` and `[B, C, D]`, and sums over states."""
        config, last = self.config, self.actor.config.last_position(batch.chunk_mask.shape[1])

        def scores(state: tuple[jax.Array, jax.Array]) -> jax.Array:
            embedding, taken = state
            return soft_q.twin_q(embedding, rotate(of_chunks, where(taken), last))

        # One state of each question at a time: chunks are rotated again for each.
        by_state = jnp.moveaxis(of_states, 1, 0), jnp.moveaxis(states.taken, 1, 0)
        twin = jnp.moveaxis(jax.lax.map(scores, by_state), 0, 1)  # [B, S, C, 2]
        q = twin.sum(-1)
        logits, needed, available = q, states.needed, states.available
        if config.shared_by > 1:
            others, known = self._of_others(of_states, of_chunks, batch, rows)
            shape = (*logits.shape[:2], known.shape[-1])
            logits = jnp.concatenate([logits, others], axis=-1)
            available = jnp.concatenate(
                [available, jnp.broadcast_to(known[:, None], shape)], axis=-1
            )
            needed = jnp.concatenate([needed, jnp.zeros(shape, bool)], axis=-1)
        logits = logits / (config.temperature or self.pqn.alpha)
        total = imitation_loss(logits, needed, available, states.valid)
        if config.returns:
            total += config.returns * self._of_returns(twin, batch, states)
        best = jnp.where(states.available, q, soft_q.MASKED)
        hit = jnp.take_along_axis(states.needed, best.argmax(-1)[..., None], -1)[..., 0]
        mean = jnp.where(states.valid, best.max(-1), 0.0).sum()
        right = (hit & states.valid).sum().astype(jnp.float32)
        return total, {"accuracy": right, "mean_q": mean}

    def _of_others(
        self, of_states: jax.Array, of_chunks: jax.Array, batch: EpisodeBatch, rows: TokenRows
    ) -> tuple[jax.Array, jax.Array]:
        """Q of the other questions' passages, and which of them a question does not have itself.

        `[B, S, G·C]` and `[B, G·C]` bool, for groups of G questions in a row: a batch in parts has
        the same groups.
        """
        questions, group = len(of_chunks), self.config.shared_by
        shared = of_chunks.reshape(questions // group, -1, of_chunks.shape[-1])
        shared = jnp.repeat(shared, group, axis=0)
        of_chunk_rows = TokenRows(*(leaf[CHUNK] for leaf in rows))
        text = first_of_its_kind(*of_chunk_rows)[: batch.chunk_mask.size]
        text = text.reshape(batch.chunk_mask.shape)
        present = batch.chunk_mask
        if self.actor.config.stop_action:
            present = present.at[:, -1].set(False)
        texts, there = (
            jnp.repeat(leaf.reshape(questions // group, -1), group, axis=0)
            for leaf in (text, present)
        )
        own = (texts[:, :, None] == text[:, None]).any(axis=-1)
        return soft_q.twin_q(of_states, shared[:, None]).sum(-1), there & ~own

    def _of_returns(self, twin: jax.Array, batch: EpisodeBatch, states: States) -> jax.Array:
        """PQN's loss on the facts' own path, whose returns are known; twin `[B, S, C, 2]`."""
        steps = self.actor.config.max_steps
        valid, taken = states.valid[:, :steps], states.taken[:, :steps]
        # The action at t is what the state at t + 1 has in place t; the last fact, or STOP.
        following = jnp.pad(taken[:, 1:], ((0, 0), (0, 1), (0, 0)), constant_values=NOT_TAKEN)
        action = jnp.diagonal(following, axis1=1, axis2=2)
        alone = states.needed[:, :steps].argmax(axis=-1)
        action = jnp.where(action == NOT_TAKEN, alone, action)
        path = Played(action, valid, jnp.zeros(valid.shape))
        rewards = jnp.where(valid, self.feedback(batch, path), 0.0)
        discounts = self.pqn.gamma, 1.0
        _, goal = gae(rewards, jnp.zeros_like(rewards), valid, ends_of(valid), discounts)
        chosen = jnp.take_along_axis(twin[:, :steps], action[..., None, None], 2)[:, :, 0]
        return twin_loss(chosen, goal, valid)


def _noise(draws: Draws, time: int, like: jax.Array) -> jax.Array:
    """Uniform float32 `[B, C]` of each question, by a time at which no action is drawn."""
    assert draws.keys is not None
    keys = jax.vmap(jax.random.fold_in, (0, None))(draws.keys, time)
    return jax.vmap(lambda key: jax.random.uniform(key, like.shape[1:]))(keys)
