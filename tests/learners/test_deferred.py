"""Play now, learn later: the fused step at no lag, right for other weights, blind to failures."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from qrag_jax.data.episodes import empty_episode
from qrag_jax.learners.deferred import ScoredGradient
from qrag_jax.learners.pqn import Towers
from qrag_jax.rollouts.chunks import Draws
from qrag_jax.rollouts.experience import Played, ScoredEpisodes
from tests.learners.deferred_plays import per_step, steps
from tests.rollouts.play_setup import (
    ACTOR,
    ALPHA,
    EPISODES,
    ONE_BUCKET_ACTOR,
    PQN,
    SHAPE,
    episodes,
    jitted_gradient,
    jitted_rollout,
    online,
    target,
)

pytestmark = pytest.mark.long

DRAWS = Draws(jax.random.split(jax.random.key(7), EPISODES), ALPHA)
BATCH = episodes(0)


@pytest.fixture(scope="module")
def trajectory():
    """Episodes played by the weights of `online` and `target`."""
    played = jitted_rollout(ACTOR, (online(), target()), BATCH, DRAWS)
    return jax.tree.map(np.asarray, played)


def scored(trajectory, mask: np.ndarray, batch=BATCH) -> ScoredEpisodes:
    played = Played(trajectory.actions, trajectory.valid, trajectory.entropy)
    return ScoredEpisodes(batch, played, *per_step(played, mask))


def gradient_sums(params, episodes_of):
    gradient = ScoredGradient(ONE_BUCKET_ACTOR, PQN)
    return jitted_gradient(gradient, Towers(params, target()), episodes_of, DRAWS)


def test_episodes_without_a_reward_leave_no_trace(trajectory) -> None:
    mask = np.arange(EPISODES) % 3 != 1
    assert trajectory.valid[~mask].any()
    with_unscored = scored(trajectory, mask)
    lost = np.where(mask[:, None], with_unscored.score, np.nan)
    with_unscored = with_unscored._replace(score=lost)
    found = gradient_sums(online(), with_unscored)
    nothing = empty_episode(SHAPE)
    batch = type(BATCH)(
        *(
            np.where(mask.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, np.asarray(empty)[None])
            for leaf, empty in zip(BATCH, nothing, strict=True)
        )
    )
    expected = gradient_sums(online(), scored(trajectory, mask, batch))
    assert float(expected[1].episodes) == (mask & BATCH.chunk_mask.any(1)).sum()
    names = [*expected[1]._fields]
    for name in names[: names.index("real_tokens")]:
        value = float(getattr(found[1], name))
        assert value == pytest.approx(float(getattr(expected[1], name)), rel=1e-5), name
    for one, other in zip(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_an_episode_cut_at_its_first_step_ends_there(trajectory) -> None:
    """Nothing is learned from what came after, and nothing is bootstrapped."""
    whole = scored(trajectory, np.ones(EPISODES, bool))
    first = np.arange(whole.scored.shape[1]) == 0
    cut = whole._replace(score=np.where(first, np.float32(0.7), 0.0), scored=whole.scored & first)
    _, sums = gradient_sums(online(), cut)
    began = trajectory.valid[:, 0].sum()
    assert 0 < began < trajectory.valid.sum()
    assert float(sums.transitions) == float(sums.episodes) == began
    assert float(sums.reward) == pytest.approx(0.7 * began, rel=1e-5)
    assert float(sums.target) == pytest.approx(0.7 * began, rel=1e-5)


def test_at_no_lag_it_is_the_fused_step_however_it_is_split() -> None:
    fused = steps(devices=1, accumulation=1, fused=True)
    whole = steps(devices=1, accumulation=1, fused=False)
    split = steps(devices=2, accumulation=2, fused=False)
    for found in (whole, split):  # after a step with an infinite reward
        assert found.pop("skipped") == 1
        assert found.pop("kept params").all()
        assert found.pop("kept target_params").all()
    assert {name for name in whole if "unscored" in name} == whole.keys() - fused.keys()
    for name in fused:
        if "padding_share" in name:
            continue
        atol = 2e-5 if "params" in name else 1e-6
        for found in (whole, split):
            np.testing.assert_allclose(found[name], fused[name], rtol=2e-4, atol=atol, err_msg=name)
    assert not any(whole[f"['metrics {number}']['unscored_share']"] for number in range(3))
    moved = [name for name in fused if name.startswith("['params']")]
    assert max(np.abs(fused[name]).max() for name in moved) > 1e-3
