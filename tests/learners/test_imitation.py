"""Imitation beside its slow definition: states listed one by one, rows embedded side by side."""

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
from qrag_jax.environments.chunks import NOT_TAKEN
from qrag_jax.learners.config import ImitateConfig
from qrag_jax.learners.imitation import ImitationGradient
from qrag_jax.learners.pqn import Towers
from qrag_jax.rollouts.chunks import CHUNK, STATE, Draws, RolloutConfig
from tests import reference
from tests.episodes_maker import random_episodes, towers
from tests.learners import updates
from tests.learners.whole_loss import embed, turned
from tests.rollouts import play_setup
from tests.rollouts.play_setup import CONFIG, EPISODES, PQN, SHAPE, feedback, jitted_gradient

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
    where = np.zeros((len(states), len(names)), np.int64)
    for n, state in enumerate(states):
        count = int(batch.chunk_mask[state.question].sum())
        positions = reference.chunk_positions(rules.positions, [*state.taken], count)
        for m, (question, chunk) in enumerate(names):
            if question == state.question and chunk < count:
                where[n, m] = positions[chunk]

    def loss(params: Any) -> jax.Array:
        of_states, of_chunks = (
            embed(play_setup.ENCODER, jax.tree.map(lambda leaf, n=number: leaf[n], params), rows)
            for number, rows in ((STATE, state_rows), (CHUNK, chunk_rows))
        )
        total, hits = jnp.float32(0), jnp.float32(0)
        for n, state in enumerate(states):
            b, group = state.question, state.question // config.shared_by
            own = [texts[b, c] for q, c in names if q == b]
            seen = [
                m
                for m, (q, c) in enumerate(names)
                if (q == b and c not in state.taken)
                or (
                    (q != b and q // config.shared_by == group and c < SHAPE.chunks)
                    and texts[q, c] not in own
                )
            ]
            rotated = turned(of_chunks, where[n])
            scores = (of_states[n][None] * rotated).sum(-1) / (config.temperature or PQN.alpha)
            right = [m for m in seen if names[m][0] == b and names[m][1] in state.needed]
            mine = np.array([m for m in seen if names[m][0] == b])
            hits += jnp.isin(jnp.asarray(mine)[scores[mine].argmax()], np.array(right))
            every = jax.nn.logsumexp(scores[np.array(seen)])
            total += every - jax.nn.logsumexp(scores[np.array(right)])
            if config.returns:  # of questions whose facts have an order
                facts = int(batch.support[b].sum())
                goal = returns(facts, stop=rules.stop_action)[len(state.taken)]
                (chunk,) = right
                halves = (of_states[n] * rotated[chunk]).reshape(2, -1).sum(-1)
                total += config.returns * 0.5 * jnp.square(2 * halves - goal).sum()
        return total, hits

    return loss


def returns(facts: int, *, stop: bool) -> list[float]:
    """Of the facts' own path, by the rewards of `play_setup.feedback`."""
    rewards = [0.25] * facts
    rewards[-1] += 0.5 + 0.5 * facts / (facts + 1e-5)
    if stop and facts < CONFIG.max_steps:
        rewards.append(0.0)
    goals = [0.0]
    for reward in reversed(rewards):
        goals.insert(0, reward + PQN.gamma * goals[0])
    return goals[:-1]


# Settings of imitation, rules of the play, and whether the facts have an order.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "any order, states of the own search": ({"own_states": True, "temperature": 0.0}, {}, False),
    "positions, STOP and returns, in order": (
        {"returns": 0.7},
        {"stop_action": True, "positions": "relative"},
        True,
    ),
    "passages of another question": ({"shared_by": 2}, {"stop_action": True}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_that_of_the_slow_definition(name: str) -> None:
    settings, rules, ordered = CASES[name]
    config = dataclasses.replace(IMITATE, **settings)
    batch = in_order(BATCH) if ordered else BATCH
    rules = dataclasses.replace(CONFIG, never_terminate=False, **rules)
    actor = dataclasses.replace(play_setup.ONE_BUCKET_ACTOR, config=rules)
    own = None
    if config.own_states:
        own = play_setup.jitted_rollout(actor, (ONLINE,), batch, Draws.greedy())
    states = listed(batch, stop=rules.stop_action, own=own)
    assert len(states) > EPISODES
    slow = slow_loss(batch, states, config, rules)
    (expected_loss, hits), expected = jax.jit(jax.value_and_grad(slow, has_aux=True))(ONLINE)
    learns = ImitationGradient(actor, config, PQN, feedback)
    gradient, sums = jitted_gradient(learns, Towers(ONLINE, ONLINE), batch, DRAWS)
    assert float(sums.transitions) == len(states)
    assert float(sums.loss) == pytest.approx(float(expected_loss), rel=1e-5)
    assert float(sums.by_transition["accuracy"]) == hits
    assert 0 < float(sums.means()["accuracy"]) < 1
    largest = max(float(optax.tree.norm(leaf)) for leaf in jax.tree.leaves(expected))
    assert largest > 1e-2
    for leaf, plain in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert float(optax.tree.norm(leaf - plain)) < 2e-5 * largest


def test_a_later_stage_begins_with_the_online_towers_as_targets() -> None:
    learning = updates.towers(updates.IMITATED)
    learning.step(updates.questions())
    state = learning.program.learner.next_stage(learning.state)
    for tree in (state.params, state.target_params):
        jax.tree.map(np.testing.assert_array_equal, tree, learning.state.params)
    assert int(state.step) == 1


def test_orders_of_three_facts_are_drawn_by_question_and_step() -> None:
    batch = random_episodes(5, (6, 5, 6, 4), SHAPE, facts=3)
    learns = ImitationGradient(play_setup.ONE_BUCKET_ACTOR, IMITATE, PQN, feedback)
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
