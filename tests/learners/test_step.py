"""A training step of two towers and its state; learning rates, AdamW and Muon against optax."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qrag_jax.learners.optimizers import (
    SCHEDULES,
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
)
from qrag_jax.learners.state import Parts, TrainState, dropout_key, episode_keys
from qrag_jax.learners.update import Learner
from qrag_jax.runtime.mesh import shard_batch
from qrag_jax.runtime.platform import CompilationCounter
from tests.episodes_maker import tower
from tests.learners.updates import ALONE, PEAK, SCHEDULE, fused_update, two_towers
from tests.rollouts import play_setup
from tests.rollouts.play_setup import PQN, episodes

TOWER = tower(play_setup.ENCODER, 0)


def test_it_acts_at_random_first_and_repeats_without_a_compile_or_a_transfer() -> None:
    """What a step moves, against PyTorch: tests/benchmarks/test_speed.py."""
    towers = two_towers(ALONE, TOWER)
    step, state, found = fused_update(towers), towers.first_state(TOWER, 42), []
    for number in range(3):
        batch, rate = episodes(number), float(SCHEDULE(number))
        state, metrics = step(state, shard_batch(towers.mesh, batch))
        assert float(metrics["learning_rate"]) == pytest.approx(rate)
        assert float(metrics["alpha"]) == pytest.approx(PQN.alpha * rate / PEAK)
        chunks = batch.chunk_mask.sum(1)
        counts = np.minimum(play_setup.CONFIG.max_steps, chunks)
        evenly = sum(np.log(n - t) for n, c in zip(chunks, counts) for t in range(c)) / counts.sum()
        # 2·learning_start environment steps act at random: the first two batches, not the third.
        assert (float(metrics["entropy"]) == pytest.approx(evenly, rel=1e-5)) == (number < 2)
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


def test_an_element_whose_update_overflows_keeps_its_value_and_all_do_if_the_norm_does() -> None:
    config = OptimizerConfig(1e38, eps=1e-12, clip_norm=0.1, schedule="constant", warmup_steps=0)
    parts, nowhere = Parts(make_optimizer(config), has_targets=True), cast(Any, None)
    learner = Learner(mesh=nowhere, shardings=nowhere, parts=parts, schedule=SCHEDULE)

    @jax.jit
    def update(state: TrainState, gradient: Any) -> tuple[TrainState, Any]:
        return learner.learn(state, (gradient, None), jnp.float32(1), jnp.float32(14), tau=0.1)

    state = parts.build({"w": jnp.array([-3e38, 1.0])}, jax.random.key(42))
    for _ in range(9):
        state, metrics = update(state, {"w": jnp.ones(2)})
        assert metrics["skipped"] == 0
    for leaf in jax.tree.leaves((state.params, state.target_params, state.opt_state)):
        assert np.isfinite(leaf).all()
    assert float(state.params["w"][0]) == np.float32(-3e38)
    after, metrics = update(state, {"w": jnp.full(2, 1e30)})
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)


def test_targets_follow_the_weights_by_tau() -> None:
    parts, nowhere = Parts(optax.sgd(1.0), has_targets=True), cast(Any, None)
    learner = Learner(mesh=nowhere, shardings=nowhere, parts=parts, schedule=SCHEDULE)
    state = parts.build({"w": jnp.zeros(1)}, jax.random.key(42))
    for gradient, target in ((-4.0, 0.1), (0.0, 0.19)):
        given = {"w": jnp.array([gradient])}
        one, four = jnp.float32(1), jnp.float32(4)
        state, metrics = learner.learn(state, (given, None), one, four, tau=0.1)
        assert float(metrics["grad_norm"]) == abs(gradient) / 4
        np.testing.assert_allclose(state.params["w"], [1.0])
        np.testing.assert_allclose(state.target_params["w"], [target], rtol=1e-6)


def test_each_step_has_its_own_keys_of_dropout_and_of_episodes() -> None:
    state = Parts(optax.sgd(1.0)).build({}, jax.random.key(42))
    keys = set()
    for step in range(5):
        own = dropout_key(state._replace(step=jnp.int32(step)))
        every = own, *episode_keys(state, jnp.int32(step), 3)
        keys |= {tuple(jax.random.key_data(k).tolist()) for k in every}
    assert len(keys) == 5 * (1 + 3)


# ------------------------------------------------------------------------ learning rates, AdamW

CONFIG = OptimizerConfig(2e-3, weight_decay=0.1, warmup_steps=4, total_steps=20)
# The share of the way from the peak to its end, over the share of the time.
LEFT = {
    "constant": lambda over: 1.0,
    "linear": lambda over: 1.0 - over,
    "cosine": lambda over: 0.5 * (1 + math.cos(math.pi * over)),
    "quarter_cosine": lambda over: math.cos(0.5 * math.pi * over),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_by_hand(name: str) -> None:
    """A warm-up that rises by equal steps from the first one on, then a decay to the end's rate."""
    for warmup, final in itertools.product((0, 1, 4, 19), (0.1, 0.0)):
        how = {"schedule": name, "warmup_steps": warmup, "final_ratio": final}
        schedule = learning_rate_schedule(dataclasses.replace(CONFIG, **how))
        found = np.asarray(jax.vmap(schedule)(jnp.arange(23)))
        for step in range(23):
            over = min(max(step - warmup, 0) / (20 - warmup), 1.0)
            end = 1.0 if name == "constant" else final
            expected = 2e-3 * (end + (1 - end) * LEFT[name](over))
            if step < warmup:
                expected = 2e-3 * (step + 1) / warmup
            assert found[step] == pytest.approx(expected, rel=1e-5, abs=1e-9)
        assert (found[:20] > 0).all()  # no step is lost to a rate of zero
    for warmup in (20, 30):  # as long as the run, and longer
        config = dataclasses.replace(CONFIG, warmup_steps=warmup, final_ratio=0.0)
        assert min(float(learning_rate_schedule(config)(step)) for step in (0, 19)) > 0


