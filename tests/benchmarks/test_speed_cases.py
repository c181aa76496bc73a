"""The speed suite counts the tokens of the rows that the package makes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.speed_cases import evaluation
from benchmarks.speed_cases.setting import peer_settings
from ml_collections import ConfigDict

from benchmarks import ours
from configs import hotpotqa
from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.environments import chunks as env
from qrag_jax.errors import InputError
from tests.episodes_maker import random_store, tiny_encoder

QUESTIONS, STEPS = 6, 2
ROW, IN_STATE = 6, 3  # tokens of a chunk row and of a chunk in a state, at most


def random_texts(given: ConfigDict, folder: Path) -> ours.Texts:
    """Texts of random tokens under a config; `folder` keeps what is cached."""
    config, samples, origin = ours.read_texts(given, "no data set", QUESTIONS, folder)
    store = random_store(0, QUESTIONS)
    return ours.Texts(config, samples, store, EpisodeShape.holding([store]), origin)


@pytest.mark.parametrize(
    "changes",
    [{}, {"opening_id": None}, {"chunk_prefix": (5, 6, 7), "state_prefix": (8,)}],
    ids=["an opening token", "none", "prefixes"],
)
def test_lengths_of_rows(changes: dict[str, Any], tmp_path: Path) -> None:
    given = hotpotqa.get_config("tiny")
    with given.unlocked():
        given.data.update(max_chunk_tokens=ROW, max_chunk_tokens_in_state=IN_STATE)
        given.env.max_steps = STEPS
    texts = random_texts(given, tmp_path)
    made = dataclasses.replace(tiny_encoder(), **changes)
    encoder = ours.Encoder(made, {}, "tiny")
    batch = texts.batch(0, QUESTIONS)
    assert batch.chunk_lengths.max() > ROW

    arrays = jax.tree.map(jnp.asarray, batch)
    form = env.RowForm(made.chunk_opening, made.sep_id, made.pad_id)
    _, expected = env.chunk_rows(arrays, form, row_tokens=ROW)
    np.testing.assert_array_equal(ours.chunk_row_lengths(texts, encoder, batch), expected)

    drawn = np.random.default_rng(0).random(batch.chunk_mask.shape) + ~batch.chunk_mask
    taken = drawn.argsort(axis=1)[:, :STEPS]
    states = evaluation.state_row_lengths(texts, encoder, batch, taken.tolist())
    form = env.RowForm(made.state_opening, made.sep_id, made.pad_id)
    for t in range(STEPS):
        _, expected = env.state_rows(
            arrays, jnp.asarray(taken[:, :t]), form, chunk_tokens=IN_STATE, sort_by_index=False
        )
        np.testing.assert_array_equal(states[:, t], expected)


@pytest.mark.parametrize("step_cost", [0.0, 0.1])
def test_a_reward_that_the_peers_do_not_compute_is_refused(
    step_cost: float, tmp_path: Path
) -> None:
    given = hotpotqa.get_config("tiny")
    with given.unlocked():
        given.reward.step_cost = step_cost
        given.reward.per_fact_reward = 0.25
    texts = random_texts(given, tmp_path)
    encoder = ours.Encoder(tiny_encoder(), {}, "tiny")
    if step_cost:
        told = r"config\.reward\.step_cost is 0\.1, .*; set it to 0\."
        with pytest.raises(InputError, match=told):
            peer_settings(texts, encoder)
    else:
        assert peer_settings(texts, encoder).per_fact_reward == 0.25
