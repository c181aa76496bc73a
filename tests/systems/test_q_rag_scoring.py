"""Scores of Q-RAG: documents of several lengths, and the settings under which a log goes on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections
import pytest

from configs import common, hotpotqa
from qrag_jax.data.loading import DataConfig, sources_section
from qrag_jax.data.sample import Sample
from qrag_jax.errors import InputError
from qrag_jax.metrics.row_log import differing
from qrag_jax.runtime.saved_config import flat
from qrag_jax.systems.config import load_config
from qrag_jax.systems.q_rag_config import QRagConfig
from qrag_jax.systems.q_rag_scoring import BEAM_FIELDS, documents_of_lengths, log_record
from qrag_jax.systems.saved_run import SavedRun
from qrag_jax.systems.scoring import FREE_FIELDS, is_free
from tests.systems.parts import samples_of


@pytest.fixture
def config(tmp_path: Path) -> ml_collections.ConfigDict:
    result = hotpotqa.get_config("tiny")
    result.data.cache = str(tmp_path / "cache")
    return result


def data_of(config: ml_collections.ConfigDict, source: str, **fields: Any) -> DataConfig:
    """The data of an evaluation on this source alone."""
    with config.unlocked():
        config.data.sources = sources_section([source])
        config.data.path = common.invented(config)
    config.data.sources[source].update(**fields)
    return QRagConfig.of(config).dev_data


def documents(data: DataConfig, chunks: int, count: int) -> Sequence[Sample]:
    return documents_of_lengths(data, {chunks: count}, every_story=True)[chunks].samples


@pytest.mark.parametrize("source", ["babilong", "niah"])
def test_documents_of_a_length(config: ml_collections.ConfigDict, source: str) -> None:
    data = data_of(config, source, chunks=14, dev=6)
    of_20, of_50 = (documents(data, length, 4) for length in (20, 50))
    assert [len(sample.chunks) for sample in (*of_20, *of_50)] == [20] * 4 + [50] * 4
    assert [sample.id for sample in of_20] == [sample.id for sample in of_50]
    # No more than there are; at the config's own length they are those of the evaluation.
    assert [*documents(data, 14, 100)] == [*samples_of(config, "dev").all]


def test_documents_that_have_their_length(config: ml_collections.ConfigDict) -> None:
    with pytest.raises(InputError, match="hotpotqa"):
        documents(data_of(config, "hotpotqa"), 20, 4)
    config.eval.path = "needles.jsonl"
    with pytest.raises(InputError, match="niah"):
        documents(data_of(config, "niah"), 20, 4)


def test_every_length_asks_what_fits_the_shortest(config: ml_collections.ConfigDict) -> None:
    data, counts = data_of(config, "babilong", task="qa3", dev=80), {20: 100, 300: 5}
    found = documents_of_lengths(data, counts)
    ids = [[sample.id for sample in found[length].samples] for length in counts]
    assert ids[0][:5] == ids[1] != []
    for each in found.values():
        assert 0 < each.fit.fits == len(ids[0]) < each.fit.stories == 80


# ---------------------------------------------------------------- records of logs

BEST = ("best-6", "ab12")
# What a folder settles: the record has what the encoder does, not what the config asks for.
SETTLED = ("encoder.pooling", "encoder.normalise", "encoder.scale")
NAMES = sorted(flat(common.get_config("hotpotqa").to_dict()))  # of a run on a data set


@pytest.fixture(scope="module")
def run(finished_run: Path) -> SavedRun:
    return SavedRun.open(finished_run, load_config(finished_run / "config.json"))


def other(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 0.5 if math.isinf(value) else value + 1
    if isinstance(value, str):
        return value + "x"
    return (*value, "more") if isinstance(value, tuple) else 0.25


@pytest.mark.parametrize("searched", [False, True])
def test_every_field_that_changes_a_row_is_named(run: SavedRun, searched: bool) -> None:
    """A field that comes later, too, unless somebody shows that it changes no row."""

    def named(field: str, value: Any) -> list[str]:
        changed = dataclasses.replace(run, fields=run.fields | {field: value})
        both = (log_record(each, *BEST, "4", searched=searched) for each in (run, changed))
        return [line.partition(" ")[0] for line in differing(*both)]

    free = FREE_FIELDS if searched else (*FREE_FIELDS, *BEAM_FIELDS)
    for name in NAMES:
        if name in SETTLED or (name not in run.fields and not is_free(name, free)):
            continue
        expected = [] if is_free(name, free) else [f"config.{name}"]
        assert named(name, other(run.fields.get(name))) == expected
    assert sum(is_free(name) for name in NAMES) < len(NAMES) / 2
    assert named("env.of_later", 1) == ["config.env.of_later"]
