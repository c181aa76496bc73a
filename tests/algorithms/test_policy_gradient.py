"""Clipped policy gradients by hand, against torch versions of the papers, and in their limits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from qrag_jax.algorithms.policy_gradient import (
    AGGREGATIONS,
    BNPO,
    DAPO,
    DR_GRPO,
    GRPO,
    Clip,
    aggregation,
    clipped,
    clipped_value_loss,
    clipped_weight,
    correction,
    departure,
    kl_k1,
    kl_k3,
    of_sequence,
    only,
    sampler_weights,
    weighted_sum,
)

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


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_parts_of_a_batch_add_up(name: str) -> None:
    drawn, parts = Drawn(1), []
    whole = ours(jnp.asarray(drawn.new), drawn, name, 0.1)
    for rows in (slice(0, 3), slice(3, 8)):
        part = Drawn(1)
        for field, array in vars(drawn).items():
            setattr(part, field, array[rows])
        parts.append(ours(jnp.asarray(part.new), part, name, 0.1))
    np.testing.assert_allclose(np.sum(parts, axis=0), whole, rtol=1e-6)


def test_what_is_not_learned_from_is_not_read() -> None:
    gradients = []
    for absent in (1.0, np.nan):
        drawn = Drawn(2)
        for array in (drawn.new, drawn.old, drawn.reference, drawn.advantages):
            array[~drawn.valid] = absent
        drawn.old, drawn.reference, drawn.advantages = map(
            np.asarray, only(drawn.valid, drawn.old, drawn.reference, drawn.advantages)
        )

        def total(log_prob: jax.Array, drawn: Drawn = drawn) -> jax.Array:
            return ours(*only(drawn.valid, log_prob), drawn, GRPO, 0.1)[0]

        gradients.append(np.asarray(jax.grad(total)(jnp.asarray(drawn.new))))
        seen = departure(drawn.new, drawn.old, drawn.advantages, drawn.valid)
        assert all(np.isfinite(each) for each in seen)
    np.testing.assert_array_equal(*gradients)
    assert (gradients[1][~drawn.valid] == 0).all()


def test_clipping_by_hand() -> None:
    """Ratios 0.5, 1 and 2; a gain is bounded where the ratio has gone the way of its advantage."""
    old = jnp.zeros(6)
    new = jnp.log(jnp.array([0.5, 1.0, 2.0, 0.5, 1.0, 2.0]))
    advantages = jnp.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    found = clipped(new, old, advantages, Clip(0.2, 0.3))
    np.testing.assert_allclose(found, [-0.5, -1.0, -1.3, 0.8, 1.0, 2.0], rtol=1e-6)
    slopes = jax.grad(lambda x: clipped(x, old, advantages, Clip(0.2, 0.3)).sum())(new)
    np.testing.assert_allclose(slopes, [-0.5, -1.0, 0.0, 0.0, 1.0, 2.0], rtol=1e-6)
    seen = departure(new, old, advantages, jnp.ones(6, bool), Clip(0.2, 0.3))
    assert (float(seen.clipped), float(seen.actions)) == (2.0, 6.0)
    assert float(seen.largest) == pytest.approx(2.0)


@pytest.mark.parametrize("gone", [-200.0, 200.0])  # e^89 is infinite in float32
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
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


@pytest.mark.parametrize(("gone", "slope"), [(-200.0, 0.0), (-3.0, 1 - np.exp(3)), (200.0, 1.0)])
def test_kl_never_pushes_a_policy_away_from_its_reference(gone: float, slope: float) -> None:
    """d/dx [exp(r − x) − (r − x) − 1] = 1 − exp(r − x): below 0 where x is below r."""
    found = jax.grad(kl_k3)(jnp.float32(gone), jnp.float32(0.0))
    assert float(found) == pytest.approx(slope, rel=1e-5)


def test_cispo_keeps_every_gradient() -> None:
    old, new = jnp.zeros(3), jnp.log(jnp.array([0.5, 1.0, 2.0]))
    slopes = jax.grad(lambda x: clipped_weight(x, old, jnp.ones(3), Clip(1.0, 0.3)).sum())(new)
    np.testing.assert_allclose(slopes, [-0.5, -1.0, -1.3], rtol=1e-6)


def test_the_ratio_of_a_sequence() -> None:
    """exp of the mean difference for all; each action has the gradient of its own log-prob."""
    new = jnp.array([[0.1, 0.4, jnp.nan], [0.0, 0.2, 0.4]])
    old, valid = jnp.zeros((2, 3)), np.array([[True, True, False], [True, True, True]])
    found = of_sequence(new, old, valid)
    np.testing.assert_allclose(np.asarray(found)[valid], [0.25, 0.25, 0.2, 0.2, 0.2], rtol=1e-5)

    def total(log_prob: jax.Array) -> jax.Array:
        each = jnp.exp(of_sequence(log_prob, old, valid))
        return jnp.where(valid, each, 0.0).sum()

    slopes = jax.grad(total)(jnp.nan_to_num(new))
    np.testing.assert_allclose(slopes, np.where(valid, np.exp([[0.25], [0.2]]), 0.0), rtol=1e-5)


def test_sampler_weights_are_bounded_constants() -> None:
    old, sampler = jnp.log(jnp.array([0.2, 0.9])), jnp.log(jnp.array([0.4, 0.3]))
    np.testing.assert_allclose(sampler_weights(old, sampler), [0.5, 2.0], rtol=1e-6)
    assert (jax.jacobian(sampler_weights)(old, sampler) == 0).all()


def test_how_far_a_sampler_is() -> None:
    old = jnp.log(jnp.array([[0.2, 0.9, 0.5], [0.4, 0.4, 0.1]]))
    sampler = jnp.log(jnp.array([[0.4, 0.3, 0.5], [0.2, 0.1, 0.1]]))
    valid = jnp.array([[True, True, True], [True, False, False]])
    found = correction(old, sampler.at[1, 1].set(jnp.nan), valid, most=2.5)
    ratios = np.array([0.5, 3.0, 1.0, 2.0])
    assert float(found.kl) == pytest.approx((ratios - 1 - np.log(ratios)).sum(), rel=1e-5)
    assert float(found.largest) == pytest.approx(3.0, rel=1e-5)
    assert (float(found.truncated), float(found.actions)) == (1, 4)
    used = np.minimum(ratios, 2.5)
    share = used.sum() ** 2 / (used**2).sum() / 4
    assert float(found.effective_share()) == pytest.approx(share, rel=1e-5)
    same = correction(old, old, valid)
    assert float(same.effective_share()) == pytest.approx(1.0, rel=1e-6)
    assert float(same.kl) == pytest.approx(0.0, abs=1e-6)


def test_estimates_of_kl() -> None:
    """Over all actions of two policies both are KL(π, π_ref), and k3 is never negative."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, 6))
    policy, reference = (np.exp(x) / np.exp(x).sum() for x in logits)
    kl = (policy * np.log(policy / reference)).sum()
    given = (jnp.log(jnp.asarray(p, jnp.float32)) for p in (policy, reference))
    new, ref = given
    assert float((policy * kl_k1(new, ref)).sum()) == pytest.approx(kl, abs=1e-5)
    assert float((policy * kl_k3(new, ref)).sum()) == pytest.approx(kl, abs=1e-5)
    assert (np.asarray(kl_k3(new, ref)) >= 0).all()


def test_value_loss_is_that_of_torch() -> None:
    rng = np.random.default_rng(5)
    values, old, returns = rng.normal(size=(3, 30)).astype(np.float32)
    given = [torch.tensor(each, dtype=torch.float64) for each in (values, old, returns)]
    v, v_old, g = given
    v.requires_grad_()
    bounded = torch.maximum(torch.minimum(v, v_old + 0.2), v_old - 0.2)
    expected = 0.5 * torch.maximum((v - g) ** 2, (bounded - g) ** 2)
    expected.sum().backward()
    assert v.grad is not None
    found = clipped_value_loss(jnp.asarray(values), old, returns, 0.2)
    np.testing.assert_allclose(found, expected.detach(), atol=1e-5)
    slope = jax.grad(lambda x: clipped_value_loss(x, old, returns, 0.2).sum())(jnp.asarray(values))
    np.testing.assert_allclose(slope, v.grad, atol=1e-4)
