"""Updates of a token policy against losses by their definition, row by row; PPO in its limits."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.learners.config import LOSS, NONE, REWARD, SFTConfig, TokenGRPOConfig, TokenPPOConfig
from qrag_jax.learners.state import Critic
from qrag_jax.learners.token_policy import row_log_probs
from qrag_jax.models.compute.lora import Adapted, folded
from qrag_jax.rollouts.trajectories import TokenBatch, choose_shape
from tests.learners import updates
from tests.learners.updates import assert_close, check_moved, log_probs, model, tokens
from tests.rollouts import token_setup
from tests.rollouts.token_setup import MEMBERS, PAIRS, made_batch

KEPT = np.setdiff1d(np.arange(PAIRS), [token_setup.CUT_OFF])


def learned(batch: TokenBatch, *, flat: bool = False) -> np.ndarray:
    """The tokens `[R, L]` of scored members of groups that differ, or that are flat, too."""
    keep = np.zeros(len(batch.scored) + 1, bool)
    totals = batch.rewards
    for first in range(0, len(batch.scored), MEMBERS):
        rows = [n for n in range(first, first + MEMBERS) if batch.scored[n]]
        keep[rows] = flat or np.ptp(totals[rows]) > 0
    return batch.loss_mask & keep[batch.episode][:, None]


def test_of_each_group_only_the_best_may_be_imitated() -> None:
    batch, params = made_batch(), model()
    batch = batch._replace(sampler_log_probs=np.asarray(log_probs(params, batch)))
    config = TokenGRPOConfig(members=MEMBERS, learned="best", aggregation="dr_grpo", longest=10)
    learning = tokens(config)
    metrics = learning.step(batch)
    totals = batch.rewards.reshape(-1, MEMBERS)
    totals = np.where(batch.scored.reshape(totals.shape), totals, -np.inf)
    kept = [len({r for r in row if np.isfinite(r)}) > 1 for row in totals]
    best = [MEMBERS * n + int(totals[n].argmax()) for n in np.flatnonzero(kept)]
    imitated = batch.loss_mask & np.isin(batch.episode, best)[:, None]
    episodes = len(np.unique(batch.episode[learned(batch, flat=True).any(axis=1)]))

    def by_hand(params: Any) -> Any:
        return -jnp.where(imitated, log_probs(params, batch), 0.0).sum() / (10 * episodes)

    gradient = jax.jit(jax.grad(by_hand))(params)
    check_moved(learning.state.params, params, gradient, rate=updates.RATE)
    assert metrics["tokens"] == learned(batch).sum()


@pytest.mark.parametrize("in_parts", [True, False])
def test_completions_of_one_prompt_learn_as_each_would_alone(in_parts: bool) -> None:
    """In blocks where the prompt is computed once; attention in parts, or by whole rows."""
    batch, params = made_batch(), model()
    shape = choose_shape(batch, 120, MEMBERS)
    assert shape.own
    learning = tokens(SFTConfig(), shape=shape if in_parts else shape._replace(own=0))
    learning.step(batch)

    def by_hand(params: Any) -> Any:
        of_learned = jnp.where(batch.loss_mask, log_probs(params, batch), 0.0)
        return -of_learned.sum() / batch.loss_mask.sum()

    check_moved(learning.state.params, params, jax.grad(by_hand)(params), rate=updates.RATE)


# ------------------------------------------------------------------------ pairs


def of_sequences(params: Any, batch: Any) -> jax.Array:
    """Log-probability `[N]` of each episode, row by row without packing."""
    mask = batch.loss_mask[: len(batch.scored)]
    return jnp.where(mask, log_probs(params, batch)[: len(mask)], 0.0).sum(axis=1)


def ipo(params: Any, batch: Any, reference: Any) -> Any:
    """The mean loss, pair by pair, as the paper has it."""
    policy, total = of_sequences(params, batch), 0.0
    for winner in 2 * KEPT:
        loser = winner + 1
        h = (policy[winner] - policy[loser]) - (reference[winner] - reference[loser])
        total += (h - 1 / (2 * updates.IPO.beta)) ** 2
    return total / len(KEPT)


def test_ipo_of_sums_is_that_of_the_definition() -> None:
    """TRL has it of averages alone; DPO is compared with TRL."""
    (batch, _), params = updates.pairs(), model(tied=False)
    far = np.random.default_rng(8).normal(0, 3, 2 * PAIRS)
    reference = (np.asarray(of_sequences(params, batch)) + far).astype(np.float32)
    learning = tokens(updates.IPO, tied=False)
    metrics = learning.step(batch, reference)
    slow = jax.jit(jax.value_and_grad(lambda p: ipo(p, batch, reference)))
    value, gradient = slow(params)
    check_moved(learning.state.params, params, gradient, rate=updates.RATE)
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-4)
    assert metrics["pairs"] == len(KEPT)


def test_the_reference_of_adapters_on_a_mesh() -> None:
    learning, batch = tokens(updates.IPO, updates.SPLIT, adapted=True), token_setup.made_pairs()
    of_rows = row_log_probs(learning.program.learner)
    found = of_rows(learning.state.params, batch, updates.BLOCKS, *learning.program.base)
    expected = of_sequences(folded(Adapted(model(), updates.adapters()), 1.0), batch)
    np.testing.assert_allclose(found, expected, atol=2e-5)


# ------------------------------------------------------------------------ PPO

IN_LOSS = TokenPPOConfig(kl=0.1, kl_in=LOSS, whiten=False, entropy=0.01, gamma=0.99)
IN_REWARD = TokenPPOConfig(kl=0.1, lambda_=0.9, value_clip=0.05, epochs=2, minibatches=2)


class Known(NamedTuple):
    """Of each token `[R, L]`, before the first step."""

    old: Any
    reference: Any
    values: Any
    advantages: Any
    returns: Any


def values_of(critic: Critic, batch: TokenBatch) -> jax.Array:
    """The value of what stands before each token."""
    values = updates.hidden(critic.tower, batch) @ critic.weights + critic.bias
    return jnp.pad(values[:, :-1], ((0, 0), (1, 0)))


def known(config: TokenPPOConfig, params: Any, critic: Any, first: Any, batch: Any) -> Known:
    """Returns and advantages token by token, from the last one to the first."""
    mask, values = batch.loss_mask, np.asarray(values_of(critic, batch))
    old, reference = (np.asarray(log_probs(each, batch)) for each in (params, first))
    rewards = -config.kl * (old - reference) * (config.kl_in == REWARD)
    advantages = np.zeros(mask.shape, np.float32)
    for row in np.flatnonzero(mask.any(axis=1)):
        places, after, advantage = np.flatnonzero(mask[row]), 0.0, 0.0
        rewards[row, places[-1]] += batch.rewards[batch.episode[row]]
        for place in reversed(places):
            error = rewards[row, place] + config.gamma * after - values[row, place]
            advantage = error + config.gamma * config.lambda_ * advantage
            after, advantages[row, place] = values[row, place], advantage
    returns, learned = advantages + values, advantages[mask]
    if config.whiten:
        advantages = (advantages - learned.mean()) / np.sqrt(learned.var(ddof=1) + 1e-8)
    return Known(old, reference, values, advantages, returns)


def ppo_loss(
    config: TokenPPOConfig, both: Any, batch: TokenBatch, given: Known, mask: Any
) -> tuple[jax.Array, jax.Array]:
    """The mean losses of policy and critic over the tokens of `mask`; their sum, and each."""
    params, critic = both
    new, entropy = updates.log_probs_and_entropy(params, batch)
    old = jax.lax.stop_gradient(new) if config.updates_per_batch == 1 else given.old
    ratio = jnp.exp(jnp.where(mask, new - old, 0.0))
    bounded = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    each = -jnp.minimum(ratio * given.advantages, bounded * given.advantages)
    each *= jnp.minimum(jnp.exp(old - batch.sampler_log_probs), config.sampler_cap)
    if config.kl_in == LOSS:
        away = given.reference - new
        each += config.kl * (jnp.exp(away) - away - 1)
    each -= config.entropy * entropy
    values = values_of(critic, batch)
    near = jnp.clip(values, given.values - config.value_clip, given.values + config.value_clip)
    errors = jnp.maximum(jnp.square(values - given.returns), jnp.square(near - given.returns))
    means = [jnp.where(mask, x, 0.0).sum() / mask.sum() for x in (each, 0.5 * errors)]
    return means[0] + means[1], jnp.stack(means)


@pytest.mark.parametrize("config", [IN_LOSS, IN_REWARD], ids=["one step", "minibatches"])
def test_ppo_is_that_of_the_definition(config: TokenPPOConfig) -> None:
    """Twice, so that values, returns and ratios to the reference have moved."""
    batch, rates = updates.one_row_each(), (0.05, updates.CRITIC_RATE)
    learning, first = tokens(config, rate=rates[0]), model()
    slow = jax.jit(jax.value_and_grad(partial(ppo_loss, config), has_aux=True))
    part = batch.episode // (len(batch.scored) // config.minibatches)
    for number in range(2):
        start = jax.device_get((learning.state.params, learning.state.critic))
        given, moved, losses = known(config, *start, first, batch), start, []
        for minibatch in [*range(config.minibatches)] * config.epochs:
            mask = batch.loss_mask & (part == minibatch)[:, None]
            (_, means), gradient = slow(moved, batch, given, mask)
            losses.append(means)
            moved = tuple(
                jax.tree.map(lambda leaf, g, rate=rate: leaf - rate * g, *each)
                for rate, each in zip(rates, zip(moved, gradient), strict=True)
            )
        metrics = learning.step(batch)
        for name, value in zip(("loss", "value_loss"), np.mean(losses, axis=0), strict=True):
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=2e-5)
        assert metrics["tokens"] == batch.loss_mask.sum()
        assert (metrics["kl"] != 0) == (number > 0)
        after = learning.state.params, learning.state.critic
        for rate, found, before, expected in zip(rates, after, start, moved, strict=True):
            gradient = jax.tree.map(lambda a, b, rate=rate: (a - b) / rate, before, expected)
            check_moved(found, before, gradient, rate=rate, rtol=1e-4)


PPO = TokenPPOConfig(kl=0.0, entropy=0.0, whiten=False, sampler_cap=1e9, value_clip=10.0)


def test_one_epoch_of_ppo_without_a_critic_is_reinforce() -> None:
    """γ = λ = 1: each token's gradient is −∇ log π times the reward of its episode."""
    batch, params = updates.one_row_each(), model()
    learning = tokens(dataclasses.replace(PPO, critic=NONE))
    # As if the policy itself had sampled, so that its weight for the sampler is 1.
    batch = batch._replace(sampler_log_probs=np.asarray(log_probs(params, batch)))
    learning.step(batch)
    rewards = np.append(batch.rewards, 0.0)[batch.episode][:, None]

    def reinforce(params: Any) -> jax.Array:
        total = jnp.where(batch.loss_mask, log_probs(params, batch), 0.0) * rewards
        return -total.sum() / batch.loss_mask.sum()

    gradient = jax.jit(jax.grad(reinforce))(params)
    check_moved(learning.state.params, params, gradient, rate=updates.RATE)
    assert learning.state.critic is None


def test_only_the_critic_learns_while_it_warms_up_and_it_explains_ever_more() -> None:
    batch, learning = updates.one_row_each(), tokens(PPO, rests_until=1)
    before, explained = learning.learned, [learning.step(batch)["explained_variance"]]
    assert_close(learning.learned["params"], before["params"], atol=0)
    explained += [learning.step(batch)["explained_variance"] for _ in range(12)]
    assert explained[-1] > explained[0] + 0.2
    learned = learning.learned["params"]
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), learned, before["params"])
    assert max(jax.tree.leaves(moved)) > 1e-4
