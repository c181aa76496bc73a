"""A training step of two towers put together by hand, and what its state must keep."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qrag_jax.learners.optimizers import OptimizerConfig, make_optimizer
from qrag_jax.learners.pqn import FusedGradient, Towers
from qrag_jax.learners.state import Parts, TrainState, dropout_key
from qrag_jax.learners.two_towers import make_train_step
from qrag_jax.learners.update import Learner, counted
from qrag_jax.rollouts.chunks import Draws
from qrag_jax.runtime.mesh import shard_batch
from qrag_jax.runtime.platform import CompilationCounter
from tests.episodes_maker import tower
from tests.learners.updates import ALONE, PEAK, SCHEDULE, assert_close, two_towers
from tests.rollouts.play_setup import (
    CONFIG,
    ENCODER,
    EPISODES,
    ONE_BUCKET_ACTOR,
    PQN,
    episodes,
    feedback,
    jitted_gradient,
    online,
    target,
)

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
TOWER = tower(ENCODER, 0)


def test_three_steps_by_hand() -> None:
    """And the same numbers again, with nothing compiled or transferred and buffers reused."""
    towers = two_towers(ALONE, TOWER)
    step = make_train_step(towers, feedback)
    gradient_of = FusedGradient(ONE_BUCKET_ACTOR, PQN, feedback)
    state, taken, found = towers.first_state(TOWER, 42), 0, []
    for number in range(3):
        batch, rate = episodes(number), float(SCHEDULE(number))
        keys = jax.random.split(jax.random.fold_in(state.key, number), EPISODES)
        # 2·learning_start environment steps act at random: the first two batches, not the third.
        alpha, uniform = np.float32(PQN.alpha * rate / PEAK), number < 2
        both = Towers(*jax.device_get((state.params, state.target_params)))
        gradient, sums = jitted_gradient(gradient_of, both, batch, Draws(keys, alpha, uniform))
        norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(gradient)))
        transitions, present = float(sums.transitions), float(sums.episodes)
        counts = np.minimum(CONFIG.max_steps, batch.chunk_mask.sum(1))
        chunks, taken = batch.chunk_mask.sum(1), taken + counts.sum()
        state, metrics = step(state, shard_batch(towers.mesh, batch))
        expected = {
            "loss": sums.loss / transitions,
            **{name: total / transitions for name, total in sums.by_transition.items()},
            **{name: total / present for name, total in sums.by_episode.items()},
            "grad_norm": norm / transitions,
            "padding_share": 1 - sums.tokens.real / sums.tokens.computed,
            "env_steps": taken,
            "learning_rate": rate,
            "alpha": alpha,
            "skipped": 0.0,
        }
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name].dtype == np.float32, name
            assert float(metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), name
        evenly = sum(np.log(n - t) for n, c in zip(chunks, counts) for t in range(c)) / counts.sum()
        assert (float(metrics["entropy"]) == pytest.approx(evenly, rel=1e-5)) == uniform
        found.append(jax.device_get(metrics))
    state = towers.first_state(TOWER, 42)
    batches = [shard_batch(towers.mesh, episodes(seed)) for seed in range(3)]
    jax.block_until_ready((state, batches))
    counter = CompilationCounter()
    with jax.transfer_guard("disallow"):
        again = []
        for batch in batches:
            old = state.params, state.target_params, state.opt_state
            state, metrics = step(state, batch)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
            assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, batch)))
            again.append(metrics)
        jax.block_until_ready(again)
    assert counter.count == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), found)


# ------------------------------------------------------------------------ the state


class Total(NamedTuple):
    """A summed loss and its number of transitions."""

    loss: jax.Array
    transitions: jax.Array


@partial(jax.jit, static_argnums=(3, 4))
def update(
    state: TrainState, gradient: Any, total: Total, optimizer: Any, tau: float
) -> tuple[TrainState, jax.Array, jax.Array]:
    """One step of a learner with this optimizer: the state, the norm, whether it was finite."""
    parts: Any = Parts(optimizer, has_targets=True)
    nowhere: Any = None
    learner = Learner(mesh=nowhere, shardings=nowhere, parts=parts, schedule=SCHEDULE)
    divisor = jnp.maximum(total.transitions, 1.0)
    state, told = learner.learn(state, (gradient, None), total.loss, divisor, tau=tau)
    return counted(state, total.transitions, {})[0], told.norm, told.finite


def begun(params: Any, optimizer: Any, seed: int = 0) -> TrainState:
    return Parts(optimizer, has_targets=True).build(params, jax.random.key(seed))


@pytest.fixture(scope="module")
def found() -> tuple[Any, Total]:
    """The gradient of a summed loss, large in some parameters and small in others."""
    rng = np.random.default_rng(0)

    def leaf(like: np.ndarray) -> jax.Array:
        noise = 10.0 ** rng.uniform(-3, 1) * rng.standard_normal(like.shape)
        return jnp.asarray(noise, jnp.float32)

    return jax.tree.map(leaf, online()), Total(jnp.float32(21.5), jnp.float32(14))


ADAM = make_optimizer(CONSTANT)


def beginning() -> Any:
    state = begun(jax.tree.map(jnp.asarray, online()), ADAM)
    return state._replace(target_params=target(), env_steps=jnp.int32(5))


def test_an_update_is_one_step_on_the_mean_and_moves_the_targets(found) -> None:
    (gradient, total), state = found, beginning()
    new, norm, finite = update(state, gradient, total, ADAM, 0.1)
    assert bool(finite)
    mean = jax.tree.map(lambda g: np.asarray(g) / float(total.transitions), gradient)
    length = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in jax.tree.leaves(mean)))
    assert float(norm) == pytest.approx(length, rel=1e-5)
    assert length > 0.1  # the norm is that before clipping
    by_hand = jax.jit(ADAM.update)(mean, ADAM.init(online()), online())
    expected = optax.apply_updates(online(), by_hand[0])
    slow = jax.tree.map(lambda t, p: 0.9 * t + 0.1 * np.asarray(p), target(), expected)
    assert_close((new.params, new.target_params), (expected, slow), 2e-6)
    assert (int(new.step), int(new.env_steps)) == (1, 5 + 14)
    assert new.key == state.key


@pytest.mark.parametrize("where", ["loss", "gradient", "norm"])
def test_an_update_without_finite_numbers_changes_nothing_but_the_time(found, where: str) -> None:
    gradient, total = found
    state, _, _ = update(beginning(), gradient, total, ADAM, 0.1)
    leaves, tree = jax.tree.flatten(gradient)
    if where == "loss":
        total = total._replace(loss=jnp.float32(np.inf))
    elif where == "gradient":
        leaves[3] = leaves[3].at[(0,) * leaves[3].ndim].set(np.nan)
    else:  # every number is finite, the sum of their squares is not
        leaves[3] = jnp.full_like(leaves[3], 1e30)
    new, _, finite = update(state, jax.tree.unflatten(tree, leaves), total, ADAM, 0.1)
    assert not bool(finite)

    def kept(state: Any) -> Any:
        moments = (optax.tree.get(state.opt_state, name) for name in ("mu", "nu"))
        return state.params, state.target_params, *moments

    jax.tree.map(np.testing.assert_array_equal, kept(new), kept(state))
    counts = [int(count) for _, count in optax.tree.get_all_with_path(new.opt_state, "count")]
    assert counts == [1, 2]  # of the moments, which stay, and of the schedule, which goes on
    assert (int(new.step), int(new.env_steps)) == (2, 5 + 2 * 14)


def test_an_element_whose_update_overflows_keeps_its_value() -> None:
    optimizer = make_optimizer(dataclasses.replace(CONSTANT, learning_rate=1e38, eps=1e-12))
    state = begun({"w": jnp.array([-3e38, 1.0])}, optimizer)
    one = Total(jnp.float32(1), jnp.float32(1))
    for _ in range(9):
        state, _, finite = update(state, {"w": jnp.ones(2)}, one, optimizer, 0.25)
        assert bool(finite)
    for leaf in jax.tree.leaves((state.params, state.target_params, state.opt_state)):
        assert np.isfinite(leaf).all()
    assert float(state.params["w"][0]) == np.float32(-3e38)


def test_a_batch_without_a_transition_is_no_division_by_zero() -> None:
    state = begun({"w": jnp.arange(3.0)}, optax.sgd(1.0))
    nothing = Total(jnp.float32(0), jnp.float32(0))
    new, norm, _ = update(state, {"w": jnp.zeros(3)}, nothing, optax.sgd(1.0), 0.5)
    assert float(norm) == int(new.env_steps) == 0
    for params in (new.params, new.target_params):
        np.testing.assert_array_equal(params["w"], [0, 1, 2])


def test_the_key_changes_with_the_step_and_is_no_episodes() -> None:
    state = begun({}, optax.sgd(1.0), 42)
    keys = set()
    for step in range(5):
        key = dropout_key(state._replace(step=jnp.int32(step)))
        step_key = jax.random.fold_in(state.key, step)
        keys |= {tuple(jax.random.key_data(k).tolist()) for k in (key, step_key)}
    assert len(keys) == 10
