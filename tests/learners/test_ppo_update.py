"""PPO of a token policy: what critics, meshes, adapters, warm-up and the KL's weight must do."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.learners.ppo_config import NONE, TokenPPOConfig
from qrag_jax.learners.ppo_update import ppo_episodes
from qrag_jax.models.compute.lora import Adapted, merge
from qrag_jax.models.trunks.qwen3 import Qwen3
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.runtime.mesh import make_mesh
from tests.learners.ppo_updates import (
    CRITIC_RATE,
    PLAIN,
    SHAPE,
    Learning,
    assert_learns_alike,
    assert_trees_close,
    batch_of,
    moved,
)
from tests.learners.token_updates import CONFIG, adapters, log_probs, model

pytestmark = pytest.mark.long


def test_one_epoch_without_a_critic_is_reinforce() -> None:
    """γ = λ = 1: each token's gradient is −∇ log π times the reward of its episode."""
    batch, params = batch_of(), model()
    learning = Learning(dataclasses.replace(PLAIN, critic=NONE), params)
    # As if the policy itself had sampled, so that its weight for the sampler is 1.
    batch = batch._replace(sampler_log_probs=np.asarray(log_probs(params, batch)))
    learning.step(batch)

    def reinforce(params: Params) -> jax.Array:
        rewards = batch.rewards[batch.episode] * batch.loss_mask
        return -(jnp.where(batch.loss_mask, log_probs(params, batch), 0.0) * rewards).sum() / (
            batch.loss_mask.sum()
        )

    assert_trees_close(moved(learning.state.params, params), jax.grad(reinforce)(params))
    assert learning.state.critic is None


def test_the_value_loss_has_the_gradient_of_finite_differences() -> None:
    """Of the linear map, whose first gradient is that of ½ (0 − G)²."""
    batch, params = batch_of(), model()
    learning = Learning(PLAIN, params)
    head = learning.state.critic
    assert head is not None
    before = np.array(head.weights), float(head.bias)
    learning.step(batch)
    after = learning.state.critic
    assert after is not None
    gradient = (before[0] - np.array(after.weights)) / CRITIC_RATE
    of_bias = (before[1] - float(after.bias)) / CRITIC_RATE
    tokens = jnp.asarray(batch.tokens)
    hidden = np.asarray(Qwen3(CONFIG).hidden_states(params, tokens, jnp.asarray(batch.lengths)))
    row, place = np.nonzero(batch.loss_mask)
    of_states, returns = hidden[row, place - 1], batch.rewards[row, 0]

    def loss(weights: np.ndarray, bias: float) -> float:
        return 0.5 * np.mean((of_states @ weights + bias - returns) ** 2, dtype=np.float64)

    step = 1e-2
    for number in range(0, len(gradient), 5):
        aside = np.zeros(len(gradient))
        aside[number] = step
        slope = (loss(before[0] + aside, 0.0) - loss(before[0] - aside, 0.0)) / (2 * step)
        assert gradient[number] == pytest.approx(slope, abs=1e-4)
    slope = (loss(before[0], step) - loss(before[0], -step)) / (2 * step)
    assert of_bias == pytest.approx(slope, abs=1e-4)


def test_a_mesh_changes_no_number() -> None:
    config = TokenPPOConfig(kl=0.05, minibatches=2, epochs=2, lambda_=0.9)
    mesh = make_mesh((2, 2, 2), jax.devices()[:8])
    # Rounding grows with each step, so these are small.
    one = Learning(config, model(), rate=0.05)
    assert_learns_alike(Learning(config, model(), mesh=mesh, rate=0.05), one)


def test_adapters_learn_as_merged_weights_do() -> None:
    """Policy and critic have adapters of their own on one base, which stays as it is."""
    base, own = model(), adapters()
    config = dataclasses.replace(PLAIN, kl=0.05)
    learning, whole = Learning(config, own, base), Learning(config, merge(Adapted(base, own), 1.0))
    ours, theirs = learning.step(batch_of()), whole.step(batch_of())
    for name in ("loss", "value_loss", "entropy", "advantage"):
        assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name
    critic = learning.state.critic
    assert critic is not None
    assert jax.tree.structure(critic.tower) == jax.tree.structure(own)
    # A zero head gives the tower no gradient yet; the second update moves both, apart.
    learning.step(batch_of(1))
    after = learning.state.critic
    assert after is not None
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(moved(after.tower, own))) > 1e-6


def test_only_the_critic_learns_while_it_warms_up() -> None:
    learning = Learning(PLAIN, model(), rests_until=1)
    learning.step(batch_of())
    assert_trees_close(learning.state.params, model(), atol=0)
    assert learning.state.critic is not None
    assert np.abs(learning.state.critic.weights).max() > 0
    learning.step(batch_of())
    assert (
        max(np.abs(leaf).max() for leaf in jax.tree.leaves(moved(learning.state.params, model())))
        > 1e-4
    )


def test_values_come_near_the_returns() -> None:
    """The critic learns: what it explains of the returns grows from nothing."""
    learning = Learning(dataclasses.replace(PLAIN, value_clip=10.0), model(), rests_until=1000)
    explained = [learning.step(batch_of())["explained_variance"] for _ in range(12)]
    assert explained[0] < 0.2
    assert explained[-1] > explained[0] + 0.2


def test_a_reward_that_is_not_finite_teaches_nothing() -> None:
    batch = batch_of()
    batch.rewards[0] = np.inf
    learning = Learning(PLAIN, model())
    assert learning.step(batch)["skipped"] == 1.0
    assert_trees_close(learning.state.params, model(), atol=0)
    assert learning.state.critic is not None
    assert np.abs(learning.state.critic.weights).max() == 0
    assert learning.step(batch_of())["skipped"] == 0.0


def test_an_episode_of_two_rows_is_refused() -> None:
    batch = batch_of()
    batch.episode[5] = 4
    learning = Learning(PLAIN, model())
    with pytest.raises(ValueError, match="episode 4 has 2 rows"):
        ppo_episodes(learning.policy, batch, SHAPE)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"gamma": 1.5}, "config.ppo.gamma is 1.5; it must be 0 to 1."),
        ({"minibatches": 0}, "config.ppo.minibatches is 0"),
        ({"critic": "both"}, "config.ppo.critic is 'both'"),
        ({"kl_in": "both"}, "config.ppo.kl_in is 'both'"),
        ({"kl": -0.1}, "config.ppo.kl is -0.1"),
        ({"critic": "none", "critic_warmup": 2}, "nothing would learn"),
        ({"critic_learning_rate": 0.0}, "config.ppo.critic_learning_rate is 0.0"),
        ({"sampler_cap": 0.5}, "config.ppo.sampler_cap is 0.5"),
    ],
)
def test_wrong_constants_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told.replace("(", r"\(")):
        TokenPPOConfig(**fields)
