"""PQN with adapters on a frozen base: the naive loss's gradient, and what a step leaves alone."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from qrag_jax.evaluators import episodes as evaluation
from qrag_jax.learners import placement
from qrag_jax.learners.pqn import FusedGradient, Towers
from qrag_jax.learners.step import make_train_step
from qrag_jax.models.adapters import LoraConfig, new_adapters
from qrag_jax.models.compute.lora import Adapted, merge
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import BlockShapes, pull_back
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.models.trunks import bert_weights, qwen3_weights
from qrag_jax.rollouts.chunks import CHUNK, STATE, Actor, Draws
from qrag_jax.runtime.mesh import AXES, shard_batch
from tests.episodes_maker import tower
from tests.learners import test_pqn_qwen3
from tests.learners.three_steps import flat, two_towers
from tests.rollouts import play_setup
from tests.rollouts.play_setup import (
    ALPHA,
    CONFIG,
    EPISODES,
    PQN,
    episodes,
    feedback,
    jitted_gradient,
    jitted_rollout,
)

LORA = LoraConfig(rank=3, alpha=6.0)
ENCODERS = {
    name: TextEncoder(**(vars(encoder) | {"lora_scale": LORA.scale}))
    for name, encoder in (("bert", play_setup.ENCODER), ("qwen3", test_pqn_qwen3.ENCODER))
}
TABLES = {"bert": bert_weights.TABLE, "qwen3": qwen3_weights.TABLE}
LONGEST = 24
PLAN = BlockShapes(
    Blocks((144,), (9,), (8.0,)),
    Blocks((80,), (LONGEST,), (12.0,)),
    Blocks((80,), (LONGEST,), (12.0,)),
)
BATCH = episodes()
KEYS = jax.random.split(jax.random.key(7), EPISODES)
# Fewer maps than all: fused maps of which some parts have an adapter and some have none.
TARGETS = {"bert": ("query", "value", "intermediate.dense"), "qwen3": "all-linear"}


def adapters(name: str, seed: int) -> dict[str, Any]:
    """Two different towers' adapters, stacked, B too far from zero."""
    module, rng = ENCODERS[name].module, np.random.default_rng(seed)
    one = new_adapters(TABLES[name], module, LoraConfig(3, 6.0, TARGETS[name]), seed)
    return jax.tree.map(
        lambda leaf: 0.3 * rng.standard_normal((2, *leaf.shape)).astype(np.float32), one
    )


def by_hand(base: dict[str, Any], stacked: dict[str, Any], number: int) -> dict[str, Any]:
    """One tower with its low-rank products added to the kernels, map by map."""
    layers = dict(base["layers"])
    for name, leaves in stacked["layers"].items():
        a, b = leaves["lora_a"][number], leaves["lora_b"][number]
        kernel = layers[name]["kernel"] + LORA.scale * jnp.einsum("nir,nro->nio", a, b)
        layers[name] = layers[name] | {"kernel": kernel}
    return base | {"layers": layers}


@pytest.mark.parametrize("name", list(ENCODERS))
def test_gradient_is_that_of_the_whole_loss(name: str) -> None:
    encoder = ENCODERS[name]
    base, online = jax.tree.map(jnp.asarray, tower(encoder, 0)), adapters(name, 0)
    params, target = Adapted(base, online), Adapted(base, adapters(name, 1))
    actor, draws = Actor(encoder, PLAN, CONFIG), Draws(KEYS, ALPHA)
    played = jitted_rollout(actor, (params, target), BATCH, draws)
    played = jax.tree.map(np.asarray, played)
    goals = np.asarray(PQN.targets(played, feedback(BATCH, played))).reshape(-1)
    valid = played.valid.reshape(-1)

    def rows(of: str) -> tuple[np.ndarray, np.ndarray]:
        tokens = getattr(played, f"{of}_tokens").reshape(len(valid), -1)
        return tokens, getattr(played, f"{of}_lengths").reshape(-1)

    def whole_loss(online):
        s = encoder.embed(by_hand(base, online, STATE), *rows("state"))
        a = encoder.embed(by_hand(base, online, CHUNK), *rows("chunk"))
        twin = (s * a).reshape(len(s), 2, -1).sum(-1)
        return (valid[:, None] * 0.5 * (2 * twin - goals[:, None]) ** 2).sum()

    expected_loss, expected = jax.jit(jax.value_and_grad(whole_loss))(online)
    gradient_of = FusedGradient(actor, PQN, feedback)
    gradient, sums = jitted_gradient(gradient_of, Towers(params, target), BATCH, draws)
    # The same loss: the rollout played with merged weights, as it were.
    assert float(sums.loss) == pytest.approx(float(expected_loss), rel=1e-5)
    assert jax.tree.structure(gradient) == jax.tree.structure(expected)
    norms = [float(optax.tree.norm(leaf)) for leaf in jax.tree.leaves(expected)]
    assert min(norms) > 1e-4 * max(norms)  # every adapter is reached
    difference = jax.tree.map(jnp.subtract, gradient, expected)
    for leaf in jax.tree.leaves(difference):
        assert float(optax.tree.norm(leaf)) < 2e-5 * max(norms)


