"""The speed suite counts the tokens of the rows that the package makes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import ours
from benchmarks.speed_cases import evaluation
from configs import hotpotqa
from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.environments import chunks as env
from tests.episodes_maker import random_store, tiny_encoder

QUESTIONS, STEPS = 6, 2
ROW, IN_STATE = 6, 3  # tokens of a chunk row and of a chunk in a state, at most


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
    config, samples, origin = ours.read_texts(given, "no data set", QUESTIONS, tmp_path)
    store = random_store(0, QUESTIONS)
    texts = ours.Texts(config, samples, store, EpisodeShape.holding([store]), origin)
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
