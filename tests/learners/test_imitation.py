"""Imitation against its slow definition: states listed one by one, rows embedded side by side."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qrag_jax.data.episodes import NO_FACT, EpisodeBatch
from qrag_jax.environments.chunks import NOT_TAKEN, with_stop
from qrag_jax.learners.config import ImitateConfig
from qrag_jax.learners.two_towers import ImitationGradient, Towers
from qrag_jax.rollouts.chunks import CHUNK, STATE, Draws, RolloutConfig
from tests import reference
from tests.episodes_maker import random_episodes, towers
from tests.learners.whole_loss import embed, turned
from tests.rollouts import play_setup
from tests.rollouts.play_setup import CONFIG, EPISODES, PQN, SHAPE, jitted_gradient

DRAWS = Draws(jax.random.split(jax.random.key(7), EPISODES), play_setup.ALPHA)
IMITATE = ImitateConfig(temperature=0.3)
BATCH = random_episodes(3, play_setup.CHUNK_COUNTS, SHAPE)
ONLINE = towers(play_setup.ENCODER, 0)


class Slow(NamedTuple):
    """The states that are learned in: question, chunks taken, chunks needed next."""

    question: int
    taken: tuple[int, ...]
    needed: frozenset[int]


def in_order(batch: EpisodeBatch) -> EpisodeBatch:
    """The last fact in document order is needed first."""
    rank = np.where(batch.support, 0, NO_FACT)
    for row, support in zip(rank, batch.support, strict=True):
        places = np.flatnonzero(support)
        row[places] = np.arange(len(places))[::-1]
    return batch._replace(rank=rank.astype(np.int32))


def listed(batch: EpisodeBatch, *, stop: bool = False, own: Any = None) -> list[Slow]:
    """All states of a batch without its STOP."""
    found = []
    for b in range(EPISODES):
        facts = sorted(np.flatnonzero(batch.support[b]).tolist(), key=lambda c: batch.rank[b, c])
        known = len({batch.rank[b, c] for c in facts}) == len(facts)
        orders = [tuple(facts)] if known else [*itertools.permutations(facts)]
        taken = [order[:t] for order in orders for t in range(len(facts) + 1)]
        if own is not None:
            actions = own.actions[b].tolist()
            taken += [tuple(actions[:t]) for t in np.flatnonzero(own.valid[b])]
        for each in dict.fromkeys(taken):
            missing = [c for c in facts if c not in each]
            needed = missing[:1] if known else missing
            if not needed and stop and facts and len(each) < CONFIG.max_steps:
                needed = [SHAPE.chunks]
            if needed:
                found.append(Slow(b, each, frozenset(needed)))
    return found


def slow_loss(
    batch: EpisodeBatch, states: list[Slow], config: ImitateConfig, rules: RolloutConfig
) -> Callable[[Any], tuple[jax.Array, jax.Array]]:
    """From parameters to the summed loss, and how often the best is needed; state by state."""
    texts = {
        (b, c): reference.chunk_row(batch, b, c, rules)
        for b in range(EPISODES)
        for c in np.flatnonzero(batch.chunk_mask[b])
    }
    if rules.stop_action:
        texts |= {(b, SHAPE.chunks): reference.join([[]]) for b in range(EPISODES)}
    names = [*texts]
    rows = [reference.state_row(batch, s.question, [*s.taken], rules) for s in states]
    width = max(map(len, [*rows, *texts.values()]))
    state_rows = reference.padded(rows, width)
    chunk_rows = reference.padded([*texts.values()], width)
    seen, own, right = np.zeros((3, len(states), len(names)), bool)
    where = np.zeros(seen.shape, np.int64)
    for n, state in enumerate(states):
        b, group = state.question, state.question // config.shared_by
        count = int(batch.chunk_mask[b].sum())
        known = [texts[name] for name in names if name[0] == b]
        positions = reference.chunk_positions(rules.positions, [*state.taken], count)
        for m, (question, chunk) in enumerate(names):
            if question == b:
                own[n, m], right[n, m] = chunk not in state.taken, chunk in state.needed
                where[n, m] = positions[chunk] if chunk < count else 0  # STOP has no position
            elif question // config.shared_by == group:
                seen[n, m] = chunk < SHAPE.chunks and texts[question, chunk] not in known
    seen |= own

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        of_states, of_chunks = (
            embed(play_setup.ENCODER, jax.tree.map(lambda leaf, n=number: leaf[n], params), rows)
            for number, rows in ((STATE, state_rows), (CHUNK, chunk_rows))
        )
        chunks = turned(jnp.tile(of_chunks, (len(states), 1)), where.reshape(-1))
        products = of_states[:, None] * chunks.reshape(*seen.shape, -1)
        scores = products.sum(-1) / (config.temperature or PQN.alpha)

        def log_sum(mask: np.ndarray) -> jax.Array:
            return jax.nn.logsumexp(jnp.where(mask, scores, -jnp.inf), axis=1)

        total, each = (log_sum(seen) - log_sum(right)).sum(), np.arange(len(states))
        best = jnp.where(own, scores, -jnp.inf).argmax(axis=1)
        return total, jnp.asarray(right)[each, best].sum()

    return loss


# Settings of imitation, rules of the play, and whether the facts have an order.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "any order, own states, STOP, passages of another question": (
        {"own_states": True, "temperature": 0.0, "shared_by": 2},
        {"stop_action": True},
        False,
    ),
    "positions and STOP, in order": ({}, {"stop_action": True, "positions": "relative"}, True),
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_that_of_the_slow_definition(name: str) -> None:
    settings, changes, ordered = CASES[name]
    config = dataclasses.replace(IMITATE, **settings)
    batch = in_order(BATCH) if ordered else BATCH
    rules = dataclasses.replace(CONFIG, never_terminate=False, **changes)
    actor = dataclasses.replace(play_setup.ONE_BUCKET_ACTOR, config=rules)
    own = None
    if config.own_states:
        played = with_stop(batch) if rules.stop_action else batch
        own = play_setup.jitted_rollout(actor, (ONLINE,), played, Draws.greedy())
    states = listed(batch, stop=rules.stop_action, own=own)
    assert len(states) > EPISODES
    slow = slow_loss(batch, states, config, rules)
    (expected_loss, hits), expected = jax.jit(jax.value_and_grad(slow, has_aux=True))(ONLINE)
    learns = ImitationGradient(actor, config, PQN.alpha)
    gradient, sums = jitted_gradient(learns, Towers(ONLINE, ONLINE), batch, DRAWS)
    assert [float(each) for each in sums.means["accuracy"]] == [hits, len(states)]
    assert float(sums.loss) == pytest.approx(float(expected_loss), rel=1e-5)
    assert 0 < hits < len(states)
    largest = max(float(optax.tree.norm(leaf)) for leaf in jax.tree.leaves(expected))
    assert largest > 1e-2
    for leaf, plain in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert float(optax.tree.norm(leaf - plain)) < 2e-5 * largest


def test_orders_of_three_facts_are_drawn_by_question_and_step() -> None:
    batch = random_episodes(5, (6, 5, 6, 4), SHAPE, facts=3)
    learns = ImitationGradient(play_setup.ONE_BUCKET_ACTOR, IMITATE, PQN.alpha)
    states, seen = jax.jit(learns.states), set()
    for seed in range(20):
        draws = Draws(jax.random.split(jax.random.key(seed), 4), play_setup.ALPHA)
        found = jax.tree.map(np.asarray, states(ONLINE, batch, draws))
        for b in range(4):
            for taken in found.taken[b][found.valid[b]]:
                chunks = taken[taken != NOT_TAKEN]
                assert batch.support[b][chunks].all()
                if b == 0 and len(chunks) == 2:
                    seen.add(tuple(chunks.tolist()))
        assert found.valid.sum() == 4 * 5  # two orders and the start
    assert len(seen) == 6
    half = jax.tree.map(lambda leaf: leaf[:2], batch)
    again = learns.states(ONLINE, half, draws._replace(keys=draws.keys[:2]))
    np.testing.assert_array_equal(found.taken[:2], again.taken)


def test_drawn_distractors_are_all_that_the_loss_is_over() -> None:
    batch = with_stop(BATCH)
    actor = dataclasses.replace(
        play_setup.ONE_BUCKET_ACTOR, config=dataclasses.replace(CONFIG, stop_action=True)
    )
    learns = ImitationGradient(actor, dataclasses.replace(IMITATE, distractors=1), PQN.alpha)
    states = jax.jit(learns.states)
    shown = np.asarray(states(ONLINE, batch, DRAWS).available[:, 0])
    wrong = np.array(batch.chunk_mask & ~batch.support)
    wrong[:, -1] = False
    np.testing.assert_array_equal((shown & wrong).sum(axis=1), np.minimum(wrong.sum(axis=1), 1))
    assert (wrong.sum(axis=1) > 1).any()
    assert shown[batch.support].all()
    np.testing.assert_array_equal(shown[:, -1], batch.chunk_mask[:, -1])
    assert not shown[~batch.chunk_mask].any()
    other = states(ONLINE, batch, DRAWS._replace(keys=DRAWS.keys[::-1])).available[:, 0]
    assert (shown != other).any()

    few = BATCH._replace(chunk_mask=shown[:, :-1])  # the others are not there at all
    alone = ImitationGradient(actor, IMITATE, PQN.alpha)
    (gradient, sums), (expected, expected_sums) = (
        jitted_gradient(each, Towers(ONLINE, ONLINE), rows, DRAWS)
        for each, rows in ((learns, BATCH), (alone, few))
    )
    assert float(sums.loss) == pytest.approx(float(expected_sums.loss), rel=1e-6)
    for leaf, plain in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, plain, rtol=1e-4, atol=1e-6)
