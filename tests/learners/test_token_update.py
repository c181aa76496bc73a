"""GRPO of a token policy beside its loss by the definition, row by row; PPO in its limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.learners.config import CISPO, NONE, SEQUENCE, TokenGRPOConfig, TokenPPOConfig
from qrag_jax.learners.token_update import token_episodes
from qrag_jax.rollouts.trajectories import TokenBatch
from tests.learners.updates import (
    BLOCKS,
    GRPO,
    RATE,
    WEIGHTS,
    assert_close,
    check_moved,
    log_probs,
    model,
    one_row_each,
    tokens,
)
from tests.rollouts.token_setup import GROUPS, MEMBERS, made_batch
from tests.support.decoders import given_tokens

PLAIN = TokenGRPOConfig(members=MEMBERS, longest=16, clip_low=1.0, ratio=CISPO)
TWICE = TokenGRPOConfig(
    members=MEMBERS, longest=16, aggregation="bnpo", ratio=SEQUENCE, epochs=2, beta=0.1
)


def advantages(batch: TokenBatch, *, scaled: bool) -> np.ndarray:
    """Of each episode `[N]`: its reward less the mean of its group's scored members."""
    found, totals = np.zeros(len(batch.scored)), batch.rewards @ np.array(WEIGHTS)
    for first in range(0, len(found), MEMBERS):
        rows = [n for n in range(first, first + MEMBERS) if batch.scored[n]]
        spread = totals[rows].std(ddof=1) + 1e-4 if scaled else 1.0
        found[rows] = (totals[rows] - totals[rows].mean()) / spread
    return found


def learned(batch: TokenBatch, *, flat: bool = False) -> np.ndarray:
    """The tokens `[R, L]` of scored members of groups that differ, or that are flat, too."""
    keep = np.zeros(len(batch.scored) + 1, bool)
    totals = batch.rewards @ np.array(WEIGHTS)
    for first in range(0, len(batch.scored), MEMBERS):
        rows = [n for n in range(first, first + MEMBERS) if batch.scored[n]]
        keep[rows] = flat or np.ptp(totals[rows]) > 0
    return batch.loss_mask & keep[batch.episode][:, None]


def loss(params: Any, batch: TokenBatch, config: Any, old: Any = None, reference: Any = None):
    """The mean loss, token by token, as the papers have it."""
    new = log_probs(params, batch)
    mask = learned(batch, flat=True)
    before = jax.lax.stop_gradient(new) if old is None else jnp.asarray(old)
    given = np.append(advantages(batch, scaled=config.scaled), 0.0)[batch.episode][:, None]
    difference = jnp.where(mask, new - before, 0.0)
    ratio = jnp.exp(difference)
    if config.ratio == SEQUENCE:
        count = np.maximum(mask.sum(axis=1, keepdims=True), 1)
        mean = difference.sum(axis=1, keepdims=True) / count
        own = difference - jax.lax.stop_gradient(difference)
        ratio = jnp.exp(jax.lax.stop_gradient(mean) + own)
    bounded = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    if config.ratio == CISPO:
        each = -jax.lax.stop_gradient(bounded) * given * new
    else:
        each = -jnp.minimum(ratio * given, bounded * given)
    weights = jnp.minimum(jnp.exp(before - batch.sampler_log_probs), config.sampler_cap)
    each = each * jax.lax.stop_gradient(weights)
    if config.beta:
        away = jnp.asarray(reference) - new
        each += config.beta * (jnp.exp(away) - away - 1)
    each = jnp.where(mask, each, 0.0)
    counts = np.bincount(batch.episode, mask.sum(axis=1), len(batch.scored) + 1)[:-1]
    episodes = (counts > 0).sum()
    if config.aggregation == "grpo":
        lengths = np.maximum(np.append(counts, 0), 1)[batch.episode]
        return (each / lengths[:, None]).sum() / episodes
    divisor = episodes * config.longest if config.aggregation == "dr_grpo" else counts.sum()
    return each.sum() / divisor


@pytest.mark.parametrize("config", [PLAIN, TWICE, GRPO], ids=["CISPO", "twice", "KL"])
def test_updates_are_those_of_the_definition(config: TokenGRPOConfig) -> None:
    """Two in a row; a group is flat, so it counts in the divisor and has no advantage."""
    batch, expected = made_batch(), model()
    learning, reference = tokens(config), np.asarray(log_probs(expected, batch))
    for _ in range(2):
        metrics = learning.step(batch)
        old = np.asarray(log_probs(expected, batch)) if config.epochs > 1 else None
        first = None
        for _ in range(config.epochs):
            value, gradient = jax.value_and_grad(loss)(expected, batch, config, old, reference)
            first = value if first is None else first
            before, expected = expected, jax.tree.map(lambda p, g: p - RATE * g, expected, gradient)
        if config.epochs == 1:
            check_moved(learning.state.params, before, gradient, rate=RATE, rtol=3e-5)
            expected = jax.tree.map(np.asarray, learning.state.params)
        else:
            for ours, theirs in zip(*map(jax.tree.leaves, (learning.state.params, expected))):
                np.testing.assert_allclose(ours, theirs, atol=3e-5)
        assert metrics["loss"] == pytest.approx(float(first), abs=1e-5)
    assert (metrics["kl"] > 1e-6) == bool(config.beta)
    assert metrics["tokens"] == learned(batch, flat=bool(config.beta)).sum()


