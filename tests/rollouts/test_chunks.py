"""Whole rollouts against a Python loop that encodes one state at a time.

The rows that an update is handed, and their embeddings: tests/learners/test_pqn.py.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from qrag_jax.environments.chunks import with_stop
from qrag_jax.policies.soft_q import MASKED
from qrag_jax.rollouts.chunks import Actor, Draws, Trajectory
from tests import reference
from tests.rollouts.play_setup import (
    ACTOR,
    ALPHA,
    CONFIG,
    ENCODER,
    EPISODES,
    ONE_BUCKET,
    PLAN,
    SHAPE,
    WIDTH,
    episodes,
    jitted_rollout,
    online,
    target,
    unique_tokens,
)

BATCH = episodes()
STOPPING = dataclasses.replace(CONFIG, never_terminate=False, sort_by_index=True)
STOP_ACTION = dataclasses.replace(CONFIG, stop_action=True, positions="relative")
GREEDY = Draws(None, ALPHA)


@pytest.fixture(scope="module")
def params() -> tuple:
    return online(), target()


def keys(seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), EPISODES)


@functools.cache
def player() -> reference.Player:
    return reference.Player(ENCODER, WIDTH)


def expected_of(config, params, draws=GREEDY) -> list[reference.Episode]:
    columns, choose = SHAPE.chunks + config.stop_action, [None] * EPISODES
    if draws.keys is not None:
        choose = [reference.categorical(key, columns) for key in keys()]
    return [
        player().play(config, *params, BATCH, b, float(ALPHA), choose[b], draws.uniform)
        for b in range(EPISODES)
    ]


def check(found: Trajectory, expected: list[reference.Episode], steps: int) -> None:
    """Compares a trajectory with episodes played one at a time."""
    found = jax.tree.map(np.asarray, found)
    for b, episode in enumerate(expected):
        count = len(episode.actions)
        assert found.valid[b].tolist() == [t < count for t in range(steps)]
        assert found.actions[b, :count].tolist() == episode.actions
        for name in ("q", "values", "entropy"):
            values = getattr(found, name)[b]
            np.testing.assert_allclose(values[:count], getattr(episode, name), atol=2e-5)
            np.testing.assert_array_equal(values[count:], 0)
        np.testing.assert_array_equal(found.states.lengths[b, count:], 0)
        np.testing.assert_array_equal(found.chunks.lengths[b, count:], 0)
        chunks = 0 if episode.first_q is None else len(episode.first_q)
        if chunks:
            np.testing.assert_allclose(found.first_q[b, :chunks], episode.first_q, atol=2e-5)
        np.testing.assert_array_equal(found.first_q[b, chunks:], np.float32(MASKED))
    # What an action names is there, also where nothing happened.
    assert ((found.actions >= 0) & (found.actions < found.first_q.shape[1])).all()


def test_greedy(params) -> None:
    found = jitted_rollout(ACTOR, params, BATCH, GREEDY)
    expected = expected_of(CONFIG, params)
    assert {len(episode.actions) for episode in expected} == {0, 1, 2, 3}
    check(found, expected, CONFIG.max_steps)
    # The tokens are those of all chunks and all states of both towers, each text once.
    texts = {
        tuple(BATCH.chunks[b, c, : min(BATCH.chunk_lengths[b, c], 7)].tolist())
        for b, c in zip(*np.nonzero(BATCH.chunk_mask))
    }
    assert len(texts) < BATCH.chunk_mask.sum()  # some occur twice
    states = [
        unique_tokens(found.states.tokens[:, t], found.states.lengths[:, t])
        for t in range(CONFIG.max_steps)
    ]
    assert float(found.tokens[0]) == 2 * (sum(len(text) + 2 for text in texts) + sum(states))
    assert float(found.tokens[1]) >= float(found.tokens[0])


def test_sampled(params) -> None:
    draws = Draws(keys(), ALPHA, False)
    found = jitted_rollout(Actor(ENCODER, PLAN, STOPPING), params, BATCH, draws)
    check(found, expected_of(STOPPING, params, draws), STOPPING.max_steps)


def test_indents_are_drawn_for_each_episode(params) -> None:
    kind, far = "random_published", 50
    actor = Actor(ENCODER, ONE_BUCKET, dataclasses.replace(CONFIG, positions=kind))
    first, again, other = (
        jitted_rollout(actor, params, BATCH, Draws(keys(seed), ALPHA)) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first.positions, again.positions)
    assert not np.array_equal(first.first_q, other.first_q)
    assert int(first.positions.max()) > far * SHAPE.chunks
    # In evaluations, too; wherever a question stands in a batch.
    greedy = jitted_rollout(actor, params, BATCH, GREEDY)
    assert int(greedy.positions.max()) > far * SHAPE.chunks
    turned = jax.tree.map(lambda leaf: np.asarray(leaf)[::-1], BATCH)
    again = jitted_rollout(actor, params, turned, GREEDY)
    np.testing.assert_array_equal(np.asarray(again.positions)[::-1], greedy.positions)


def test_stop_action(params) -> None:
    batch = jax.tree.map(np.asarray, with_stop(BATCH))
    assert batch.chunk_mask[:, -1].tolist() == BATCH.chunk_mask.any(1).tolist()
    assert not batch.support[:, -1].any()
    draws = Draws(keys(), ALPHA, True)
    found = jitted_rollout(Actor(ENCODER, ONE_BUCKET, STOP_ACTION), params, batch, draws)
    expected = expected_of(STOP_ACTION, params, draws)
    assert any(SHAPE.chunks in episode.actions for episode in expected)
    for episode in expected:  # its Q comes last, where the batch has its column
        if episode.first_q is not None:
            gap = np.full(SHAPE.chunks + 1 - len(episode.first_q), MASKED)
            episode.first_q = np.concatenate([episode.first_q[:-1], gap, episode.first_q[-1:]])
    check(found, expected, STOP_ACTION.max_steps)
