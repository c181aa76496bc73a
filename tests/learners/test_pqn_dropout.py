"""PQN with dropout: play and learning see the same masks, however a step is split."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qrag_jax.learners.pqn import FusedGradient, Towers
from qrag_jax.models.compute.dropout import TokenDropout, row_digests, token_digests
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.packing import padded_layout
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.models.trunks.trunk import WORDS
from qrag_jax.rollouts.chunks import CHUNK, STATE, Actor, Draws
from tests.devices import virtual_devices
from tests.episodes_maker import tower
from tests.learners.test_pqn_lora import BATCH, ENCODERS, KEYS, adapters
from tests.rollouts.play_setup import (
    ALPHA,
    CONFIG,
    PLAN,
    PQN,
    feedback,
    jitted_gradient,
    jitted_rollout,
)

RATE = 0.4
KEY = jax.random.key(3)
ENCODER = TextEncoder(**(vars(ENCODERS["bert"]) | {"lora_dropout": RATE}))


def embed(params: Any, tokens: np.ndarray, lengths: np.ndarray) -> jax.Array:
    """Rows padded side by side, each with its masks: nothing packed, no row left out."""
    where, width = padded_layout(lengths, tokens.shape[1]), tokens.shape[1]
    digests = jnp.repeat(row_digests(jnp.asarray(tokens), jnp.asarray(lengths)), width)
    dropout = TokenDropout(token_digests(digests, where.position), RATE)
    prepared = ENCODER.module.unstack(params)
    words = prepared[WORDS][tokens.reshape(-1)]
    return ENCODER.embed_words(prepared, words, where._replace(dropout=dropout))


def test_gradient_is_that_of_the_loss_that_was_played() -> None:
    base, online = jax.tree.map(jnp.asarray, tower(ENCODER, 0)), adapters("bert", 0)
    params, target = Adapted(base, online), Adapted(base, adapters("bert", 1))
    towers = jax.random.split(KEY, 2)
    actor, draws = Actor(ENCODER, PLAN, CONFIG), Draws(KEYS, ALPHA)
    sides = params._replace(dropout_key=towers), target
    played = jitted_rollout(actor, sides, BATCH, draws)
    played = jax.tree.map(np.asarray, played)
    goals = np.asarray(PQN.targets(played, feedback(BATCH, played))).reshape(-1)
    valid = played.valid.reshape(-1)

    def rows(of: str) -> tuple[np.ndarray, np.ndarray]:
        tokens = getattr(played, f"{of}_tokens").reshape(len(valid), -1)
        return tokens, getattr(played, f"{of}_lengths").reshape(-1)

    @jax.jit
    def embeddings(online):
        both = params._replace(adapters=online, dropout_key=towers)
        return tuple(
            embed(ENCODER.tower(both, number), *rows(of))
            for number, of in ((STATE, "state"), (CHUNK, "chunk"))
        )

    def whole_loss(online):
        s, a = embeddings(online)
        twin = (s * a).reshape(len(s), 2, -1).sum(-1)
        return (valid[:, None] * 0.5 * (2 * twin - goals[:, None]) ** 2).sum()

    # What was acted on are the dropped embeddings.
    for found, of in zip(embeddings(online), ("state", "chunk"), strict=True):
        acted_on = getattr(played, f"{of}_embeddings").reshape(len(valid), -1)
        np.testing.assert_allclose(found[valid], acted_on[valid], atol=1e-5)
    expected_loss, expected = jax.jit(jax.value_and_grad(whole_loss))(online)
    gradient_of = FusedGradient(actor, PQN, feedback)
    gradient, sums = jitted_gradient(gradient_of, Towers(params, target), BATCH, draws, KEY)
    assert float(sums.loss) == pytest.approx(float(expected_loss), rel=1e-5)
    largest = max(float(optax.tree.norm(leaf)) for leaf in jax.tree.leaves(expected))
    for one, two in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert float(optax.tree.norm(one - two)) < 2e-5 * largest

    # The acting policy is another one than without dropout, the target's values are not.
    plain = jitted_rollout(actor, (params, target), BATCH, draws)
    present = BATCH.chunk_mask
    assert np.abs(plain.first_q - played.first_q)[present].max() > 1e-2
    np.testing.assert_allclose(plain.values[:, 0], played.values[:, 0], atol=1e-5)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    out = tmp_path_factory.mktemp("steps")
    command = [sys.executable, "-m", "tests.learners.dropout_steps", str(out)]
    root = Path(__file__).parents[2]
    subprocess.run(command, cwd=root, env=virtual_devices(2), check=True, timeout=600)
    return {path.stem: dict(np.load(path)) for path in out.iterdir()}


@pytest.mark.parametrize("of", ["", "trunk "], ids=["adapters", "trunk"])
def test_devices_and_micro_batches_see_the_same_masks(cases, of: str) -> None:
    whole, split = cases[f"{of}whole"], cases[f"{of}split"]
    assert whole.keys() == split.keys()
    for name, value in whole.items():
        if "padding_share" not in name:  # of smaller batches
            np.testing.assert_allclose(split[name], value, rtol=2e-4, atol=1e-5, err_msg=name)


def test_a_step_drops(cases) -> None:
    for number in range(3):
        losses = [cases[name][f"['metrics {number}']['loss']"] for name in ("whole", "undropped")]
        assert abs(losses[0] - losses[1]) > 1e-3
