"""Updates of a token policy, beside the losses by their definition, row by row."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.learners.token_config import SFTConfig, TokenGRPOConfig
from qrag_jax.learners.token_update import given_tokens, token_episodes
from qrag_jax.models.compute.lora import Adapted, merge
from qrag_jax.runtime import sharding
from qrag_jax.runtime.mesh import make_mesh
from tests.learners.token_updates import (
    GRPO,
    RATE,
    SHAPE,
    WEIGHTS,
    Learning,
    adapters,
    advantages,
    check_moved,
    learned,
    log_probs,
    loss,
    model,
)
from tests.rollouts.token_rows import GROUPS, MEMBERS, made_batch

ALONE = make_mesh((1, 1, 1), jax.devices()[:1])


def config(**fields: Any) -> TokenGRPOConfig:
    return dataclasses.replace(GRPO, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"aggregation": "grpo"},
        {"aggregation": "dapo", "scaled": True},
        {"aggregation": "bnpo", "ratio": "sequence"},
        {"aggregation": "dr_grpo", "ratio": "cispo", "clip_low": 1.0},
    ],
)
def test_loss_and_gradient_are_those_of_the_definition(fields: dict[str, Any]) -> None:
    batch, given, params = made_batch(), config(**fields), model()
    learning = Learning(ALONE, given, params)
    metrics = learning.step(batch)
    value, gradient = jax.value_and_grad(loss)(params, batch, given)
    assert metrics["loss"] == pytest.approx(float(value), abs=1e-5)
    check_moved(learning.state.params, params, gradient)
    mask = learned(batch)
    assert metrics["tokens"] == mask.sum()
    assert metrics["flat_groups"] == pytest.approx(1 / GROUPS)
    assert metrics["unscored_share"] == pytest.approx(1 / len(batch.scored))
    totals = (batch.rewards @ np.array(WEIGHTS))[batch.scored]
    assert metrics["return"] == pytest.approx(totals.mean(), rel=1e-5)
    assert metrics["kl_old"] == pytest.approx(0.0, abs=1e-6)
    scored = np.abs(advantages(batch, scaled=given.scaled)).sum() / batch.scored.sum()
    assert metrics["advantage"] == pytest.approx(scored, rel=1e-4)
    ratio = np.exp(np.asarray(log_probs(params, batch)) - batch.sampler_log_probs)[mask]
    k3 = (ratio - 1 - np.log(ratio)).mean()
    assert metrics["sampler_kl"] == pytest.approx(k3, rel=1e-4)
    used = np.minimum(ratio, given.sampler_cap)
    effective = used.sum() ** 2 / (used**2).sum() / len(used)
    assert metrics["sampler_effective"] == pytest.approx(effective, rel=1e-4)
    assert metrics["sampler_truncated"] == pytest.approx((ratio > given.sampler_cap).mean())


@pytest.mark.parametrize("ratio", ["token", "sequence", "cispo"])
def test_a_second_update_from_one_batch_has_ratios(ratio: str) -> None:
    batch, given, params = made_batch(), config(ratio=ratio, epochs=2, beta=0.1), model()
    learning = Learning(ALONE, given, params)
    learning.step(batch)
    before = np.asarray(log_probs(params, batch))
    expected = params
    for _ in range(2):
        gradient = jax.grad(loss)(expected, batch, given, before, before)
        expected = jax.tree.map(lambda p, g: p - RATE * g, expected, gradient)
    for ours, theirs in zip(
        jax.tree.leaves(learning.state.params), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_a_kl_is_to_the_first_weights() -> None:
    batch, given, params = made_batch(), config(beta=0.3), model()
    learning = Learning(ALONE, given, params)
    reference = np.asarray(log_probs(params, batch))
    assert learning.step(batch)["kl"] == pytest.approx(0.0, abs=1e-6)
    moved = jax.tree.map(np.asarray, learning.state.params)
    metrics = learning.step(batch)
    assert metrics["kl"] > 1e-6
    assert metrics["tokens"] == learned(batch, flat=True).sum() > learned(batch).sum()
    value, gradient = jax.value_and_grad(loss)(moved, batch, given, None, reference)
    assert metrics["loss"] == pytest.approx(float(value), abs=1e-5)
    check_moved(learning.state.params, moved, gradient)


def test_two_members_by_hand() -> None:
    """G = 2 without scaling: the better member's tokens gain what the other's lose."""
    batch = made_batch()
    keep = np.array([3, 4])
    pair = batch._replace(
        **{
            name: getattr(batch, name)[keep]
            for name in ("tokens", "lengths", "log_prob_mask", "sampler_log_probs")
        },
        loss_mask=batch.log_prob_mask[keep],
        episode=np.array([0, 1], np.int32),
        leader=np.array([0, 0], np.int32),
        shared=np.array([0, batch.shared[4]], np.int32),
        rewards=np.array([[1.0, 0.0], [0.0, 0.0]], np.float32),
        scored=np.array([True, True]),
    )
    pair = pair._replace(sampler_log_probs=np.asarray(log_probs(model(), pair)))
    given = config(members=2, aggregation="dr_grpo", longest=10)
    params = model()
    learning = Learning(ALONE, given, params)
    learning.step(pair)

    def by_hand(params: Any) -> Any:
        each = jnp.where(pair.loss_mask, log_probs(params, pair), 0.0).sum(axis=1)
        advantage = 0.5 * WEIGHTS[0]  # over 2 episodes of 10 tokens
        return -(advantage * (each[0] - each[1])) / 20

    check_moved(learning.state.params, params, jax.grad(by_hand)(params))


def test_what_groups_must_differ_by_chooses_groups_alone() -> None:
    batch, rewards = made_batch(), np.array([0.0, 0.1, 0.2, 0.9], np.float32)
    parts = np.repeat([0.0, 1.0, 0.0], [4, 3, 5])  # only those of the second group differ
    batch = batch._replace(
        rewards=np.stack([np.tile(rewards, 3), parts], axis=1),
        scored=np.ones(12, bool),
        loss_mask=batch.log_prob_mask,
    )
    policy = Learning(ALONE, config(members=4), model()).policy
    policy = dataclasses.replace(policy, weights=(1.0, 0.0))
    episodes = token_episodes(policy, batch, SHAPE._replace(members=4), differ_by=1)
    given, _, _ = given_tokens(policy, episodes)
    found, tokens = np.zeros(12), episodes.blocks.learned
    found[episodes.blocks.episode[tokens]] = np.asarray(given.advantages)[tokens]
    expected = np.array([-0.3, -0.2, -0.1, 0.6])
    np.testing.assert_allclose(found, [*np.zeros(4), *expected, *np.zeros(4)], atol=1e-6)


def test_of_each_group_only_the_best_may_be_imitated() -> None:
    batch, params = made_batch(), model()
    batch = batch._replace(sampler_log_probs=np.asarray(log_probs(params, batch)))
    learning = Learning(ALONE, config(learned="best", aggregation="dr_grpo", longest=10), params)
    metrics = learning.step(batch)
    totals = (batch.rewards @ np.array(WEIGHTS)).reshape(-1, MEMBERS)
    totals = np.where(batch.scored.reshape(totals.shape), totals, -np.inf)
    kept = [len({r for r in row if np.isfinite(r)}) > 1 for row in totals]
    best = [MEMBERS * n + int(totals[n].argmax()) for n in np.flatnonzero(kept)]
    imitated = batch.loss_mask & np.isin(batch.episode, best)[:, None]
    episodes = len(np.unique(batch.episode[learned(batch, flat=True).any(axis=1)]))

    def by_hand(params: Any) -> Any:
        return -jnp.where(imitated, log_probs(params, batch), 0.0).sum() / (10 * episodes)

    check_moved(learning.state.params, params, jax.grad(by_hand)(params))
    assert metrics["tokens"] == learned(batch).sum()


def test_imitation() -> None:
    batch, params = made_batch(), model()
    learning = Learning(ALONE, SFTConfig(), params)
    metrics = learning.step(batch)
    value, gradient = jax.value_and_grad(loss)(params, batch, SFTConfig())
    assert metrics["loss"] == pytest.approx(float(value), abs=1e-5)
    check_moved(learning.state.params, params, gradient)
    assert "return" not in metrics


def test_a_head_of_its_own() -> None:
    batch, params = made_batch(), model(tied=False)
    learning = Learning(ALONE, GRPO, params)
    learning.step(batch)
    check_moved(learning.state.params, params, jax.grad(loss)(params, batch, GRPO))


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_on_a_frozen_base(tied: bool) -> None:
    batch, base = made_batch(), model(tied=tied)
    trained = adapters()
    given = config(beta=0.2, epochs=2)
    learning = Learning(ALONE, given, trained, base)
    learning.step(batch)

    def merged(adapters: Any) -> Any:
        return merge(Adapted(base, adapters), 1.0)

    before = np.asarray(log_probs(merged(trained), batch))
    expected: Any = trained
    for _ in range(2):
        gradient = jax.grad(lambda each: loss(merged(each), batch, given, before, before))(expected)
        expected = jax.tree.map(lambda p, g: p - RATE * g, expected, gradient)
    for ours, theirs in zip(
        jax.tree.leaves(learning.state.params), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 8, 1)])
@pytest.mark.parametrize("tied", [True, False])
def test_any_mesh_gives_the_same(
    shape: tuple[int, int, int], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shape[0] == 1:  # small arrays, the head among them, are in parts, too
        monkeypatch.setattr(sharding, "LEAST_SPLIT", 1)
    batch, params, given = made_batch(), model(tied=tied), config(aggregation="grpo", beta=0.1)
    one, other = Learning(ALONE, given, params), Learning(make_mesh(shape), given, params)
    for _ in range(2):
        expected, found = one.step(batch), other.step(batch)
    for name, value in expected.items():
        if name != "padding_share":
            assert found[name] == pytest.approx(value, rel=1e-5, abs=2e-5), name
    for ours, theirs in zip(
        jax.tree.leaves(other.state.params), jax.tree.leaves(one.state.params), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_other_blocks_and_scanned_layers_give_the_same() -> None:
    batch, params = made_batch(), model()
    one = Learning(ALONE, GRPO, params)
    wide = SHAPE._replace(tokens=300, groups=6, members=3, sampled=200)
    other = Learning(ALONE, GRPO, params, scanned=True, shape=wide)
    expected, found = one.step(batch), other.step(batch)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    for ours, theirs in zip(
        jax.tree.leaves(other.state.params), jax.tree.leaves(one.state.params), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_what_is_read_and_what_is_not() -> None:
    batch, params = made_batch(), model()

    def moved(changed: Any) -> Any:
        learning = Learning(ALONE, GRPO, params)
        learning.step(changed)
        return jax.tree.map(np.asarray, learning.state.params)

    expected = moved(batch)
    # An observed token's log-probability by the sampler is not read, nor one that does not train.
    sampler = np.where(learned(batch), batch.sampler_log_probs, np.nan)
    same = moved(batch._replace(sampler_log_probs=sampler.astype(np.float32)))
    jax.tree.map(np.testing.assert_array_equal, same, expected)
    # A word of a tool's result changes what is learned.
    row = MEMBERS + 2
    place = int(np.flatnonzero(batch.log_prob_mask[row])[3]) + 1
    assert not batch.log_prob_mask[row, place]
    tokens = batch.tokens.copy()
    tokens[row, place] = tokens[row, place] % 28 + 1
    other = moved(batch._replace(tokens=tokens))
    assert any(
        np.abs(a - b).max() > 1e-6
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(expected), strict=True)
    )


def test_nothing_is_learned_from_what_is_not_finite_or_flat() -> None:
    batch, params = made_batch(), model()
    learning = Learning(ALONE, GRPO, params)
    bad = batch.sampler_log_probs.copy()
    bad[learned(batch)] = np.nan
    metrics = learning.step(batch._replace(sampler_log_probs=bad))
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, learning.state.params, params)
    metrics = learning.step(batch._replace(rewards=np.ones_like(batch.rewards)))
    assert (metrics["skipped"], metrics["flat_groups"], metrics["tokens"]) == (0, 1, 0)
    assert np.isnan(metrics["entropy"])
    jax.tree.map(np.testing.assert_array_equal, learning.state.params, params)
    assert int(learning.state.step) == 2


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"members": 1}, "config.grpo.members"),
        ({"ratio": "both"}, "config.grpo.ratio is 'both'; use one of token, sequence, cispo"),
        ({"aggregation": "mean"}, "config.grpo.aggregation"),
        ({"learned": "none"}, "config.grpo.learned is 'none'; use one of all, best"),
        ({"clip_low": -0.1}, "config.grpo.clip_low is -0.1; it must be at least 0"),
        ({"sampler_cap": 0.5}, "config.grpo.sampler_cap is 0.5; it must be at least 1"),
    ],
)
def test_refusals(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told.replace(".", r"\.")):
        config(**fields)
