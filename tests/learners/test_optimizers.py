"""Learning rates by hand, and AdamW with its clip against torch."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import optax
import pytest
import torch

from configs import common
from qrag_jax.errors import InputError
from qrag_jax.learners.optimizers import (
    SCHEDULES,
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
)

CONFIG = OptimizerConfig(
    learning_rate=2e-3,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.98,
    eps=1e-6,
    clip_norm=2.0,
    schedule="linear",
    final_ratio=0.1,
    warmup_steps=4,
    total_steps=20,
)


def rates(**changes) -> list[float]:
    """The rate of each optimizer step, and of three steps after the last."""
    config = dataclasses.replace(CONFIG, **changes)
    schedule = learning_rate_schedule(config)
    return [float(schedule(step)) for step in range(config.total_steps + 3)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_rises_by_equal_steps_from_the_first_on(schedule) -> None:
    first = rates(schedule=schedule)[:5]
    np.testing.assert_allclose(first, [5e-4, 1e-3, 1.5e-3, 2e-3, 2e-3], rtol=1e-5)


def test_constant() -> None:
    np.testing.assert_allclose(rates(schedule="constant")[4:], 2e-3, rtol=1e-6)


def test_linear_decay() -> None:
    found = rates(schedule="linear")
    # 16 steps from 2e-3 down to 2e-4.
    assert found[8] == pytest.approx(2e-3 - 1.8e-3 * 4 / 16, rel=1e-5)
    assert found[12] == pytest.approx(1.1e-3, rel=1e-5)
    np.testing.assert_allclose(found[20:], 2e-4, rtol=1e-5)
    to_zero = rates(schedule="linear", final_ratio=0.0)
    assert min(to_zero[:20]) == pytest.approx(2e-3 / 16, rel=1e-4)
    np.testing.assert_allclose(to_zero[20:], 0.0, atol=1e-9)


def test_cosine_decay() -> None:
    found = rates(schedule="cosine")
    half = 0.5 * (1 + math.cos(math.pi * 4 / 16))
    assert found[8] == pytest.approx(2e-3 * (0.9 * half + 0.1), rel=1e-5)
    assert found[12] == pytest.approx(1.1e-3, rel=1e-5)
    np.testing.assert_allclose(found[20:], 2e-4, rtol=1e-5)


def test_quarter_cosine_decay() -> None:
    found = rates(schedule="quarter_cosine")
    for step in range(4, 20):
        over = (step - 4) / 16
        expected = 2e-3 * (0.1 + 0.9 * math.cos(0.5 * math.pi * over))
        assert found[step] == pytest.approx(expected, rel=1e-5)
    # At half time, where the usual cosine has 0.55 of the peak.
    assert found[12] / 2e-3 == pytest.approx(0.736, abs=1e-3)
    np.testing.assert_allclose(found[20:], 2e-4, rtol=1e-5)
    to_zero = rates(schedule="quarter_cosine", final_ratio=0.0)
    assert min(to_zero) >= 0.0
    np.testing.assert_allclose(to_zero[20:], 0.0, atol=1e-9)


def test_new_experiments_decay_as_q_rag_does() -> None:
    assert common.get_config().optimizer.schedule == "quarter_cosine"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_hardly_any_warm_up(schedule, warmup_steps) -> None:
    found = rates(schedule=schedule, warmup_steps=warmup_steps)
    assert found[0] == pytest.approx(2e-3, rel=1e-6)
    assert found[1] == pytest.approx(2e-3, rel=0.06)
    assert max(found) <= 2e-3 * (1 + 1e-6)
    if schedule == "linear":
        steps = 20 - warmup_steps
        expected = 2e-3 - 1.8e-3 * (10 - warmup_steps) / steps
        assert found[10] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_step_is_lost_to_a_rate_of_zero(schedule) -> None:
    for warmup_steps in (0, 1, 2, 19, 20, 30):
        found = rates(schedule=schedule, warmup_steps=warmup_steps, final_ratio=0.0)
        assert min(found[:20]) > 0


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(InputError, match=r"config\.optimizer\.schedule is 'step'.*cosine"):
        dataclasses.replace(CONFIG, schedule="step")


def test_equals_optax_adamw_bit_for_bit_and_has_its_state() -> None:
    rng = np.random.default_rng(1)
    params = {"w": rng.standard_normal((5, 3)).astype(np.float32)}
    settings = dict(b1=CONFIG.beta1, b2=CONFIG.beta2, eps=CONFIG.eps)
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
        for one, two in zip(jax.tree.leaves((found, state)), jax.tree.leaves((wanted, expected))):
            assert np.array_equal(one, two)


def test_equals_torch_adamw_after_its_clip() -> None:
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((5, 3)), "b": rng.standard_normal(3)}
    params = {name: value.astype(np.float32) for name, value in params.items()}
    twins = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in params.items()}
    start = params
    peer = torch.optim.AdamW(twins.values(), lr=1.0, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1)
    schedule, optimizer = learning_rate_schedule(CONFIG), make_optimizer(CONFIG)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    norms = []
    for step, scale in enumerate((3.0, 0.01, 1.0, 0.3, 5.0)):
        gradients = {
            name: (scale * rng.standard_normal(value.shape)).astype(np.float32)
            for name, value in params.items()
        }
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        for name, twin in twins.items():
            twin.grad = torch.tensor(gradients[name])
        norms.append(float(torch.nn.utils.clip_grad_norm_(twins.values(), 2.0)))
        peer.param_groups[0]["lr"] = float(schedule(step))
        peer.step()
    assert min(norms) < 2.0 < max(norms)  # some were clipped, some were not
    for name, twin in twins.items():
        np.testing.assert_allclose(params[name], twin.detach().numpy(), atol=1e-6)
        assert np.abs(params[name] - start[name]).max() > 1e-3
