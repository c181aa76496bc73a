"""Updates of a token policy beside losses by their definition, row by row; PPO in its limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.learners.config import NONE, TokenGRPOConfig, TokenPPOConfig
from qrag_jax.learners.token_update import row_log_probs
from qrag_jax.models.compute.lora import Adapted, folded
from qrag_jax.rollouts.trajectories import TokenBatch
from tests.learners import updates
from tests.learners.updates import assert_close, check_moved, log_probs, model, tokens
from tests.rollouts import token_setup
from tests.rollouts.token_setup import GROUPS, MEMBERS, PAIRS, made_batch

KEPT = np.setdiff1d(np.arange(PAIRS), [token_setup.CUT_OFF])


def advantages(batch: TokenBatch, *, scaled: bool) -> np.ndarray:
    """Of each episode `[N]`: its reward less the mean of its group's scored members."""
    found, totals = np.zeros(len(batch.scored)), batch.rewards.sum(axis=1)
    for first in range(0, len(found), MEMBERS):
        rows = [n for n in range(first, first + MEMBERS) if batch.scored[n]]
        spread = totals[rows].std(ddof=1) + 1e-4 if scaled else 1.0
        found[rows] = (totals[rows] - totals[rows].mean()) / spread
    return found


def learned(batch: TokenBatch, *, flat: bool = False) -> np.ndarray:
    """The tokens `[R, L]` of scored members of groups that differ, or that are flat, too."""
    keep = np.zeros(len(batch.scored) + 1, bool)
    totals = batch.rewards.sum(axis=1)
    for first in range(0, len(batch.scored), MEMBERS):
        rows = [n for n in range(first, first + MEMBERS) if batch.scored[n]]
        keep[rows] = flat or np.ptp(totals[rows]) > 0
    return batch.loss_mask & keep[batch.episode][:, None]


def test_metrics_are_those_of_the_definition() -> None:
    batch, mask = made_batch(), learned(made_batch(), flat=True)
    metrics = tokens(updates.GRPO).step(batch)
    totals = batch.rewards.sum(axis=1)[batch.scored]
    scored = np.abs(advantages(batch, scaled=True)).sum() / batch.scored.sum()
    ratio = np.exp(np.asarray(log_probs(model(), batch)) - batch.sampler_log_probs)[mask]
    used = np.minimum(ratio, updates.GRPO.sampler_cap)
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
        "sampler_truncated": (ratio > updates.GRPO.sampler_cap).mean(),
        "sampler_largest_ratio": np.maximum(ratio, 1 / ratio).max(),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4, abs=1e-6), name


def test_of_each_group_only_the_best_may_be_imitated() -> None:
    batch, params = made_batch(), model()
    batch = batch._replace(sampler_log_probs=np.asarray(log_probs(params, batch)))
    config = TokenGRPOConfig(members=MEMBERS, learned="best", aggregation="dr_grpo", longest=10)
    learning = tokens(config)
    metrics = learning.step(batch)
    totals = batch.rewards.sum(axis=1).reshape(-1, MEMBERS)
    totals = np.where(batch.scored.reshape(totals.shape), totals, -np.inf)
    kept = [len({r for r in row if np.isfinite(r)}) > 1 for row in totals]
    best = [MEMBERS * n + int(totals[n].argmax()) for n in np.flatnonzero(kept)]
    imitated = batch.loss_mask & np.isin(batch.episode, best)[:, None]
    episodes = len(np.unique(batch.episode[learned(batch, flat=True).any(axis=1)]))

    def by_hand(params: Any) -> Any:
        return -jnp.where(imitated, log_probs(params, batch), 0.0).sum() / (10 * episodes)

    check_moved(learning.state.params, params, jax.grad(by_hand)(params), rate=updates.RATE)
    assert metrics["tokens"] == learned(batch).sum()


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
    value, gradient = jax.value_and_grad(ipo)(params, batch, reference)
    check_moved(learning.state.params, params, gradient, rate=updates.RATE)
    policy = np.asarray(of_sequences(params, batch)).reshape(-1, 2)[KEPT]
    moved = policy - reference.reshape(-1, 2)[KEPT]
    h = moved[:, 0] - moved[:, 1]
    assert 0 < (h > 0).mean() < 1
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient)))
    count = batch.loss_mask.sum(axis=1)[:-1].reshape(-1, 2)[KEPT].sum()
    expected = {
        "loss": float(value),
        "grad_norm": norm,
        "margin": h.mean(),
        "accuracy": (h > 0).mean(),
        "log_prob_winner": policy[:, 0].mean(),
        "log_prob_loser": policy[:, 1].mean(),
        "tokens": count,
        "env_steps": count,
        "pairs": len(KEPT),
    }
    for name, number in expected.items():
        assert metrics[name] == pytest.approx(float(number), rel=1e-4, abs=1e-4), name


def test_learning_starts_at_the_reference() -> None:
    (batch, _), learning = updates.pairs(), tokens(updates.DPO)
    of_rows = row_log_probs(learning.program.learner)
    reference = of_rows(learning.state.params, batch, updates.BLOCKS)
    assert reference.dtype == np.float32
    np.testing.assert_allclose(reference, of_sequences(model(), batch), atol=2e-5)
    metrics = learning.step(batch, reference)
    assert metrics["margin"] == pytest.approx(0, abs=1e-4)
    assert metrics["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert learning.step(batch, reference)["margin"] > 0.01


def test_the_reference_of_adapters_on_a_mesh() -> None:
    learning, batch = tokens(updates.IPO, updates.SPLIT, adapted=True), token_setup.made_pairs()
    of_rows = row_log_probs(learning.program.learner)
    found = of_rows(learning.state.params, batch, updates.BLOCKS, *learning.program.base)
    expected = of_sequences(folded(Adapted(model(), updates.adapters()), 1.0), batch)
    np.testing.assert_allclose(found, expected, atol=2e-5)


# ------------------------------------------------------------------------ PPO

PPO = TokenPPOConfig(kl=0.0, entropy=0.0, whiten=False, sampler_cap=1e9, value_clip=10.0)


def test_one_epoch_of_ppo_without_a_critic_is_reinforce() -> None:
    """γ = λ = 1: each token's gradient is −∇ log π times the reward of its episode."""
    batch, params = updates.one_row_each(), model()
    learning = tokens(dataclasses.replace(PPO, critic=NONE))
    # As if the policy itself had sampled, so that its weight for the sampler is 1.
    batch = batch._replace(sampler_log_probs=np.asarray(log_probs(params, batch)))
    learning.step(batch)
    rewards = np.append(batch.rewards.sum(axis=1), 0.0)[batch.episode][:, None]

    def reinforce(params: Any) -> jax.Array:
        total = jnp.where(batch.loss_mask, log_probs(params, batch), 0.0) * rewards
        return -total.sum() / batch.loss_mask.sum()

    check_moved(learning.state.params, params, jax.grad(reinforce)(params), rate=updates.RATE)
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
