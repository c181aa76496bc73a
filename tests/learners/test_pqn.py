"""Targets, loss, gradients and update against plain formulas and a naive whole loss."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qrag_jax.environments.chunks import with_stop
from qrag_jax.learners import pqn
from qrag_jax.learners.optimizers import OptimizerConfig, make_optimizer
from qrag_jax.models.compute.rope import angles
from qrag_jax.rollouts.chunks import CHUNK, STATE, Trajectory
from tests import reference
from tests.rollouts.play_setup import (
    ALPHA,
    CONFIG,
    ENCODER,
    EPISODES,
    ONE_BUCKET,
    PLAN,
    PQN,
    WIDTH,
    episodes,
    feedback,
    jitted_gradient_sums,
    jitted_rollout,
    online,
    target,
    unique_tokens,
)

BATCH = episodes()
CONSTANT = OptimizerConfig(
    learning_rate=1e-2,
    weight_decay=1e-4,
    beta1=0.9,
    beta2=0.999,
    eps=1e-6,
    clip_norm=0.1,
    schedule="constant",
    final_ratio=1.0,
    warmup_steps=0,
    total_steps=10,
)
KEYS = jax.random.split(jax.random.key(7), EPISODES)


@pytest.fixture(scope="module")
def trajectory() -> Trajectory:
    played = jitted_rollout(ENCODER, PLAN, CONFIG, (online(), target()), BATCH, KEYS, ALPHA, False)
    return jax.tree.map(np.asarray, played)


@pytest.fixture(scope="module")
def found() -> tuple:
    settings = ENCODER, ONE_BUCKET, CONFIG, PQN, feedback
    return jitted_gradient_sums(*settings, online(), target(), BATCH, KEYS, ALPHA, False)


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
    result = np.asarray(pqn.targets(trajectory, rewards, PQN))
    assert rewards[trajectory.valid].any()
    expected = targets_by_loop(trajectory, rewards)
    np.testing.assert_allclose(result[trajectory.valid], expected[trajectory.valid], atol=1e-5)


def test_targets_by_hand() -> None:
    # Three steps; two steps and the end; a row that fills up a batch.
    done = np.array([[0, 0, 1], [0, 1, 1], [1, 1, 1]], bool)
    values = np.array([[9.0, 2.0, 4.0], [9.0, 3.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    rewards = np.array([[0.0, 0.0, 1.0], [0.5, 1.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    blank = [None] * len(Trajectory._fields)
    trajectory = Trajectory(*blank)._replace(done=done, values=values)
    middle = 0.9 * (0.4 * 4 + 0.6 * 1)
    first = 0.9 * (0.4 * 2 + 0.6 * middle)
    expected = [[first, middle, 1], [0.5 + 0.9 * (0.4 * 3 + 0.6 * 1), 1, 0], [0, 0, 0]]
    np.testing.assert_allclose(pqn.targets(trajectory, rewards, PQN), expected, rtol=1e-6)


def test_loss() -> None:
    rng = np.random.default_rng(0)
    state, chunk = rng.standard_normal((2, 4, 3, 6)).astype(np.float32)
    goal = rng.standard_normal((4, 3)).astype(np.float32)
    valid = rng.random((4, 3)) < 0.7
    total, count = pqn.loss(state, chunk, goal, valid)
    expected = 0.0
    for place in zip(*np.nonzero(valid)):
        q1 = float(state[place][:3] @ chunk[place][:3])
        q2 = float(state[place][3:] @ chunk[place][3:])
        expected += 0.5 * (2 * q1 - goal[place]) ** 2 + 0.5 * (2 * q2 - goal[place]) ** 2
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert float(count) == valid.sum()


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
    batch = with_stop(BATCH)

    played = jitted_rollout(ENCODER, PLAN, config, (online(), target()), batch, KEYS, ALPHA, False)
    played = jax.tree.map(np.asarray, played)
    assert (played.actions[played.valid] == BATCH.chunk_mask.shape[1]).any()
    assert played.positions.any()
    goals = np.asarray(pqn.targets(played, feedback(batch, played), PQN))
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
    gradient, sums = jitted_gradient_sums(
        ENCODER, PLAN, config, PQN, feedback, online(), target(), BATCH, KEYS, ALPHA, False
    )
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


def test_apply_update_is_one_step_on_the_mean_and_moves_the_targets(found) -> None:
    gradient, sums = found
    optimizer = make_optimizer(CONSTANT)
    state = pqn.init_state(online(), optimizer, jax.random.key(0))
    state = state._replace(target_params=target(), env_steps=jnp.int32(5))
    update = jax.jit(pqn.apply_update, static_argnums=(3, 4))
    new, norm, finite = update(state, gradient, sums, optimizer, 0.1)

    assert bool(finite)
    mean = jax.tree.map(lambda g: np.asarray(g) / float(sums.transitions), gradient)
    length = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in jax.tree.leaves(mean)))
    assert float(norm) == pytest.approx(length, rel=1e-5)
    assert length > 0.1  # the norm is that before clipping
    by_hand = jax.jit(optimizer.update)(mean, optimizer.init(online()), online())
    expected = optax.apply_updates(online(), by_hand[0])
    slow = jax.tree.map(lambda t, p: 0.9 * t + 0.1 * np.asarray(p), target(), expected)
    for tree, plain in ((new.params, expected), (new.target_params, slow)):
        for leaf, value in zip(jax.tree.leaves(tree), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(leaf, value, atol=2e-6)
    assert int(new.step) == 1
    assert int(new.env_steps) == 5 + int(sums.transitions)
    assert new.key == state.key
    counts = [int(count) for _, count in optax.tree.get_all_with_path(new.opt_state, "count")]
    assert counts == [1, 1]  # of the moments and of the schedule


@pytest.mark.parametrize("where", ["loss", "gradient", "norm"])
def test_an_update_without_finite_numbers_changes_nothing_but_the_time(found, where: str) -> None:
    gradient, sums = found
    optimizer, update = make_optimizer(CONSTANT), jax.jit(pqn.apply_update, static_argnums=(3, 4))
    state = pqn.init_state(online(), optimizer, jax.random.key(0))
    state = state._replace(target_params=target(), env_steps=jnp.int32(5))
    state, _, finite = update(state, gradient, sums, optimizer, 0.1)
    assert bool(finite)
    leaves, tree = jax.tree.flatten(gradient)
    if where == "loss":
        sums = sums._replace(loss=jnp.float32(np.inf))
    elif where == "gradient":
        leaves[3] = leaves[3].at[(0,) * leaves[3].ndim].set(np.nan)
    else:  # every number is finite, the sum of their squares is not
        leaves[3] = jnp.full_like(leaves[3], 1e30)
    new, _, finite = update(state, jax.tree.unflatten(tree, leaves), sums, optimizer, 0.1)
    assert not bool(finite)
    for one, two in (
        (new.params, state.params),
        (new.target_params, state.target_params),
        (optax.tree.get(new.opt_state, "mu"), optax.tree.get(state.opt_state, "mu")),
        (optax.tree.get(new.opt_state, "nu"), optax.tree.get(state.opt_state, "nu")),
    ):
        for leaf, value in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
            assert np.asarray(leaf).tobytes() == np.asarray(value).tobytes()
    counts = [int(count) for _, count in optax.tree.get_all_with_path(new.opt_state, "count")]
    assert counts == [1, 2]  # of the moments, which stay, and of the schedule, which goes on
    assert int(new.step) == 2
    assert int(new.env_steps) == 5 + 2 * int(sums.transitions)


def test_an_element_whose_update_overflows_keeps_its_value() -> None:
    optimizer = make_optimizer(dataclasses.replace(CONSTANT, learning_rate=1e38, eps=1e-12))
    state = pqn.init_state({"w": jnp.array([-3e38, 1.0])}, optimizer, jax.random.key(0))
    one = pqn.Sums(*[jnp.float32(1)] * len(pqn.Sums._fields))
    for _ in range(9):
        state, _, finite = pqn.apply_update(state, {"w": jnp.ones(2)}, one, optimizer, 0.5)
        assert bool(finite)
    for leaf in jax.tree.leaves((state.params, state.target_params, state.opt_state)):
        assert np.isfinite(leaf).all()
    assert float(state.params["w"][0]) == np.float32(-3e38)


def test_a_batch_without_a_transition_is_no_division_by_zero() -> None:
    optimizer = optax.sgd(1.0)
    state = pqn.init_state({"w": jnp.arange(3.0)}, optimizer, jax.random.key(0))
    nothing = pqn.Sums(*[jnp.float32(0)] * len(pqn.Sums._fields))
    new, norm, _ = pqn.apply_update(state, {"w": jnp.zeros(3)}, nothing, optimizer, 0.5)
    assert float(norm) == 0.0
    np.testing.assert_array_equal(new.params["w"], [0, 1, 2])
    np.testing.assert_array_equal(new.target_params["w"], [0, 1, 2])
    assert int(new.env_steps) == 0


def test_init_state_copies_the_target_towers() -> None:
    params = jax.tree.map(jnp.asarray, online())
    state = pqn.init_state(params, optax.sgd(1.0), jax.random.key(3))
    for one, two in zip(jax.tree.leaves(state.params), jax.tree.leaves(state.target_params)):
        np.testing.assert_array_equal(one, two)
        assert one.unsafe_buffer_pointer() != two.unsafe_buffer_pointer()
    assert (int(state.step), int(state.env_steps)) == (0, 0)
    assert state.step.dtype == state.env_steps.dtype == jnp.int32


def test_alpha_follows_the_learning_rate() -> None:
    assert float(pqn.alpha_at(0.05, jnp.float32(2e-3), 2e-3)) == pytest.approx(0.05)
    assert float(pqn.alpha_at(0.05, jnp.float32(5e-4), 2e-3)) == pytest.approx(0.0125)
    assert float(pqn.alpha_at(0.05, jnp.float32(0.0), 2e-3)) == pytest.approx(5e-8)
