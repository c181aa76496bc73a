"""PPO of a token policy: REINFORCE as its limit, the critic, its warm-up, what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.learners.config import NONE, TokenPPOConfig
from qrag_jax.learners.token_update import token_episodes
from qrag_jax.models.trunks.qwen3 import Qwen3
from tests.learners.updates import (
    BLOCKS,
    CRITIC_RATE,
    DECODER,
    RATE,
    WEIGHTS,
    assert_close,
    check_moved,
    log_probs,
    model,
    one_row_each,
    tokens,
)
from tests.rollouts.token_setup import made_batch

PLAIN = TokenPPOConfig(kl=0.0, entropy=0.0, whiten=False, sampler_cap=1e9, value_clip=10.0)


def returns_of(batch: Any) -> np.ndarray:
    """The reward of each row's episode, `[R]`."""
    return np.append(batch.rewards @ np.array(WEIGHTS), 0.0)[batch.episode]


def test_one_epoch_without_a_critic_is_reinforce() -> None:
    """γ = λ = 1: each token's gradient is −∇ log π times the reward of its episode."""
    batch, params = one_row_each(), model()
    learning = tokens(dataclasses.replace(PLAIN, critic=NONE))
    # As if the policy itself had sampled, so that its weight for the sampler is 1.
    batch = batch._replace(sampler_log_probs=np.asarray(log_probs(params, batch)))
    learning.step(batch)

    def reinforce(params: Any) -> jax.Array:
        rewards = returns_of(batch)[:, None] * batch.loss_mask
        total = (jnp.where(batch.loss_mask, log_probs(params, batch), 0.0) * rewards).sum()
        return -total / batch.loss_mask.sum()

    check_moved(learning.state.params, params, jax.grad(reinforce)(params), rate=RATE)
    assert learning.state.critic is None


def test_only_the_critic_learns_while_it_warms_up_and_it_regresses_on_the_returns() -> None:
    batch, params = one_row_each(), model()
    learning = tokens(PLAIN, rests_until=1)
    head = jax.device_get(learning.state.critic)
    metrics = learning.step(batch)
    assert_close(learning.learned["params"], params, atol=0)
    row, place = np.nonzero(batch.loss_mask)

    def by_definition(tower: Any, weights: jax.Array, bias: jax.Array) -> jax.Array:
        arrays = jnp.asarray(batch.tokens), jnp.asarray(batch.lengths)
        hidden = Qwen3(DECODER).hidden_states(tower, *arrays)[row, place - 1]
        errors = hidden @ weights + bias - returns_of(batch)[row].astype(np.float32)
        return 0.5 * jnp.square(errors).mean()

    start = params, jnp.asarray(head.weights), jnp.asarray(head.bias)
    value, gradient = jax.jit(jax.value_and_grad(by_definition, (0, 1, 2)))(*start)
    assert metrics["value_loss"] == pytest.approx(float(value), rel=1e-5)
    check_moved(tuple(learning.state.critic), start, gradient, rate=CRITIC_RATE, rtol=2e-5)
    explained = [learning.step(batch)["explained_variance"] for _ in range(12)]
    assert explained[-1] > explained[0] + 0.2
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), learning.learned["params"], params)
    assert max(jax.tree.leaves(moved)) > 1e-4


def test_batches_that_cannot_be_learned_from_are_refused() -> None:
    policy = tokens(dataclasses.replace(PLAIN, minibatches=5)).program.policy
    with pytest.raises(ValueError, match="minibatches"):
        token_episodes(policy, one_row_each(), BLOCKS)
    with pytest.raises(ValueError, match="episode 5 has 2 rows"):
        token_episodes(tokens(PLAIN).program.policy, made_batch(), BLOCKS)
