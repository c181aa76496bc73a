"""Targets, gradients and sums of an update against plain formulas and a naive whole loss."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qrag_jax.environments.chunks import with_stop
from qrag_jax.learners.pqn import FusedGradient, Towers
from qrag_jax.models.compute.rope import angles
from qrag_jax.rollouts.chunks import CHUNK, STATE, Actor, Draws, Trajectory
from tests import reference
from tests.rollouts.play_setup import (
    ACTOR,
    ALPHA,
    CONFIG,
    ENCODER,
    EPISODES,
    ONE_BUCKET_ACTOR,
    PLAN,
    PQN,
    WIDTH,
    episodes,
    feedback,
    jitted_gradient,
    jitted_rollout,
    online,
    target,
    unique_tokens,
)

BATCH = episodes()
DRAWS = Draws(jax.random.split(jax.random.key(7), EPISODES), ALPHA)


@pytest.fixture(scope="module")
def trajectory() -> Trajectory:
    played = jitted_rollout(ACTOR, (online(), target()), BATCH, DRAWS)
    return jax.tree.map(np.asarray, played)


@pytest.fixture(scope="module")
def found() -> tuple:
    gradient = FusedGradient(ONE_BUCKET_ACTOR, PQN, feedback)
    return jitted_gradient(gradient, Towers(online(), target()), BATCH, DRAWS)


def targets_by_loop(trajectory: Trajectory, rewards: np.ndarray) -> np.ndarray:
    """λ-returns of each episode's own steps, nothing bootstrapped after its end."""
    result = np.zeros(rewards.shape)
    for b in range(len(rewards)):
        steps = int(trajectory.valid[b].sum())
        if steps:
            assert trajectory.done[b, steps - 1]
            discounts = np.array([PQN.gamma] * (steps - 1) + [0.0])
            next_values = np.array([*trajectory.values[b, 1:steps], 123.0])
            result[b, :steps] = reference.lambda_returns(
                rewards[b, :steps], discounts, next_values, PQN.lambda_
            )
    return result


@pytest.fixture(scope="module")
def rewards(trajectory) -> np.ndarray:
    return np.asarray(feedback(BATCH, trajectory))


def test_targets(trajectory, rewards) -> None:
    result = np.asarray(PQN.targets(trajectory, rewards))
    assert rewards[trajectory.valid].any()
    expected = targets_by_loop(trajectory, rewards)
    np.testing.assert_allclose(result[trajectory.valid], expected[trajectory.valid], atol=1e-5)


def test_gradient_is_that_of_the_whole_loss(trajectory, rewards, found) -> None:
    steps = list(zip(*np.nonzero(trajectory.valid)))
    states, chunks = [], []
    for b, t in steps:
        taken = trajectory.actions[b].tolist()
        states.append(reference.state_row(BATCH, b, taken[:t], CONFIG))
        chunks.append(reference.chunk_row(BATCH, b, taken[t], CONFIG))
    rows = reference.padded(states, WIDTH), reference.padded(chunks, WIDTH)
    goals = np.array([targets_by_loop(trajectory, rewards)[place] for place in steps], np.float32)

    def whole_loss(params):
        s = ENCODER.embed(jax.tree.map(lambda p: p[STATE], params), *rows[0])
        a = ENCODER.embed(jax.tree.map(lambda p: p[CHUNK], params), *rows[1])
        half = ENCODER.width // 2
        q1 = (s[:, :half] * a[:, :half]).sum(-1)
        q2 = (s[:, half:] * a[:, half:]).sum(-1)
        return 0.5 * ((2 * q1 - goals) ** 2).sum() + 0.5 * ((2 * q2 - goals) ** 2).sum()

    expected_loss, expected = jax.jit(jax.value_and_grad(whole_loss))(online())
    gradient, sums = found
    assert float(sums.loss) == pytest.approx(float(expected_loss), rel=1e-5)
    assert jax.tree.structure(gradient) == jax.tree.structure(expected)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    assert largest > 1e-2
    for leaf, naive in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, naive, rtol=1e-5, atol=2e-6 * largest)
    difference = jax.tree.map(jnp.subtract, gradient, expected)
    assert float(optax.tree.norm(difference)) < 1e-5 * float(optax.tree.norm(expected))


