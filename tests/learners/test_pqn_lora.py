"""PQN with adapters on a frozen base: the naive loss's gradient, and what a step leaves alone."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.evaluators import episodes as evaluation
from qrag_jax.learners import placement
from qrag_jax.learners.step import make_train_step
from qrag_jax.models.compute.lora import Adapted, merge
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import BlockShapes, TokenRows, pull_back
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.rollouts.chunks import CHUNK, STATE, Actor
from qrag_jax.runtime.mesh import shard_batch
from tests.devices import mesh_of
from tests.episodes_maker import tower
from tests.learners.three_steps import flat, two_towers
from tests.learners.whole_loss import ADAPTED, adapters, by_hand
from tests.rollouts.play_setup import (
    CONFIG,
    episodes,
    feedback,
)

ENCODERS = ADAPTED
LONGEST = 24
PLAN = BlockShapes(
    Blocks((144,), (9,), (8.0,)),
    Blocks((80,), (LONGEST,), (12.0,)),
    Blocks((80,), (LONGEST,), (12.0,)),
)
BATCH = episodes()


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
    lowered = program.lower(encoder, PLAN.gradients, params, TokenRows(tokens, lengths), cotangents)
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
    mesh = mesh_of()
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
