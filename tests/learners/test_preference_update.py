"""IPO and DPO of a token policy, beside the losses by their definition, row by row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.learners.config import IPO as OF_IPO
from qrag_jax.learners.config import PreferenceConfig
from qrag_jax.learners.preference_update import pair_episodes, row_log_probs
from qrag_jax.models.compute.lora import Adapted, folded
from qrag_jax.rollouts.trajectories import (
    DONE,
    MASKED,
    BatchRules,
    TokenTrajectory,
    Turn,
    token_batch,
)
from tests.learners import updates
from tests.learners.updates import adapters, check_moved, log_probs, model, pairs, tokens
from tests.rollouts.token_setup import CUT_OFF, NO_WEIGHT, PAIRS, made_pairs

KEPT = np.setdiff1d(np.arange(PAIRS), [NO_WEIGHT, CUT_OFF])


def of_sequences(params: Any, batch: Any) -> jax.Array:
    """Log-probability `[N]` of each episode, row by row without packing."""
    mask = batch.loss_mask[: len(batch.scored)]
    return jnp.where(mask, log_probs(params, batch)[: len(mask)], 0.0).sum(axis=1)


def loss(params: Any, batch: Any, config: PreferenceConfig, reference: Any, weights: Any) -> Any:
    """The mean loss, pair by pair, as the papers have it."""
    policy, total = of_sequences(params, batch), 0.0
    for pair in KEPT:
        winner, loser = 2 * pair, 2 * pair + 1
        h = (policy[winner] - policy[loser]) - (reference[winner] - reference[loser])
        if config.loss == OF_IPO:
            each = (h - 1 / (2 * config.beta)) ** 2
        else:
            wrong = config.label_smoothing
            right = jax.nn.sigmoid(config.beta * h)
            each = -(1 - wrong) * jnp.log(right) - wrong * jnp.log(1 - right)
        total += weights[pair] * each
    return total / weights[KEPT].sum()


@pytest.mark.parametrize("config", [updates.IPO, updates.DPO], ids=["ipo", "dpo"])
def test_loss_and_gradient_are_those_of_the_definition(config: PreferenceConfig) -> None:
    tied = config != updates.IPO
    (batch, _, weights), params = pairs(), model(tied=tied)
    far = np.random.default_rng(8).normal(0, 3, 2 * PAIRS)
    reference = (np.asarray(of_sequences(params, batch)) + far).astype(np.float32)
    learning = tokens(config, tied=tied)
    metrics = learning.step(batch, reference, weights)
    by_definition = jax.value_and_grad(lambda p: loss(p, batch, config, reference, weights))
    value, gradient = by_definition(params)
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


def test_a_prompt_is_computed_once_and_nothing_that_is_not_learned_from() -> None:
    (batch, reference, weights), learning = pairs(), tokens(updates.DPO)
    policy = learning.program.learner
    blocks, by_pair = pair_episodes(policy, batch, updates.BLOCKS, reference, weights)
    assert sorted({int(each) // 2 for each in blocks.episode[blocks.valid]}) == KEPT.tolist()
    assert sorted(by_pair.weight[by_pair.weight > 0]) == sorted(weights[KEPT])
    rows = np.array([each for pair in KEPT for each in (2 * pair, 2 * pair + 1)])
    places = updates.BLOCKS.tokens * (blocks.lengths > 0).any(axis=1).sum()
    real = (batch.lengths - batch.shared)[rows].sum()
    found = learning.step(batch, reference, weights)["padding_share"]
    assert found == pytest.approx(1 - real / places, abs=1e-6)


def test_learning_starts_at_the_reference() -> None:
    (batch, _, weights), learning = pairs(), tokens(updates.DPO)
    of_rows = row_log_probs(learning.program.learner)
    reference = of_rows(learning.state.params, batch, updates.BLOCKS)
    assert reference.dtype == np.float32
    np.testing.assert_allclose(reference, of_sequences(model(), batch), atol=2e-5)
    metrics = learning.step(batch, reference, weights)
    assert metrics["margin"] == pytest.approx(0, abs=1e-4)
    assert metrics["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert learning.step(batch, reference, weights)["margin"] > 0.01


def test_the_reference_of_adapters_on_a_mesh() -> None:
    learning, batch = tokens(updates.IPO, updates.SPLIT, adapted=True), made_pairs()
    of_rows = row_log_probs(learning.program.learner)
    found = of_rows(learning.state.params, batch, updates.BLOCKS, *learning.program.base)
    expected = of_sequences(folded(Adapted(model(), adapters()), 1.0), batch)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_trajectories_become_pairs() -> None:
    draw, prompts = np.random.default_rng(1), [[3, 4, 5, 6, 7], [8, 9, 4]]

    def played(pair: int, member: int, status: str) -> TokenTrajectory:
        # Both queries begin with token 11, which is sampled and not shared.
        query = np.array([11, *draw.integers(1, 20, 2 + member)], np.int32)
        sampled = np.full(len(query), -1.0, np.float32)
        turn = Turn(np.array(prompts[pair], np.int32), query, sampled, "stop")
        return TokenTrajectory(pair, member, 1, ((turn,),), status)

    statuses = ((0, 0, DONE), (0, 1, DONE), (1, 0, DONE), (1, 1, "the search did not answer"))
    batch = token_batch([played(*each) for each in statuses], BatchRules(2, (), MASKED, longest=16))
    policy = tokens(updates.DPO).program.learner
    blocks, by_pair = pair_episodes(policy, batch, updates.BLOCKS, np.arange(4.0), np.ones(2))
    assert blocks.shared[0].tolist() == [5, 0, 0]  # the second pair has no loser
    assert blocks.tokens[0, :5].tolist() == prompts[0]
    assert blocks.lengths[0, :2].tolist() == [8, 9]
    assert by_pair.weight[0].tolist() == [1, 0, 0]
    assert by_pair.reference[0, 0].tolist() == [0, 1]


def test_what_are_no_pairs_is_refused() -> None:
    batch, reference, weights = pairs()
    policy = tokens(updates.DPO).program.learner
    again = batch.episode.copy()
    again[3] = 0
    for each in (
        (batch, updates.BLOCKS._replace(tokens=24), reference, weights),
        (batch._replace(episode=again), updates.BLOCKS, reference, weights),
    ):
        with pytest.raises(ValueError, match=r"pair|rows|whole"):
            pair_episodes(policy, *each)