def test_gradient_reaches_through_the_rotation() -> None:
    """With positions and STOP: the gradient against that of the loss over rotated chunks."""
    config = dataclasses.replace(CONFIG, positions="relative", stop_action=True)
    actor, batch = Actor(ENCODER, PLAN, config), with_stop(BATCH)

    played = jitted_rollout(actor, (online(), target()), batch, DRAWS)
    played = jax.tree.map(np.asarray, played)
    assert (played.actions[played.valid] == BATCH.chunk_mask.shape[1]).any()
    assert played.positions.any()
    goals = np.asarray(PQN.targets(played, feedback(batch, played)))
    width = max(played.state_tokens.shape[-1], played.chunk_tokens.shape[-1])

    def rows(name):
        tokens = getattr(played, f"{name}_tokens").reshape(EPISODES * CONFIG.max_steps, -1)
        padding = ((0, 0), (0, width - tokens.shape[1]))
        return np.pad(tokens, padding), getattr(played, f"{name}_lengths").reshape(-1)

    cos, sin = angles(played.positions.reshape(-1), ENCODER.width, 200)

    def whole_loss(params):
        s = ENCODER.embed(jax.tree.map(lambda p: p[STATE], params), *rows("state"))
        a = ENCODER.embed(jax.tree.map(lambda p: p[CHUNK], params), *rows("chunk"))
        total = 0.0
        for s_half, a_half in zip(jnp.split(s, 2, 1), jnp.split(a, 2, 1), strict=True):
            even, odd = a_half[:, 0::2], a_half[:, 1::2]
            q = (s_half[:, 0::2] * (even * cos - odd * sin)).sum(-1)
            q += (s_half[:, 1::2] * (even * sin + odd * cos)).sum(-1)
            total += (0.5 * (2 * q - goals.reshape(-1)) ** 2 * played.valid.reshape(-1)).sum()
        return total

    expected_loss, expected = jax.jit(jax.value_and_grad(whole_loss))(online())
    gradient_of = FusedGradient(actor, PQN, feedback)
    gradient, sums = jitted_gradient(gradient_of, Towers(online(), target()), BATCH, DRAWS)
    assert float(sums.loss) == pytest.approx(float(expected_loss), rel=1e-5)
    difference = jax.tree.map(jnp.subtract, gradient, expected)
    assert float(optax.tree.norm(difference)) < 2e-5 * float(optax.tree.norm(expected))


def test_sums(trajectory, rewards, found) -> None:
    sums = found[1]
    valid = trajectory.valid
    goals = targets_by_loop(trajectory, rewards)[valid]
    taken = [set(trajectory.actions[b][valid[b]].tolist()) for b in range(EPISODES)]
    facts = [set(np.flatnonzero(BATCH.support[b])) for b in range(EPISODES)]
    solved = sum(bool(f) and f <= t for f, t in zip(facts, taken))
    assert 0 < solved < BATCH.chunk_mask.any(1).sum()
    expected = {
        "transitions": valid.sum(),
        "episodes": BATCH.chunk_mask.any(1).sum(),
        "q": trajectory.q[valid].sum(),
        "target": goals.sum(),
        "td_error": np.abs(trajectory.q[valid] - goals).sum(),
        "entropy": trajectory.entropy[valid].sum(),
        "reward": rewards.sum(),
        "solved": solved,
    }
    for name, value in expected.items():
        assert float(getattr(sums, name)) == pytest.approx(float(value), rel=1e-4), name
    rows = unique_tokens(trajectory.state_tokens, trajectory.state_lengths)
    rows += unique_tokens(trajectory.chunk_tokens, trajectory.chunk_lengths)
    assert float(sums.real_tokens) == float(trajectory.tokens.real) + rows
    assert float(sums.computed_tokens) > float(sums.real_tokens)
