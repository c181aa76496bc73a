"""A training step of two towers put together by hand, and what its state must keep."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qrag_jax.learners.optimizers import OptimizerConfig, make_optimizer
from qrag_jax.learners.state import Parts, TrainState, dropout_key
from qrag_jax.learners.two_towers import FusedGradient, Towers
from qrag_jax.learners.update import Learner, counted
from qrag_jax.rollouts.chunks import Draws
from qrag_jax.runtime.mesh import shard_batch
from qrag_jax.runtime.platform import CompilationCounter
from tests.episodes_maker import tower
from tests.learners.updates import (
    ALONE,
    OPTIMIZER,
    PEAK,
    SCHEDULE,
    assert_close,
    fused_update,
    two_towers,
)
from tests.rollouts import play_setup
from tests.rollouts.play_setup import CONFIG, EPISODES, PQN, episodes, feedback, jitted_gradient

TOWER = tower(play_setup.ENCODER, 0)


def test_three_steps_by_hand() -> None:
    """And the same numbers again, with nothing compiled or transferred and buffers reused."""
    towers = two_towers(ALONE, TOWER)
    step, optimize = fused_update(towers), jax.jit(OPTIMIZER.update)
    gradient_of = FusedGradient(play_setup.ONE_BUCKET_ACTOR, PQN, feedback)
    state, taken, found = towers.first_state(TOWER, 42), 0, []
    for number in range(3):
        batch, rate = episodes(number), float(SCHEDULE(number))
        keys = jax.random.split(jax.random.fold_in(state.key, number), EPISODES)
        # 2·learning_start environment steps act at random: the first two batches, not the third.
        alpha, uniform = np.float32(PQN.alpha * rate / PEAK), number < 2
        params, targets, moments = jax.device_get(
            (state.params, state.target_params, state.opt_state)
        )
        draws = Draws(keys, alpha, uniform)
        gradient, sums = jitted_gradient(gradient_of, Towers(params, targets), batch, draws)
        transitions = float(sums.means["loss"][1])
        mean = jax.tree.map(lambda leaf, n=transitions: np.asarray(leaf) / n, gradient)
        counts = np.minimum(CONFIG.max_steps, batch.chunk_mask.sum(1))
        chunks, taken = batch.chunk_mask.sum(1), taken + counts.sum()
        state, metrics = step(state, shard_batch(towers.mesh, batch))
        moved = optax.apply_updates(params, optimize(mean, moments, params)[0])
        followed = jax.tree.map(lambda t, p: (1 - PQN.tau) * t + PQN.tau * p, targets, moved)
        assert_close(jax.device_get((state.params, state.target_params)), (moved, followed), 2e-6)
        expected = {
            **{name: total / count for name, (total, count) in sums.means.items()},
            "grad_norm": np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(mean))),
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
    counter, again = CompilationCounter(), []
    with jax.transfer_guard("disallow"):
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

CONSTANT = OptimizerConfig(clip_norm=0.1, schedule="constant", warmup_steps=0)
ADAM = make_optimizer(CONSTANT)


@partial(jax.jit, static_argnums=3)
def update(
    state: TrainState, gradient: Any, loss: Any, optimizer: Any
) -> tuple[TrainState, jax.Array]:
    """One step of a learner with this optimizer: the state, and whether it was finite."""
    nowhere: Any = None
    parts = Parts(optimizer, has_targets=True)
    learner = Learner(mesh=nowhere, shardings=nowhere, parts=parts, schedule=SCHEDULE)
    state, metrics = learner.learn(state, (gradient, None), loss, jnp.float32(14), tau=0.1)
    return counted(state, jnp.float32(14), {})[0], metrics["skipped"] == 0


def begun(params: Any, optimizer: Any) -> TrainState:
    return Parts(optimizer, has_targets=True).build(params, jax.random.key(42))


def test_an_update_without_finite_numbers_changes_nothing_but_the_time() -> None:
    params, good = {"w": jnp.arange(3.0), "b": jnp.ones(2)}, {"w": jnp.ones(3), "b": jnp.ones(2)}
    state, _ = update(begun(params, ADAM), good, 1.0, ADAM)
    kept = [state.params, state.target_params, *(optax.tree.get(state, n) for n in ("mu", "nu"))]
    for loss, gradient in (
        (np.inf, good),
        (1.0, good | {"b": jnp.array([np.nan, 1.0])}),
        (1.0, good | {"w": jnp.full(3, 1e30)}),  # the sum of squares is not finite
    ):
        new, finite = update(state, gradient, loss, ADAM)
        assert not bool(finite)
        after = [new.params, new.target_params, *(optax.tree.get(new, n) for n in ("mu", "nu"))]
        jax.tree.map(np.testing.assert_array_equal, after, kept)
        counts = [int(count) for _, count in optax.tree.get_all_with_path(new.opt_state, "count")]
        assert counts == [1, 2]  # of the moments, which stay, and of the schedule, which goes on
        assert (int(new.step), int(new.env_steps), new.key) == (2, 2 * 14, state.key)


def test_an_element_whose_update_overflows_keeps_its_value() -> None:
    optimizer = make_optimizer(dataclasses.replace(CONSTANT, learning_rate=1e38, eps=1e-12))
    state = begun({"w": jnp.array([-3e38, 1.0])}, optimizer)
    for _ in range(9):
        state, finite = update(state, {"w": jnp.ones(2)}, 1.0, optimizer)
        assert bool(finite)
    for leaf in jax.tree.leaves((state.params, state.target_params, state.opt_state)):
        assert np.isfinite(leaf).all()
    assert float(state.params["w"][0]) == np.float32(-3e38)


def test_the_key_changes_with_the_step_and_is_no_episodes() -> None:
    state = begun({}, optax.sgd(1.0))
    keys = set()
    for step in range(5):
        key = dropout_key(state._replace(step=jnp.int32(step)))
        step_key = jax.random.fold_in(state.key, step)
        keys |= {tuple(jax.random.key_data(k).tolist()) for k in (key, step_key)}
    assert len(keys) == 10
