"""Documents of several lengths: made of one set of stories, however short the shortest are."""

from __future__ import annotations

from pathlib import Path

import ml_collections
import pytest

from configs import hotpotqa
from qrag_jax.data.config import DataConfig
from qrag_jax.errors import InputError
from qrag_jax.systems.q_rag_config import QRagConfig
from qrag_jax.systems.q_rag_scoring import documents_of_lengths
from tests.systems.parts import only_source, samples_of


@pytest.fixture
def config(tmp_path: Path) -> ml_collections.ConfigDict:
    result = hotpotqa.get_config("tiny")
    result.data.cache = str(tmp_path / "cache")
    return result


def of(config: ml_collections.ConfigDict, source: str, **fields) -> ml_collections.ConfigDict:
    only_source(config, source)
    config.data.sources[source].update(**fields)
    return config


def data(config: ml_collections.ConfigDict) -> DataConfig:
    return QRagConfig.of(config).dev_data


def documents_of_length(data: DataConfig, chunks: int, count: int):
    return documents_of_lengths(data, {chunks: count}, every_story=True)[chunks].samples


@pytest.mark.parametrize("source", ["babilong", "niah"])
def test_documents_of_a_length(config: ml_collections.ConfigDict, source: str) -> None:
    of(config, source, chunks=14, dev=6)
    of_20, of_50 = (documents_of_length(data(config), length, 4) for length in (20, 50))
    assert [len(sample.chunks) for sample in (*of_20, *of_50)] == [20] * 4 + [50] * 4
    assert [sample.id for sample in of_20] == [sample.id for sample in of_50]
    assert len(documents_of_length(data(config), 20, 100)) == 6  # no more than there are
    dev = samples_of(config, "dev").all
    assert list(documents_of_length(data(config), 14, 6)) == list(dev)


def test_documents_that_have_their_length(config: ml_collections.ConfigDict) -> None:
    for source, path in (("hotpotqa", ""), ("niah", "needles.jsonl")):
        only_source(config, source)
        config.eval.path = path
        with pytest.raises(InputError, match=source):
            documents_of_length(data(config), 20, 4)


@pytest.mark.parametrize("task", ["qa3", "qa5"])
def test_every_length_asks_what_fits_the_shortest(
    config: ml_collections.ConfigDict, task: str
) -> None:
    of(config, "babilong", task=task, dev=80)
    counts = {20: 100, 40: 100, 300: 5}
    found, lengths = documents_of_lengths(data(config), counts), [*counts]
    ids = [[sample.id for sample in found[length].samples] for length in lengths]
    assert ids[0] == ids[1] != []
    assert ids[0][:5] == ids[2]
    for length, documents in found.items():
        assert {len(sample.chunks) for sample in documents.samples} == {length}
        assert 0 < documents.fit.fits == len(ids[0]) < documents.fit.stories == 80
    # Alone, the longest asks all there is.
    assert documents_of_lengths(data(config), {300: 100})[300].fit.fits == 80
    every = documents_of_lengths(data(config), counts, every_story=True)
    fits = [every[length].fit.fits for length in lengths]
    assert fits[0] == len(ids[0]) < fits[1] < fits[2] == 80
    config.data.sources.babilong.most_facts = 10  # the config's limit holds besides
    assert documents_of_lengths(data(config), counts)[300].fit.most == 10