def test_equals_optax_adamw_bit_for_bit_and_has_its_state() -> None:
    rng = np.random.default_rng(1)
    params = {"w": rng.standard_normal((5, 3)).astype(np.float32)}
    settings = {"b1": CONFIG.beta1, "b2": CONFIG.beta2, "eps": CONFIG.eps}
    plain = optax.chain(
        optax.clip_by_global_norm(CONFIG.clip_norm),
        optax.adamw(learning_rate_schedule(CONFIG), weight_decay=CONFIG.weight_decay, **settings),
    )
    ours = make_optimizer(CONFIG)
    state, expected = ours.init(params), plain.init(params)
    update, plain_update = jax.jit(ours.update), jax.jit(plain.update)
    for _ in range(4):
        gradient = {"w": rng.standard_normal((5, 3)).astype(np.float32)}
        found, state = update(gradient, state, params, finite=True)
        wanted, expected = plain_update(gradient, expected, params)
        # Checkpoints name every part of it.
        assert jax.tree.structure(state) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, (found, state), (wanted, expected))


# ------------------------------------------------------------------------ Muon

MUON = dataclasses.replace(
    CONFIG, clip_norm=1e9, total_steps=10, warmup_steps=2, matrices="muon", muon_rate=4.0
)
ADAM = dataclasses.replace(MUON, matrices="adam")
# Two towers of three layers; one map widens, the other narrows.
SHAPES = {
    "words": (2, 7, 4),
    "kernel": (3, 3),  # next to the layers
    "layers": {
        "up": {"kernel": (2, 3, 4, 9), "bias": (2, 3, 9), "lora_a": (2, 3, 4, 2)},
        "down": {"kernel": (2, 3, 9, 4)},
        "norm": {"scale": (2, 3, 4)},
    },
}


def drawn(seed: int, towers: int):
    rng = np.random.default_rng(seed)
    draw = lambda shape: rng.standard_normal(shape[2 - towers :]).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, SHAPES, is_leaf=lambda leaf: isinstance(leaf, tuple))


@pytest.mark.parametrize("stacked", [(2, 3), (3,)])
def test_each_matrix_moves_as_alone_by_muon_and_all_else_as_by_adamw(
    stacked: tuple[int, ...],
) -> None:
    params, *gradients = (drawn(seed, len(stacked)) for seed in range(5))
    optimizer, adam = make_optimizer(MUON), make_optimizer(ADAM)
    state, adam_state = optimizer.init(params), adam.init(params)
    update, adam_update = jax.jit(optimizer.update), jax.jit(adam.update)
    muon, alone = optax.contrib.scale_by_muon(), {}
    muon_update = jax.jit(muon.update)
    for step, gradient in enumerate(gradients):
        updates, state = update(gradient, state, params, finite=True)
        others, adam_state = adam_update(gradient, adam_state, params, finite=True)
        rate = 4.0 * float(learning_rate_schedule(MUON)(step))
        for of in ((name, at) for name in ("up", "down") for at in np.ndindex(stacked)):
            name, at = of
            kernel, own = (tree["layers"][name]["kernel"][at] for tree in (params, gradient))
            moved, alone[of] = muon_update(own, alone.get(of) or muon.init(own))
            wider = max(1.0, own.shape[1] / own.shape[0]) ** 0.5  # Jordan's rule
            expected = -rate * (wider * np.asarray(moved) + 0.1 * kernel)
            found = np.asarray(updates["layers"][name]["kernel"][at])
            np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-6)
        for both in (updates, others):
            del both["layers"]["up"]["kernel"], both["layers"]["down"]
        jax.tree.map(np.testing.assert_array_equal, updates, others)
    broken = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), params)
    _, after = update(broken, state, params, finite=False)
    changed = [
        (int(one), int(two))
        for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True)
        if not np.array_equal(one, two)
    ]
    # The schedules of both advance, so that the next batch has the rate of its number.
    assert changed == [(4, 5), (4, 5)]
