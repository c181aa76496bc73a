from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.algorithms.returns import discounted_return
from qrag_jax.feedback.ground_truth import ground_truth
from qrag_jax.metrics.regret import BestReturn


@pytest.mark.parametrize("facts", [1, 2, 3, 4])
@pytest.mark.parametrize("settings", [{}, {"per_fact": 0.2}, {"step_cost": 0.1}])
@pytest.mark.parametrize("penalized", [True, False])
def test_it_is_the_best_of_all_episodes(facts: int, settings: dict, penalized: bool) -> None:
    """Of three steps, or as many as facts, in five chunks: no order of chunks has more return."""
    orders = np.array([*itertools.permutations(range(5), max(facts, 3))])
    support = np.tile(np.arange(5) < facts, (len(orders), 1))
    rewards = ground_truth(
        jnp.array(support),
        jnp.array(orders),
        jnp.ones(orders.shape, bool),
        penalize_extra_steps=penalized,
        per_fact_reward=settings.get("per_fact", 0.0),
        step_cost=settings.get("step_cost", 0.0),
    )
    played = max(float(discounted_return(row, 0.9)) for row in rewards)
    assert BestReturn(0.9, 3, penalized=penalized, **settings)(facts) == pytest.approx(played)


def test_it_is_read_from_a_config() -> None:
    fields = {"pqn.gamma": 0.9, "env.max_steps": 3, "env.stop_action": True, "reward.step_cost": 1}
    best = BestReturn.of(fields)
    assert best == BestReturn(0.9, 3, stops=True, step_cost=1)
    assert best(1) == pytest.approx(1, abs=1e-4)  # it stops, and pays for no other step
    assert BestReturn.of({"pqn.gamma": 0.9}) is None
    assert BestReturn.of({"pqn.gamma": "0.9", "env.max_steps": 3}) is None
    assert BestReturn.of({"pqn.gamma": True, "env.max_steps": 3}) is None