def test_metrics_are_those_of_the_definition() -> None:
    batch, mask = made_batch(), learned(made_batch())
    metrics = tokens(PLAIN).step(batch)
    totals = (batch.rewards @ np.array(WEIGHTS))[batch.scored]
    scored = np.abs(advantages(batch, scaled=False)).sum() / batch.scored.sum()
    ratio = np.exp(np.asarray(log_probs(model(), batch)) - batch.sampler_log_probs)[mask]
    used = np.minimum(ratio, PLAIN.sampler_cap)
    expected = {
        "tokens": mask.sum(),
        "env_steps": mask.sum(),
        "flat_groups": 1 / GROUPS,
        "unscored_share": 1 / len(batch.scored),
        "return": totals.mean(),
        "advantage": scored,
        "kl_old": 0.0,
        "sampler_kl": (ratio - 1 - np.log(ratio)).mean(),
        "sampler_effective": used.sum() ** 2 / (used**2).sum() / len(used),
        "sampler_truncated": (ratio > PLAIN.sampler_cap).mean(),
        "sampler_largest_ratio": np.maximum(ratio, 1 / ratio).max(),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4, abs=1e-6), name


def test_what_groups_must_differ_by_chooses_groups_alone() -> None:
    batch, rewards = made_batch(), np.array([0.0, 0.1, 0.2, 0.9], np.float32)
    parts = np.repeat([0.0, 1.0, 0.0], [4, 3, 5])  # only those of the second group differ
    batch = batch._replace(
        rewards=np.stack([np.tile(rewards, 3), parts], axis=1),
        scored=np.ones(12, bool),
        loss_mask=batch.log_prob_mask,
    )
    policy = tokens(dataclasses.replace(PLAIN, members=4)).program.learner
    policy = dataclasses.replace(policy, weights=(1.0, 0.0))
    episodes = token_episodes(policy, batch, BLOCKS._replace(members=4), differ_by=1)
    blocks, given, _ = given_tokens(policy, episodes)
    found, at = np.zeros(12), blocks.learned
    found[blocks.episode[at]] = np.asarray(given.advantages)[at]
    expected = np.array([-0.3, -0.2, -0.1, 0.6])
    np.testing.assert_allclose(found, [*np.zeros(4), *expected, *np.zeros(4)], atol=1e-6)


def test_of_each_group_only_the_best_may_be_imitated() -> None:
    batch, params = made_batch(), model()
    batch = batch._replace(sampler_log_probs=np.asarray(log_probs(params, batch)))
    config = TokenGRPOConfig(members=MEMBERS, learned="best", aggregation="dr_grpo", longest=10)
    learning = tokens(config)
    metrics = learning.step(batch)
    totals = (batch.rewards @ np.array(WEIGHTS)).reshape(-1, MEMBERS)
    totals = np.where(batch.scored.reshape(totals.shape), totals, -np.inf)
    kept = [len({r for r in row if np.isfinite(r)}) > 1 for row in totals]
    best = [MEMBERS * n + int(totals[n].argmax()) for n in np.flatnonzero(kept)]
    imitated = batch.loss_mask & np.isin(batch.episode, best)[:, None]
    episodes = len(np.unique(batch.episode[learned(batch, flat=True).any(axis=1)]))

    def by_hand(params: Any) -> Any:
        return -jnp.where(imitated, log_probs(params, batch), 0.0).sum() / (10 * episodes)

    check_moved(learning.state.params, params, jax.grad(by_hand)(params), rate=RATE)
    assert metrics["tokens"] == learned(batch).sum()


def test_log_probabilities_of_the_sampler_are_read_where_they_train_alone() -> None:
    batch, moved = made_batch(), []
    sampler = np.where(learned(batch), batch.sampler_log_probs, np.nan).astype(np.float32)
    for each in (batch, batch._replace(sampler_log_probs=sampler)):
        learning = tokens(PLAIN)
        learning.step(each)
        moved.append(learning.learned)
    jax.tree.map(np.testing.assert_array_equal, *moved)


# ------------------------------------------------------------------------ PPO

PPO = TokenPPOConfig(kl=0.0, entropy=0.0, whiten=False, sampler_cap=1e9, value_clip=10.0)


def test_one_epoch_of_ppo_without_a_critic_is_reinforce() -> None:
    """γ = λ = 1: each token's gradient is −∇ log π times the reward of its episode."""
    batch, params = one_row_each(), model()
    learning = tokens(dataclasses.replace(PPO, critic=NONE))
    # As if the policy itself had sampled, so that its weight for the sampler is 1.
    batch = batch._replace(sampler_log_probs=np.asarray(log_probs(params, batch)))
    learning.step(batch)
    rewards = np.append(batch.rewards @ np.array(WEIGHTS), 0.0)[batch.episode][:, None]

    def reinforce(params: Any) -> jax.Array:
        total = jnp.where(batch.loss_mask, log_probs(params, batch), 0.0) * rewards
        return -total.sum() / batch.loss_mask.sum()

    check_moved(learning.state.params, params, jax.grad(reinforce)(params), rate=RATE)
    assert learning.state.critic is None


def test_only_the_critic_learns_while_it_warms_up_and_it_explains_ever_more() -> None:
    batch, learning = one_row_each(), tokens(PPO, rests_until=1)
    before, explained = learning.learned, [learning.step(batch)["explained_variance"]]
    assert_close(learning.learned["params"], before["params"], atol=0)
    explained += [learning.step(batch)["explained_variance"] for _ in range(12)]
    assert explained[-1] > explained[0] + 0.2
    learned = learning.learned["params"]
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), learned, before["params"])
    assert max(jax.tree.leaves(moved)) > 1e-4


def test_batches_that_ppo_cannot_learn_from_are_refused() -> None:
    for minibatches, batch, named in ((5, one_row_each(), "minibatches"), (1, made_batch(), "5")):
        policy = tokens(dataclasses.replace(PPO, minibatches=minibatches)).program.learner
        with pytest.raises(ValueError, match=named):
            token_episodes(policy, batch, BLOCKS)