@pytest.mark.parametrize("name", list(ENCODERS))
def test_merged_equals_unmerged(name: str) -> None:
    encoder, base, stacked = ENCODERS[name], tower(ENCODERS[name], 0), adapters(name, 0)
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 40, (4, 9)).astype(np.int32)
    lengths = np.array([9, 1, 0, 5], np.int32)
    embed = jax.jit(encoder.embed)
    one = Adapted(base, jax.tree.map(lambda leaf: leaf[CHUNK], stacked))
    merged = merge(one, encoder.lora_scale)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    found = embed(encoder.tower(Adapted(base, stacked), CHUNK), tokens, lengths)
    np.testing.assert_allclose(embed(merged, tokens, lengths), found, atol=1e-5)
    assert np.abs(found - embed(base, tokens, lengths)).max() > 1e-2


def products(encoder: TextEncoder, params: Any) -> set[str]:
    """Shapes of all matrix products in the compiled pull-back of one block."""
    tokens = np.full((4, 20), 7, np.int32) + np.arange(4, dtype=np.int32)[:, None]
    lengths, cotangents = np.full(4, 20, np.int32), np.ones((4, encoder.width), np.float32)
    program = jax.jit(pull_back, static_argnums=(0, 1))
    lowered = program.lower(encoder, PLAN.gradients, params, tokens, lengths, cotangents)
    return set(re.findall(r"= f32\[([\d,]+)\]\S* dot\(", lowered.compile().as_text()))


def test_no_gradient_of_a_frozen_kernel_is_computed() -> None:
    encoder = ENCODERS["bert"]
    base = tower(encoder, 0)
    # (in, out) of the feed-forward maps, the attention's output, and the three maps fused.
    of_kernels = {"16,32", "32,16", "16,16", "16,48"}
    assert of_kernels <= products(encoder, base)
    one = jax.tree.map(lambda leaf: leaf[0], adapters("bert", 0))
    of_adapters = products(encoder, Adapted(base, one))
    assert not of_kernels & of_adapters
    assert {"16,3", "3,32"} <= of_adapters  # d_A and d_B of the feed-forward map


def test_a_step_changes_the_adapters_and_nothing_else() -> None:
    encoder = ENCODERS["bert"]
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES)
    base, one = tower(encoder, 0), jax.tree.map(lambda leaf: leaf[0], adapters("bert", 0))
    towers = two_towers(mesh, one, Actor(encoder, PLAN, CONFIG), accumulation=2, base=base)
    step, placed = make_train_step(towers, feedback), towers.base
    state = towers.first_state(one, 42)
    start = flat(state.params)
    assert all("lora_" in name for name in start)
    # Moments of adapters, and two counters: nothing of the base is kept in the state.
    moments = {name for name in flat(state.opt_state) if "lora_" in name}
    assert len(moments) == 2 * len(start)
    assert all(leaf.ndim == 0 for n, leaf in flat(state.opt_state).items() if n not in moments)
    for number in (1, 2, 3):
        batch = shard_batch(mesh, episodes(number))
        with jax.transfer_guard("disallow"):
            state, metrics = step(state, batch, placed)
    assert np.isfinite(float(metrics["loss"]))
    for name, value in flat(state.params).items():
        assert np.abs(value - start[name]).max() > 1e-3, name
    for name, value in flat(state.target_params).items():
        assert 0 < np.abs(value - start[name]).max() < 1e-2, name
    for name, value in flat(placed).items():
        np.testing.assert_array_equal(value, flat(base)[name], err_msg=name)

    # Evaluation plays the towers over the one base as it plays merged ones.
    how = encoder, CONFIG, feedback, 0.9
    player = evaluation.Player(mesh, towers.params_shardings, *how)
    play = evaluation.make_play(player, PLAN)
    played = play(towers.with_base(state.params), shard_batch(mesh, BATCH))
    merged = [by_hand(base, jax.device_get(state.params), i) for i in (STATE, CHUNK)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *merged)
    where = placement.params_shardings(mesh, (), base)
    plain = evaluation.make_play(evaluation.Player(mesh, where, *how), PLAN)
    expected = plain(jax.device_put(stacked, where), shard_batch(mesh, BATCH))
    np.testing.assert_array_equal(played.multi_step.taken, expected.multi_step.taken)
    np.testing.assert_allclose(played.multi_step.q, expected.multi_step.q, atol=1e-4)
