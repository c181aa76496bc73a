"""Updates by pairs, beside the losses by their definition, row by row."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.learners.preference_config import PreferenceConfig
from qrag_jax.learners.preference_update import pair_episodes
from qrag_jax.models.compute.lora import Adapted, merge
from qrag_jax.rollouts.token_blocks import choose_shape
from qrag_jax.rollouts.trajectories import (
    DONE,
    MASKED,
    BatchRules,
    TokenTrajectory,
    Turn,
    token_batch,
)
from qrag_jax.runtime import sharding
from qrag_jax.runtime.mesh import make_mesh
from tests.learners.pair_updates import (
    SHAPE,
    PairLearning,
    kept,
    loss,
    made_weights,
    of_sequences,
)
from tests.learners.token_updates import adapters, check_moved, model
from tests.rollouts.pair_rows import PAIRS, made_pairs

ALONE = make_mesh((1, 1, 1), jax.devices()[:1])
IPO = PreferenceConfig(beta=0.2)


def other_reference(batch: Any, config: PreferenceConfig) -> np.ndarray:
    """Of a reference that is not the policy."""
    far = np.random.default_rng(8).normal(0, 3, len(batch.scored))
    return (np.asarray(of_sequences(model(), batch, config)) + far).astype(np.float32)


def check_alike(ours: Any, theirs: Any, before: Any) -> None:
    """Two updates of the same parameters are the same."""
    moves = [
        jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), each, before)
        for each in (ours, theirs)
    ]
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(moves[1]))
    assert largest > 0.1
    for one, other in zip(*map(jax.tree.leaves, moves), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * largest)


@pytest.mark.parametrize(
    "config",
    [
        IPO,
        PreferenceConfig(beta=0.05, averaged=True),
        PreferenceConfig("dpo", beta=0.1),
        PreferenceConfig("dpo", beta=0.5, averaged=True, label_smoothing=0.2),
    ],
    ids=["ipo", "ipo averaged", "dpo", "dpo averaged smoothed"],
)
def test_loss_and_gradient_are_those_of_the_definition(config: PreferenceConfig) -> None:
    batch, weights, params = made_pairs(), made_weights(), model()
    reference = other_reference(batch, config)
    learning = PairLearning(ALONE, config, params, shape=SHAPE)
    metrics = learning.step_by(batch, reference, weights)
    by_definition = jax.jit(
        jax.value_and_grad(lambda params: loss(params, batch, config, reference, weights))
    )
    value, gradient = by_definition(params)
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-5)
    check_moved(learning.state.params, params, gradient)
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient)))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    policy = np.asarray(of_sequences(params, batch, config)).reshape(-1, 2)[kept()]
    moved = policy - reference.reshape(-1, 2)[kept()]
    h = moved[:, 0] - moved[:, 1]
    assert metrics["margin"] == pytest.approx(h.mean(), abs=1e-4)
    assert 0 < (h > 0).mean() < 1
    assert metrics["accuracy"] == pytest.approx((h > 0).mean())
    assert metrics["log_prob_winner"] == pytest.approx(policy[:, 0].mean(), rel=1e-5)
    assert metrics["log_prob_loser"] == pytest.approx(policy[:, 1].mean(), rel=1e-5)
    counts = batch.loss_mask.sum(axis=1)[:-1].reshape(-1, 2)[kept()]
    assert metrics["tokens"] == metrics["env_steps"] == counts.sum()
    assert (metrics["pairs"], metrics["skipped"]) == (len(kept()), 0)
    # A prompt is computed once.
    rows = np.array([each for pair in kept() for each in (2 * pair, 2 * pair + 1)])
    blocks, _ = pair_episodes(learning.policy, batch, SHAPE, reference, weights)
    places = SHAPE.tokens * (blocks.lengths > 0).any(axis=1).sum()
    real = (batch.lengths - batch.shared)[rows].sum()
    assert metrics["padding_share"] == pytest.approx(1 - real / places, abs=1e-6)


def test_summed_ipo_by_hand() -> None:
    """A model whose logits are all 0 gives each token −ln 29; β of 0.5 aims at a nat."""
    batch, config, params = made_pairs(), PreferenceConfig(beta=0.5), model()
    params = params | {"word_embeddings": np.zeros_like(params["word_embeddings"])}
    weights = np.zeros(PAIRS, np.float32)
    weights[[0, 3]] = 1.0, 3.0
    learning = PairLearning(ALONE, config, params, shape=SHAPE)
    reference = np.zeros(2 * PAIRS, np.float32)
    reference[0] = 2.0
    metrics = learning.step_by(batch, reference, weights)
    length = batch.loss_mask.sum(axis=1)
    h = [-np.log(29) * (length[0] - length[1]) - 2.0, -np.log(29) * (length[6] - length[7])]
    assert metrics["margin"] == pytest.approx((h[0] + h[1]) / 2, rel=1e-5)
    by_hand = ((h[0] - 1) ** 2 + 3 * (h[1] - 1) ** 2) / 4
    assert metrics["loss"] == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("averaged", [False, True])
def test_the_reference_is_computed_once_and_is_where_learning_starts(averaged: bool) -> None:
    batch, params = made_pairs(), model()
    config = PreferenceConfig("dpo", beta=0.01, averaged=averaged)
    learning = PairLearning(ALONE, config, params, shape=SHAPE)
    reference = learning.reference(batch)
    assert reference.dtype == np.float32
    np.testing.assert_allclose(reference, of_sequences(params, batch, config), atol=2e-5)
    metrics = learning.step_by(batch, reference, made_weights())
    assert metrics["margin"] == pytest.approx(0, abs=1e-4)
    assert metrics["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert learning.step_by(batch, reference, made_weights())["margin"] > 0.01


def test_adapters_on_a_frozen_base() -> None:
    batch, weights, base, trained = made_pairs(), made_weights(), model(), adapters()

    def merged(adapters: Any) -> Any:
        return merge(Adapted(base, adapters), 1.0)

    learning = PairLearning(ALONE, IPO, trained, base, shape=SHAPE)
    of_start = np.asarray(of_sequences(merged(trained), batch, IPO))
    np.testing.assert_allclose(learning.reference(batch), of_start, atol=2e-5)
    reference = other_reference(batch, IPO)
    metrics = learning.step_by(batch, reference, weights)
    by_definition = jax.jit(
        jax.value_and_grad(lambda each: loss(merged(each), batch, IPO, reference, weights))
    )
    value, gradient = by_definition(trained)
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-5)
    check_moved(learning.state.params, trained, gradient)


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
def test_any_mesh_gives_the_same(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if shape[1] == 2:  # small arrays, the head among them, are in parts, too
        monkeypatch.setattr(sharding, "LEAST_SPLIT", 1)
    batch, weights, params = made_pairs(), made_weights(), model(tied=shape[1] == 2)
    one = PairLearning(ALONE, IPO, params, shape=SHAPE)
    other = PairLearning(make_mesh(shape), IPO, params, shape=SHAPE)
    reference = other_reference(batch, IPO)
    np.testing.assert_allclose(other.reference(batch), one.reference(batch), atol=2e-5)
    expected, found = (each.step_by(batch, reference, weights) for each in (one, other))
    for name, value in expected.items():
        if name != "padding_share":
            assert found[name] == pytest.approx(value, rel=1e-5, abs=2e-5), name
    check_alike(other.state.params, one.state.params, params)


@pytest.mark.parametrize("tokens", [16, 400])
def test_other_blocks_give_the_same(tokens: int) -> None:
    batch, weights, params = made_pairs(), made_weights(), model()
    reference = other_reference(batch, IPO)
    one = PairLearning(ALONE, IPO, params, shape=SHAPE)
    shape = choose_shape(batch, tokens, 2, whole=True)
    other = PairLearning(ALONE, IPO, params, shape=shape, scanned=True)
    expected, found = (each.step_by(batch, reference, weights) for each in (one, other))
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    check_alike(other.state.params, one.state.params, params)


def test_only_what_can_be_learned_from_is_computed() -> None:
    batch, weights = made_pairs(), made_weights()
    learning = PairLearning(ALONE, IPO, model(), shape=SHAPE)
    reference = other_reference(batch, IPO)
    blocks, pairs = pair_episodes(learning.policy, batch, SHAPE, reference, weights)
    assert sorted({int(each) // 2 for each in blocks.episode[blocks.valid]}) == kept().tolist()
    assert sorted(pairs.weight[pairs.weight > 0]) == sorted(weights[kept()])
    # What is not learned from may be anything.
    out = np.setdiff1d(np.arange(PAIRS), kept())
    reference[[2 * out, 2 * out + 1]] = np.nan
    assert np.isfinite(learning.step_by(batch, reference, weights)["loss"])


def test_nothing_is_learned_from_what_is_not_finite_or_not_there() -> None:
    batch, weights, params = made_pairs(), made_weights(), model()
    learning = PairLearning(ALONE, IPO, params, shape=SHAPE)
    metrics = learning.step_by(batch, np.full(2 * PAIRS, np.nan, np.float32), weights)
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, learning.state.params, params)
    reference = other_reference(batch, IPO)
    metrics = learning.step_by(batch, reference, np.zeros_like(weights))
    assert (metrics["skipped"], metrics["tokens"], metrics["pairs"]) == (0, 0, 0)
    assert np.isnan([metrics[name] for name in ("loss", "margin", "accuracy")]).all()
    jax.tree.map(np.testing.assert_array_equal, learning.state.params, params)
    assert int(learning.state.step) == 2


def test_trajectories_become_pairs() -> None:
    draw, prompts = np.random.default_rng(1), [[3, 4, 5, 6, 7], [8, 9, 4]]

    def played(pair: int, member: int, status: str) -> TokenTrajectory:
        # Both queries begin with token 11, which is sampled and not shared.
        query = np.array([11, *draw.integers(1, 20, 2 + member)], np.int32)
        log_probs = np.full(len(query), -1.0, np.float32)
        turn = Turn(np.array(prompts[pair], np.int32), query, log_probs, "stop")
        return TokenTrajectory(pair, member, 1, ((turn,),), status)

    statuses = ((0, 0, DONE), (0, 1, DONE), (1, 0, DONE), (1, 1, "the search did not answer"))
    trajectories = [played(*each) for each in statuses]
    batch = token_batch(trajectories, BatchRules(2, (), MASKED, longest=16))
    learning = PairLearning(ALONE, IPO, model(), shape=SHAPE)
    blocks, pairs = pair_episodes(learning.policy, batch, SHAPE, np.arange(4.0), np.ones(2))
    assert blocks.shared[0].tolist() == [5, 0, 0]  # the second pair has no loser
    assert blocks.tokens[0, :5].tolist() == prompts[0]
    assert blocks.lengths[0, :2].tolist() == [8, 9]
    assert pairs.weight[0].tolist() == [1, 0, 0]
    assert pairs.reference[0, 0].tolist() == [0, 1]


def test_refusals() -> None:
    batch, weights = made_pairs(), made_weights()
    reference, policy = np.zeros(2 * PAIRS, np.float32), PairLearning(ALONE, IPO, model()).policy

    def refused(told: str, *, batch=batch, shape=SHAPE, reference=reference, weights=weights):
        with pytest.raises(ValueError, match=told):
            pair_episodes(policy, batch, shape, reference, weights)

    refused("14 episodes, 13 log-probabilities by the reference and 7", reference=reference[1:])
    refused("6 weights are no pairs", weights=weights[1:])
    refused("is of groups of 3 rows, not of 2", shape=SHAPE._replace(members=3))
    refused("a weight of a pair is below 0 or not finite", weights=weights - 1)
    refused("a weight of a pair is below 0 or not finite", weights=weights * np.nan)
    refused("is to be whole; .* has no room for it", shape=SHAPE._replace(tokens=24))
    again = batch.episode.copy()
    again[3] = 0
    refused("episode 0 has 2 rows; one of a pair has 1", batch=batch._replace(episode=again))
