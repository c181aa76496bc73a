"""The search that a run's config asks for: room for questions it was not shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from qrag_jax.data.loading import tokenise_samples
from qrag_jax.data.sample import Sample
from qrag_jax.errors import InputError
from qrag_jax.evaluators import beam
from qrag_jax.rollouts.beam_search import BeamSearch
from qrag_jax.systems.q_rag_config import load_config
from qrag_jax.systems.saved_run import SavedRun


@pytest.fixture
def run(finished_run: Path) -> SavedRun:
    return SavedRun.open(finished_run, load_config(finished_run / "config.json"))


def test_longer_questions_than_those_shown_are_not_cut(run: SavedRun, tmp_path: Path) -> None:
    shown = Sample("a", "Who ?", ("One.", "Two."), (0,), (), "hotpotqa")
    data = dataclasses.replace(run.config.data, cache=str(tmp_path))
    store = tokenise_samples(data, run.loaded.tokenizer, [shown])

    def searcher(in_state: int) -> BeamSearch:
        rollout = dataclasses.replace(run.player.config, max_chunk_tokens_in_state=in_state)
        player = dataclasses.replace(run.player, config=rollout)
        return beam.make_beam_search(player, run.search, run.untrained(), [store])

    found = searcher(data.max_chunk_tokens_in_state)
    assert found._max_question_tokens == data.max_question_tokens == 64
    # Cut where the encoder's positions end: 256 = [CLS] question [SEP] chunk [SEP].
    assert searcher(210)._max_question_tokens == 256 - 2 - 211
    with pytest.raises(InputError, match="state can reach"):
        searcher(256)
