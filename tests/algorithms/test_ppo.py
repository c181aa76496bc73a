"""PPO of a Plackett–Luce policy as a whole, against a torch version written from the papers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from qrag_jax.algorithms.advantages import gae, whitened
from qrag_jax.algorithms.policy_gradient import (
    BNPO,
    Clip,
    aggregation,
    clipped,
    clipped_value_loss,
    kl_k1,
    weighted_sum,
)
from qrag_jax.policies.plackett_luce import entropy, log_prob

EPISODES, LONGEST, POOL, PASSAGES = 7, 4, 6, 3
BETA, GAMMA, LAMBDA = 0.05, 0.97, 0.9
VALUE_WEIGHT, ENTROPY_WEIGHT, MOST = 0.1, 0.01, 0.2


class Played:
    """Episodes of pools and ordered draws, and who acted; an episode may have no action."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        shape = EPISODES, LONGEST
        self.logits = rng.normal(0, 1.5, (*shape, POOL)).astype(np.float32)
        drawn = rng.permuted(np.broadcast_to(np.arange(POOL), self.logits.shape), axis=-1)
        self.actions = drawn[..., :PASSAGES].astype(np.int32)
        acted = np.asarray(log_prob(jnp.asarray(self.logits), jnp.asarray(self.actions)))
        self.old, self.reference = (acted + rng.normal(0, 0.3, (2, *shape))).astype(np.float32)
        self.values = rng.normal(size=shape).astype(np.float32)
        self.old_values = (self.values + rng.normal(0, 0.3, shape)).astype(np.float32)
        self.answer = rng.random(EPISODES).astype(np.float32)  # the reward of a whole episode
        self.valid = rng.random(shape) < 0.7
        self.valid[0], self.valid[1] = False, True


def by_torch(played: Played, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Episode by episode and draw by draw; one list of the actions there are."""
    new, old, advantages, returns, entropies, guessed, before = ([] for _ in range(7))
    for row in range(EPISODES):
        steps = np.flatnonzero(played.valid[row]).tolist()
        rewards = [
            -BETA * float(played.old[row, t] - played.reference[row, t])
            + (float(played.answer[row]) if t == steps[-1] else 0.0)
            for t in steps
        ]
        worth = [float(played.old_values[row, t]) for t in steps] + [0.0]
        advantage, found = 0.0, []
        for i in reversed(range(len(steps))):
            error = rewards[i] + GAMMA * worth[i + 1] - worth[i]
            advantage = error + GAMMA * LAMBDA * advantage
            found.insert(0, advantage)
        for i, t in enumerate(steps):
            left, total = list(range(POOL)), torch.zeros((), dtype=torch.float64)
            for place in played.actions[row, t].tolist():
                chances = torch.log_softmax(logits[row, t, left], dim=-1)
                total = total + chances[left.index(place)]
                left.remove(place)
            first = torch.softmax(logits[row, t], dim=-1)
            entropies.append(-(first * torch.log(first)).sum())
            new.append(total)
            old.append(float(played.old[row, t]))
            advantages.append(found[i])
            returns.append(found[i] + worth[i])
            guessed.append(values[row, t])
            before.append(worth[i])
    a, r, b = (torch.tensor(each, dtype=torch.float64) for each in (advantages, returns, before))
    ratio = torch.exp(torch.stack(new) - torch.tensor(old, dtype=torch.float64))
    a = (a - a.mean()) / a.std()
    policy = torch.maximum(-a * ratio, -a * torch.clamp(ratio, 0.8, 1.2)).mean()
    v = torch.stack(guessed)
    bounded = torch.maximum(torch.minimum(v, b + MOST), b - MOST)
    value = 0.5 * torch.maximum((v - r) ** 2, (bounded - r) ** 2).mean()
    return policy + VALUE_WEIGHT * value - ENTROPY_WEIGHT * torch.stack(entropies).mean()


def ours(logits: jax.Array, values: jax.Array, played: Played) -> jax.Array:
    valid = played.valid
    last = valid & (np.cumsum(valid[:, ::-1], axis=1)[:, ::-1] == 1)
    rewards = played.answer[:, None] * last - BETA * kl_k1(played.old, played.reference)
    advantages, returns = gae(rewards, played.old_values, valid, GAMMA, LAMBDA)
    advantages = whitened(advantages, valid)
    each = clipped(log_prob(logits, played.actions), played.old, advantages, Clip())
    each += VALUE_WEIGHT * clipped_value_loss(values, played.old_values, returns, MOST)
    each -= ENTROPY_WEIGHT * entropy(logits)
    weights = aggregation(BNPO, valid, LONGEST)
    return weighted_sum(each, weights.each) / weights.divisor


def test_loss_and_gradients_are_those_of_torch() -> None:
    played = Played()
    logits, values = (
        torch.tensor(each, dtype=torch.float64, requires_grad=True)
        for each in (played.logits, played.values)
    )
    expected = by_torch(played, logits, values)
    expected.backward()
    assert logits.grad is not None
    assert values.grad is not None

    given = jnp.asarray(played.logits), jnp.asarray(played.values)
    whole = jax.jit(jax.value_and_grad(lambda *x: ours(*x, played), argnums=(0, 1)))
    found, (of_logits, of_values) = whole(*given)
    assert float(found) == pytest.approx(expected.item(), abs=1e-5)
    np.testing.assert_allclose(of_logits, logits.grad, atol=1e-4 * float(logits.grad.abs().max()))
    np.testing.assert_allclose(of_values, values.grad, atol=1e-4 * float(values.grad.abs().max()))
    assert (np.asarray(of_logits)[~played.valid] == 0).all()
