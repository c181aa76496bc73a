"""Losses: GRPO beside a torch version of the paper, and all of them by hand and in their limits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from qrag_jax.algorithms import pqn
from qrag_jax.algorithms.policy_gradient import (
    AGGREGATIONS,
    BNPO,
    DAPO,
    DR_GRPO,
    GRPO,
    Clip,
    aggregation,
    clipped,
    clipped_weight,
    correction,
    departure,
    kl_k3,
    of_sequence,
    weighted_sum,
)
from qrag_jax.algorithms.preference import Pair, dpo_loss, ipo_loss, margins

LONGEST = 7


class Drawn:
    """Log-probabilities and all that goes with them, `[N, T]`; some episodes have no action."""

    def __init__(self, seed: int, shape: tuple[int, int] = (8, 5)) -> None:
        rng = np.random.default_rng(seed)
        self.new = rng.normal(-2, 0.5, shape).astype(np.float32)
        self.old = (self.new + rng.normal(0, 0.3, shape)).astype(np.float32)
        self.reference = (self.new + rng.normal(0, 0.3, shape)).astype(np.float32)
        self.advantages = rng.normal(size=shape).astype(np.float32)
        lengths = rng.integers(0, shape[1] + 1, shape[0])
        self.valid = np.arange(shape[1]) < lengths[:, None]
        self.valid[0] = False


def ours(log_prob: jax.Array, drawn: Drawn, name: str, beta: float) -> tuple[jax.Array, jax.Array]:
    """The sum and the divisor of GRPO's loss."""
    each = clipped(log_prob, drawn.old, drawn.advantages, Clip(0.2, 0.3))
    each += beta * kl_k3(log_prob, drawn.reference)
    weight, divisor = aggregation(name, drawn.valid.sum(axis=1).astype(np.float32), LONGEST)
    return weighted_sum(each, weight[:, None] * drawn.valid.astype(np.float32)), divisor


def torch_grpo(drawn: Drawn, name: str, beta: float) -> tuple[float, np.ndarray]:
    """GRPO's loss and gradient, episode by episode as the paper has it, in float64."""
    new = torch.tensor(drawn.new, dtype=torch.float64, requires_grad=True)
    old, reference, advantages = (
        torch.tensor(each, dtype=torch.float64)
        for each in (drawn.old, drawn.reference, drawn.advantages)
    )
    episodes, total, actions = 0, torch.zeros((), dtype=torch.float64), 0
    for row, length in enumerate(drawn.valid.sum(axis=1)):
        if not length:
            continue
        summed = torch.zeros((), dtype=torch.float64)
        for t in range(length):
            ratio = torch.exp(new[row, t] - old[row, t])
            gain = torch.minimum(
                ratio * advantages[row, t], torch.clamp(ratio, 0.8, 1.3) * advantages[row, t]
            )
            difference = reference[row, t] - new[row, t]
            summed = summed - gain + beta * (torch.exp(difference) - difference - 1)
        episodes, actions = episodes + 1, actions + int(length)
        total = total + (summed / length if name == GRPO else summed)
    divisor = {GRPO: episodes, DR_GRPO: episodes * LONGEST, BNPO: actions, DAPO: actions}[name]
    loss = total / divisor
    loss.backward()
    assert new.grad is not None
    return loss.item(), new.grad.numpy()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_grpo_is_that_of_torch(name: str) -> None:
    drawn, beta = Drawn(0), 0.04
    expected, gradient = torch_grpo(drawn, name, beta)

    def mean(log_prob: jax.Array) -> jax.Array:
        total, divisor = ours(log_prob, drawn, name, beta)
        return total / divisor

    loss, found = jax.value_and_grad(mean)(jnp.asarray(drawn.new))
    assert float(loss) == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(found, gradient, atol=1e-5)


def test_departure_counts_ratios_that_have_gone_the_way_of_their_advantage() -> None:
    new = jnp.log(jnp.array([0.5, 1.0, 2.0, 0.5, 1.0, 2.0]))
    advantages = jnp.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    seen = departure(new, jnp.zeros(6), advantages, jnp.ones(6, bool), Clip(0.2, 0.3))
    assert (float(seen.clipped), float(seen.actions)) == (2.0, 6.0)
    assert float(seen.largest) == pytest.approx(2.0)


