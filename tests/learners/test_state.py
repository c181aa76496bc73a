"""The state's update against one put together by hand, and what it leaves alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qrag_jax.learners.optimizers import OptimizerConfig, make_optimizer
from qrag_jax.learners.state import Total, apply_update, dropout_key, init_state
from tests.rollouts.play_setup import online, target

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


@pytest.fixture(scope="module")
def found() -> tuple[Any, Total]:
    """The gradient of a summed loss, large in some parameters and small in others."""
    rng = np.random.default_rng(0)

    def leaf(like: np.ndarray) -> jax.Array:
        noise = 10.0 ** rng.uniform(-3, 1) * rng.standard_normal(like.shape)
        return jnp.asarray(noise, jnp.float32)

    return jax.tree.map(leaf, online()), Total(jnp.float32(21.5), jnp.float32(14))


def test_apply_update_is_one_step_on_the_mean_and_moves_the_targets(found) -> None:
    gradient, total = found
    optimizer = make_optimizer(CONSTANT)
    state = init_state(online(), optimizer, jax.random.key(0))
    state = state._replace(target_params=target(), env_steps=jnp.int32(5))
    update = jax.jit(apply_update, static_argnums=(3, 4))
    new, norm, finite = update(state, gradient, total, optimizer, 0.1)

    assert bool(finite)
    mean = jax.tree.map(lambda g: np.asarray(g) / float(total.transitions), gradient)
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
    assert int(new.env_steps) == 5 + int(total.transitions)
    assert new.key == state.key
    counts = [int(count) for _, count in optax.tree.get_all_with_path(new.opt_state, "count")]
    assert counts == [1, 1]  # of the moments and of the schedule


@pytest.mark.parametrize("where", ["loss", "gradient", "norm"])
def test_an_update_without_finite_numbers_changes_nothing_but_the_time(found, where: str) -> None:
    gradient, total = found
    optimizer, update = make_optimizer(CONSTANT), jax.jit(apply_update, static_argnums=(3, 4))
    state = init_state(online(), optimizer, jax.random.key(0))
    state = state._replace(target_params=target(), env_steps=jnp.int32(5))
    state, _, finite = update(state, gradient, total, optimizer, 0.1)
    assert bool(finite)
    leaves, tree = jax.tree.flatten(gradient)
    if where == "loss":
        total = total._replace(loss=jnp.float32(np.inf))
    elif where == "gradient":
        leaves[3] = leaves[3].at[(0,) * leaves[3].ndim].set(np.nan)
    else:  # every number is finite, the sum of their squares is not
        leaves[3] = jnp.full_like(leaves[3], 1e30)
    new, _, finite = update(state, jax.tree.unflatten(tree, leaves), total, optimizer, 0.1)
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
    assert int(new.env_steps) == 5 + 2 * int(total.transitions)


def test_an_element_whose_update_overflows_keeps_its_value() -> None:
    optimizer = make_optimizer(dataclasses.replace(CONSTANT, learning_rate=1e38, eps=1e-12))
    state = init_state({"w": jnp.array([-3e38, 1.0])}, optimizer, jax.random.key(0))
    one = Total(jnp.float32(1), jnp.float32(1))
    for _ in range(9):
        state, _, finite = apply_update(state, {"w": jnp.ones(2)}, one, optimizer, 0.5)
        assert bool(finite)
    for leaf in jax.tree.leaves((state.params, state.target_params, state.opt_state)):
        assert np.isfinite(leaf).all()
    assert float(state.params["w"][0]) == np.float32(-3e38)


def test_a_batch_without_a_transition_is_no_division_by_zero() -> None:
    optimizer = optax.sgd(1.0)
    state = init_state({"w": jnp.arange(3.0)}, optimizer, jax.random.key(0))
    nothing = Total(jnp.float32(0), jnp.float32(0))
    new, norm, _ = apply_update(state, {"w": jnp.zeros(3)}, nothing, optimizer, 0.5)
    assert float(norm) == 0.0
    np.testing.assert_array_equal(new.params["w"], [0, 1, 2])
    np.testing.assert_array_equal(new.target_params["w"], [0, 1, 2])
    assert int(new.env_steps) == 0


def test_init_state_copies_the_target_towers() -> None:
    params = jax.tree.map(jnp.asarray, online())
    state = init_state(params, optax.sgd(1.0), jax.random.key(3))
    for one, two in zip(jax.tree.leaves(state.params), jax.tree.leaves(state.target_params)):
        np.testing.assert_array_equal(one, two)
        assert one.unsafe_buffer_pointer() != two.unsafe_buffer_pointer()
    assert (int(state.step), int(state.env_steps)) == (0, 0)
    assert state.step.dtype == state.env_steps.dtype == jnp.int32


def test_the_key_changes_with_the_step_and_is_no_episodes() -> None:
    state = init_state({}, optax.sgd(1.0), jax.random.key(42))
    found = set()
    for step in range(5):
        key = dropout_key(state._replace(step=jnp.int32(step)))
        step_key = jax.random.fold_in(state.key, step)
        found |= {tuple(jax.random.key_data(k).tolist()) for k in (key, step_key)}
    assert len(found) == 10
