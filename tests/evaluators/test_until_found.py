"""Play of the full budget, cut at its last fact, is the play that ends there."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import jax
import numpy as np

from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.data.tokens import tokenise
from qrag_jax.environments.chunks import state_width
from qrag_jax.evaluators.episodes import EpisodeEvaluator, Player, make_play
from qrag_jax.feedback.facts import ground_truth
from qrag_jax.metrics.facts import until_found
from qrag_jax.metrics.rows import Row
from qrag_jax.rollouts.chunks import RolloutConfig
from tests.devices import mesh_of
from tests.rollouts.play_setup import (
    QUESTION_TOKENS,
    ROW_TOKENS,
    block_shapes,
    loaded,
    params,
    sample,
    shardings,
)

FULL = RolloutConfig(
    max_steps=4,
    never_terminate=True,
    sort_by_index=False,
    max_chunk_tokens=ROW_TOKENS,
    max_chunk_tokens_in_state=5,
    top_k_actions=3,
    stop_action=True,
)
SAMPLES = [
    sample(seed, chunks, facts)
    for seed, (chunks, facts) in enumerate([(6, 2), (2, 1), (9, 1), (3, 2), (1, 1), (5, 1), (6, 3)])
]


def played(config: RolloutConfig, folder: Path, penalize: bool, gamma: float) -> list[Row]:
    store = tokenise(
        SAMPLES,
        loaded().tokenizer,
        max_question_tokens=QUESTION_TOKENS,
        max_chunk_tokens=ROW_TOKENS - 2,
        cache=folder,
    )
    mesh, encoder = mesh_of(), loaded().encoder

    def feedback(batch, trajectory):
        reward = partial(ground_truth, penalize_extra_steps=penalize)
        return reward(batch.support, trajectory.actions, trajectory.valid)

    blocks = block_shapes(state_width(1, QUESTION_TOKENS, 5, config.max_steps - 1))
    where = shardings(mesh)
    play = make_play(Player(mesh, where, encoder, config, feedback, gamma), blocks)
    towers, shape = jax.device_put(params(), where), EpisodeShape.holding([store])
    every = range(len(SAMPLES))
    return EpisodeEvaluator(play, mesh, SAMPLES, store, shape, 4, every).rows(towers)[0]


def test_cutting_equals_ending_in_play(tmp_path: Path) -> None:
    """The play of the environment that ends at the last fact, with the reference's reward."""
    whole = played(FULL, tmp_path, penalize=True, gamma=0.9)
    ends = dataclasses.replace(FULL, never_terminate=False)
    ended = played(ends, tmp_path, penalize=False, gamma=1.0)
    for cut, expected in zip(map(until_found, whole), ended, strict=True):
        np.testing.assert_allclose(cut.q_values, expected.q_values, atol=1e-5)
        assert dataclasses.replace(cut, q_values=expected.q_values) == expected
    assert {row.ret for row in ended} == {0.0, 1.0}
    shorter = [len(a.pred_idx) < len(b.pred_idx) for a, b in zip(ended, whole, strict=True)]
    assert any(shorter)
    assert not all(shorter)