@pytest.mark.parametrize("gone", [-200.0, 200.0])  # e^89 is infinite in float32
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_policy_far_away_has_finite_losses_and_gradients(gone: float, advantage: float) -> None:
    old, given = jnp.zeros((1, 1)), jnp.full((1, 1), advantage)
    new = jnp.full((1, 1), gone)
    for loss in (
        lambda x: clipped(x, old, given),
        lambda x: clipped_weight(x, old, given),
        lambda x: clipped(of_sequence(x, old, np.ones((1, 1), bool)), old, given),
        lambda x: kl_k3(x, old),
    ):
        value, slope = jax.value_and_grad(lambda x, loss=loss: loss(x).sum())(new)
        assert np.isfinite(value)
        assert np.isfinite(slope).all()
    assert all(np.isfinite(each) for each in departure(new, old, given, np.ones((1, 1), bool)))
    if gone * advantage > 0:  # it has gone the way of its advantage: the clip's own value
        value, slope = jax.value_and_grad(lambda x: clipped(x, old, given).sum())(new)
        assert float(value) == pytest.approx(-1.2 if gone > 0 else 0.8)
        assert float(slope[0, 0]) == 0.0


def test_kl_never_pushes_a_policy_away_from_its_reference() -> None:
    """d/dx [exp(r − x) − (r − x) − 1] = 1 − exp(r − x): below 0 where x is below r."""
    for gone, slope in ((-200.0, 0.0), (-3.0, 1 - np.exp(3)), (200.0, 1.0)):
        found = jax.grad(kl_k3)(jnp.float32(gone), jnp.float32(0.0))
        assert float(found) == pytest.approx(slope, rel=1e-5)


def test_the_effective_share_of_a_sampler_that_is_the_policy_is_one() -> None:
    old = jnp.log(jnp.array([[0.2, 0.9, 0.5], [0.4, 0.4, 0.1]]))
    same = correction(old, old.at[1, 1].set(jnp.nan), jnp.isfinite(old).at[1, 1].set(False))
    assert float(same.effective_share()) == pytest.approx(1.0, rel=1e-6)
    assert float(same.kl) == pytest.approx(0.0, abs=1e-6)


# ------------------------------------------------------------------------ PQN, pairs


def test_targets_of_pqn_by_hand() -> None:
    # Three steps; two steps and the end; a row that fills up a batch.
    done = np.array([[0, 0, 1], [0, 1, 1], [1, 1, 1]], bool)
    values = np.array([[9.0, 2.0, 4.0], [9.0, 3.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    rewards = np.array([[0.0, 0.0, 1.0], [0.5, 1.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    middle = 0.9 * (0.4 * 4 + 0.6 * 1)
    first = 0.9 * (0.4 * 2 + 0.6 * middle)
    expected = [[first, middle, 1], [0.5 + 0.9 * (0.4 * 3 + 0.6 * 1), 1, 0], [0, 0, 0]]
    found = jax.jit(pqn.targets, static_argnums=(3, 4))(rewards, done, values, 0.9, 0.6)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_alpha_is_above_zero_where_the_learning_rate_is_zero() -> None:
    assert float(pqn.alpha_at(0.05, jnp.float32(0.0), 2e-3)) == pytest.approx(5e-8)


def test_ipo_and_dpo_by_hand() -> None:
    # π prefers the winner by 3 nats, the reference the loser by 1: the policy has moved by 4.
    policy = Pair(np.float32([-2.0, -1.0]), np.float32([-5.0, -1.0]))
    by_reference = Pair(np.float32([-4.0, -7.0]), np.float32([-3.0, -7.0]))
    np.testing.assert_allclose(margins(policy, by_reference), [4.0, 0.0])
    # β = 0.05: ten nats are aimed at. A weight of 0 takes no part, whatever is there.
    h, weights = np.float32([0.5, -2.0, 0.0, np.nan]), np.float32([1.0, 0.25, 2.0, 0.0])
    total, weight = ipo_loss(h, weights, 0.05)
    assert float(total) == pytest.approx(9.5**2 + 0.25 * 12**2 + 2 * 10**2)
    assert float(weight) == 3.25
    # σ(ln 3) is ¾; of ten labels one is wrong: 0.9·ln(4/3) + 0.1·ln 4, and ln 2 of a margin of 0.
    h, weights = np.float32([np.log(3) / 0.1, 0.0]), np.float32([1.0, 3.0])
    expected = 0.9 * np.log(4 / 3) + 0.1 * np.log(4) + 3 * np.log(2)
    assert float(dpo_loss(h, weights, 0.1, 0.1)[0]) == pytest.approx(expected, rel=1e-6)


def test_far_margins_stay_finite() -> None:
    h, one = jnp.array([-1e4, 1e4]), jnp.ones(2)
    value, gradient = jax.value_and_grad(lambda h: dpo_loss(h, one, 0.1, 0.1)[0])(h)
    assert float(value) == pytest.approx(1000 * 0.9 + 1000 * 0.1, rel=1e-5)
    np.testing.assert_allclose(gradient, [-0.09, 0.01], atol=1e-6)
