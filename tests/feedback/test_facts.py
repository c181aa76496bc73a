"""Rewards of the annotated facts against a loop over the steps, and facts that answers give."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qrag_jax.data.sample import Sample
from qrag_jax.evaluators.evaluation import best_return
from qrag_jax.feedback.facts import (
    NEEDED,
    NO_ANSWER,
    NOWHERE,
    WORDLESS,
    FactReward,
    fact_feedback,
    labelled,
)


def rewards_of(config: FactReward, support, actions, valid, **how: Any) -> np.ndarray:
    batch, played = SimpleNamespace(support=support), SimpleNamespace(actions=actions, valid=valid)
    return np.asarray(fact_feedback(config, **how)(batch, played))


def by_loop(config: FactReward, support, actions, valid, needed: int | None) -> np.ndarray:
    rewards = np.zeros(actions.shape)
    for b in range(len(actions)):
        facts = set(np.flatnonzero(support[b]))
        missing = set(facts)
        enough = len(facts) if needed is None else min(needed, len(facts))
        for taken, t in enumerate(np.flatnonzero(valid[b]), start=1):
            if actions[b, t] in missing:
                missing.remove(actions[b, t])
                rewards[b, t] += config.per_fact_reward
                if len(facts) - len(missing) == enough:
                    full = 0.5 + 0.5 * enough / (taken + 1e-5)
                    rewards[b, t] += full if config.penalize_extra_steps else 1.0
    return rewards


def episodes(facts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Facts `[B, C]`, up to so many in a row; actions and whether they happened, `[B, T]`."""
    rng = np.random.default_rng(0)
    support = np.zeros((200, 6), bool)
    for row in support:
        row[rng.choice(6, rng.integers(0, facts + 1), replace=False)] = True
    actions = np.array([rng.permutation(6)[:4] for _ in range(200)], np.int32)
    valid = np.arange(4) < rng.integers(0, 5, 200)[:, None]
    actions[~valid] = 0  # what a step that did not happen says means nothing
    return support, actions, valid


@pytest.mark.parametrize(
    ("penalize", "per_fact", "needed"),
    [(False, 0.2, None), (True, 0.2, None), (False, 0.0, NEEDED), (True, 0.0, NEEDED)],
)
def test_random_episodes(penalize: bool, per_fact: float, needed: int | None) -> None:
    """The first chunks with the answer, if a number of them is enough, are rewarded once."""
    support, actions, valid = episodes(3)
    config = FactReward(penalize_extra_steps=penalize, per_fact_reward=per_fact)
    result = rewards_of(config, support, actions, valid, needed=needed)
    assert result.dtype == np.float32
    expected = by_loop(config, support, actions, valid, needed)
    np.testing.assert_allclose(result, expected, atol=1e-6)
    assert (expected.max(1) > 0).sum() >= 10


def test_rewards_by_hand() -> None:
    """A chunk that is no fact costs a step, and STOP costs nothing."""
    support = np.isin(np.arange(6), [1, 3])[None]
    actions, valid = np.array([[3, 0, 1, 5]]), np.ones((1, 4), bool)
    for penalized, cost, expected in (
        (False, 0.0, [0, 0, 1, 0]),  # with the last missing fact
        (True, 0.0, [0, 0, 0.5 + 0.5 * 2 / 3.00001, 0]),
        (False, 0.1, [0, -0.1, 1, 0]),
    ):
        config = FactReward(penalize_extra_steps=penalized, step_cost=cost)
        result = rewards_of(config, support, actions, valid, stop_action=True)
        np.testing.assert_allclose(result[0], expected, atol=1e-6)


CHUNKS = ("Ada was born in Oslo.", "A party.", "OSLO, the capital", "Bergen is west.")
SAMPLE = Sample("a", "Where?", CHUNKS, (1,), ("the Oslo", "Kristiania"), "own")


def test_labels_replace_support_and_what_has_none_is_counted() -> None:
    """ "Art" is a part of a word, and "no" stands in no passage."""
    others = (("No",), ("Art",), (), ("no", "Bergen"), ("the capital", "born in Oslo"))
    samples = [SAMPLE, *(dataclasses.replace(SAMPLE, answers=item) for item in others)]
    result, without = labelled(samples)
    assert [sample.support for sample in result] == [(0, 2), (), (), (), (3,), (0, 2)]
    assert [dataclasses.replace(item, support=(1,)) for item in result] == samples
    assert without == {NO_ANSWER: 1, WORDLESS: 1, NOWHERE: 1}


@pytest.mark.parametrize(
    ("facts", "settings"), [(1, {}), (4, {"per_fact_reward": 0.2}), (4, {"step_cost": 0.1})]
)
def test_the_best_return_is_that_of_all_plays(facts: int, settings: dict[str, float]) -> None:
    """Of three steps, or as many as facts, in five chunks: no order of chunks has more return."""
    orders = np.array([*itertools.permutations(range(5), max(facts, 3))])
    support = np.tile(np.arange(5) < facts, (len(orders), 1))
    fields: dict[str, Any] = {"pqn.gamma": 0.9, "env.max_steps": 3}
    for penalized in (True, False):
        own: dict[str, Any] = settings | {"penalize_extra_steps": penalized}
        rewards = rewards_of(FactReward(**own), support, orders, np.ones(orders.shape, bool))
        played = max((rewards * 0.9 ** np.arange(orders.shape[1])).sum(1))
        of_run = fields | {f"reward.{name}": value for name, value in own.items()}
        assert best_return(facts, of_run) == pytest.approx(played)
    stops = fields | {"env.stop_action": True, "reward.step_cost": 1}
    assert best_return(1, stops) == pytest.approx(1, abs=1e-4)  # it stops, and pays nothing
