"""The planner that a run's config asks for: room for questions it was not shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from qrag_jax import experiment, saved_config
from qrag_jax.data.sample import Sample
from qrag_jax.errors import InputError
from qrag_jax.evaluators import beam
from qrag_jax.saved_run import SavedRun


@pytest.fixture
def run(finished_run: Path) -> SavedRun:
    return SavedRun.open(finished_run, saved_config.load_config(finished_run / "config.json"))


def test_longer_questions_than_those_shown_are_not_cut(run: SavedRun, tmp_path: Path) -> None:
    run.config.data.cache = str(tmp_path)
    shown = Sample("a", "Who ?", ("One.", "Two."), (0,), (), "hotpotqa")
    store = experiment.tokenise_samples(run.config, run.loaded.tokenizer, [shown])
    searcher = beam.make_beam_search(run, run.untrained(), [store])
    assert searcher._max_question_tokens == run.config.data.max_question_tokens == 64
    # Cut where the encoder's positions end: 256 = [CLS] question [SEP] chunk [SEP].
    run.config.data.max_chunk_tokens_in_state = 210
    searcher = beam.make_beam_search(run, run.untrained(), [store])
    assert searcher._max_question_tokens == 256 - 2 - 211
    run.config.data.max_chunk_tokens_in_state = 256
    with pytest.raises(InputError, match=r"a state can reach \d+ tokens"):
        beam.make_beam_search(run, run.untrained(), [store])
