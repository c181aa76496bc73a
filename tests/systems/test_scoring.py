"""Scores in a run's folder are of the run's own evaluation data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from configs import hotpotqa_musique
from qrag_jax.errors import InputError
from qrag_jax.systems.scoring import check_own_data
from tests.systems.parts import samples_of


def config(cache: Path) -> ConfigDict:
    made = hotpotqa_musique.get_config("tiny")
    made.data.cache = str(cache)
    return made


def limit(config: ConfigDict) -> None:
    config.data.limit = 3


def mixture(config: ConfigDict) -> None:
    assert config.data.mixture == "size"
    config.data.mixture = "weights"


def weight(config: ConfigDict) -> None:
    config.data.sources.musique.weight = 5.0


def no_musique(config: ConfigDict) -> None:
    with config.unlocked():
        del config.data.sources.musique


def seed(config: ConfigDict) -> None:
    config.data.synthetic.seed = 1


def question_tokens(config: ConfigDict) -> None:
    config.data.max_question_tokens = 8


@pytest.mark.parametrize("change", [limit, mixture, weight])
def test_fields_that_only_training_reads_are_free(
    change: Callable[[ConfigDict], None], tmp_path: Path
) -> None:
    saved, given = config(tmp_path), config(tmp_path)
    change(given)
    assert list(samples_of(given, "dev").all) == list(samples_of(saved, "dev").all)
    check_own_data(tmp_path, saved, given)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (no_musique, "data.sources.musique.weight"),
        (seed, "data.synthetic.seed"),
        (question_tokens, "data.max_question_tokens"),
    ],
)
def test_fields_that_change_what_is_scored_are_named(
    change: Callable[[ConfigDict], None], name: str, tmp_path: Path
) -> None:
    saved, given = config(tmp_path), config(tmp_path)
    change(given)
    for old, new in ((saved, given), (given, saved)):
        with pytest.raises(InputError) as caught:
            check_own_data(tmp_path, old, new)
        assert f"(not as in its config: config.{name}); give --out=FOLDER" in str(caught.value)
