"""Rewards of the annotated facts against a loop over the steps."""

from __future__ import annotations

import numpy as np
import pytest

from qrag_jax.feedback.ground_truth import ground_truth


def by_loop(support, actions, valid, penalize: bool, per_fact: float) -> np.ndarray:
    rewards = np.zeros(actions.shape)
    for b in range(len(actions)):
        facts = set(np.flatnonzero(support[b]))
        missing, taken = set(facts), 0
        for t, action in enumerate(actions[b]):
            if not valid[b, t]:
                continue
            taken += 1
            if action in missing:
                missing.remove(action)
                rewards[b, t] += per_fact
                if not missing:
                    full = 0.5 + 0.5 * len(facts) / (taken + 1e-5)
                    rewards[b, t] += full if penalize else 1.0
    return rewards


@pytest.mark.parametrize("penalize", [False, True])
@pytest.mark.parametrize("per_fact", [0.0, 0.2])
def test_random_episodes(penalize, per_fact) -> None:
    rng = np.random.default_rng(0)
    episodes, chunks, steps = 200, 6, 4
    support = np.zeros((episodes, chunks), bool)
    for row in support:
        row[rng.choice(chunks, rng.integers(0, 4), replace=False)] = True
    actions = np.array([rng.permutation(chunks)[:steps] for _ in range(episodes)], np.int32)
    valid = np.arange(steps) < rng.integers(0, steps + 1, episodes)[:, None]
    actions[~valid] = 0  # what a step that did not happen says means nothing
    settings = {"penalize_extra_steps": penalize, "per_fact_reward": per_fact}
    found = np.asarray(ground_truth(support, actions, valid, **settings))
    assert found.dtype == np.float32
    expected = by_loop(support, actions, valid, penalize, per_fact)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert (expected.max(1) > 0).sum() >= 10


def one(actions: list[int], facts: list[int], valid: list[bool] | None = None, **settings):
    support = np.zeros((1, 6), bool)
    support[0, facts] = True
    valid = [True] * len(actions) if valid is None else valid
    settings = {"penalize_extra_steps": False} | settings
    rewards = ground_truth(support, np.array([actions]), np.array([valid]), **settings)
    return np.asarray(rewards)[0]


def test_the_reward_comes_once_with_the_last_missing_fact() -> None:
    assert one([3, 0, 1, 5], [1, 3]).tolist() == [0, 0, 1, 0]
    assert one([3, 1, 0, 5], [1, 3]).tolist() == [0, 1, 0, 0]
    assert one([3, 0, 2, 5], [1, 3]).tolist() == [0, 0, 0, 0]


def test_extra_steps_cost() -> None:
    penalised = {"penalize_extra_steps": True}
    np.testing.assert_allclose(one([3, 1, 0], [1, 3], **penalised), [0, 1, 0], atol=1e-5)
    expected = [0, 0, 0.5 + 0.5 * 2 / 3.00001]
    np.testing.assert_allclose(one([3, 0, 1], [1, 3], **penalised), expected, atol=1e-6)
    expected = [0, 0, 0, 0.5 + 0.5 * 1 / 4.00001]
    np.testing.assert_allclose(one([0, 2, 4, 5], [5], **penalised), expected, atol=1e-6)


def test_every_new_fact_is_rewarded() -> None:
    rewards = one([3, 0, 1, 5], [1, 3], per_fact_reward=0.25)
    np.testing.assert_allclose(rewards, [0.25, 0, 1.25, 0])


def test_steps_that_did_not_happen_earn_nothing() -> None:
    assert one([3, 1], [1, 3], [True, False], per_fact_reward=0.5).tolist() == [0.5, 0]
    assert one([1, 1], [1], [True, False]).tolist() == [1, 0]
    assert one([0, 0], [], [False, False], per_fact_reward=0.5).tolist() == [0, 0]


def test_a_chunk_that_is_no_fact_costs_a_step_and_stop_costs_nothing() -> None:
    stops = np.array([[False, False, False, True]])
    rewards = one([3, 0, 1, 5], [1, 3], step_cost=0.1, stops=stops)
    np.testing.assert_allclose(rewards, [0, -0.1, 1, 0], atol=1e-6)
    unfinished = one([3, 0, 1, 5], [1, 3], [True, True, False, False], step_cost=0.1)
    np.testing.assert_allclose(unfinished, [0, -0.1, 0, 0], atol=1e-6)
