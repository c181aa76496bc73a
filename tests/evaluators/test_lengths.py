"""Documents of several lengths: made of one set of stories, however short the shortest are."""

from __future__ import annotations

from pathlib import Path

import ml_collections
import pytest

from configs import hotpotqa
from qrag_jax import experiment
from qrag_jax.errors import InputError
from qrag_jax.evaluators.lengths import documents_of_length, documents_of_lengths


@pytest.fixture
def config(tmp_path: Path) -> ml_collections.ConfigDict:
    result = hotpotqa.get_config("tiny")
    result.data.cache = str(tmp_path / "cache")
    return result


def of(config: ml_collections.ConfigDict, source: str, **fields) -> ml_collections.ConfigDict:
    with config.unlocked():
        config.data.sources = ml_collections.ConfigDict({source: 1.0})
    config.data[source].update(**fields)
    return config


@pytest.mark.parametrize("source", ["babilong", "niah"])
def test_documents_of_a_length(config: ml_collections.ConfigDict, source: str) -> None:
    with config.unlocked():
        config.data.sources = ml_collections.ConfigDict({source: 1.0})
    config.data[source].update(chunks=14, dev=6)
    of_20, of_50 = (documents_of_length(config, length, 4) for length in (20, 50))
    assert [len(sample.chunks) for sample in (*of_20, *of_50)] == [20] * 4 + [50] * 4
    assert [sample.id for sample in of_20] == [sample.id for sample in of_50]
    assert len(documents_of_length(config, 20, 100)) == 6  # no more than there are
    dev = experiment.read_samples(config, "dev", hold_out=True).all
    assert list(documents_of_length(config, 14, 6)) == list(dev)


def test_documents_that_have_their_length(config: ml_collections.ConfigDict) -> None:
    with pytest.raises(InputError, match="documents of hotpotqa cannot be made longer or shorter"):
        documents_of_length(config, 20, 4)
    with config.unlocked():
        config.data.sources = ml_collections.ConfigDict({"niah": 1.0})
    config.eval.path = "needles.jsonl"
    with pytest.raises(InputError, match="or of niah without data files, at several lengths"):
        documents_of_length(config, 20, 4)


@pytest.mark.parametrize("task", ["qa3", "qa5"])
def test_every_length_asks_what_fits_the_shortest(
    config: ml_collections.ConfigDict, task: str
) -> None:
    of(config, "babilong", task=task, dev=80)
    lengths, counts = [20, 40, 300], [100, 100, 5]
    found = documents_of_lengths(config, lengths, counts)
    ids = [[sample.id for sample in found[length].samples] for length in lengths]
    assert ids[0] == ids[1] != []
    assert ids[0][:5] == ids[2]
    for length, documents in found.items():
        assert {len(sample.chunks) for sample in documents.samples} == {length}
        assert 0 < documents.fit.fits == len(ids[0]) < documents.fit.stories == 80
        assert str(documents.fit) == f"fits {len(ids[0])} of 80"
        assert f"{len(ids[0])} of 80 {task} stories" in documents.line
    alone = documents_of_lengths(config, [300], [100])[300]
    assert str(alone.fit) == "fits 80 of 80"  # alone, the longest asks all there is
    every = documents_of_lengths(config, lengths, counts, every_story=True)
    fits = [every[length].fit.fits for length in lengths]
    assert fits[0] == len(ids[0]) < fits[1] < fits[2] == 80
    config.data.babilong.most_facts = 10  # the config's own limit holds besides
    assert documents_of_lengths(config, lengths, counts)[300].fit.most == 10


def test_needles_all_fit(config: ml_collections.ConfigDict) -> None:
    found = documents_of_lengths(of(config, "niah", dev=6), [20, 50], [4, 4])
    assert {str(documents.fit) for documents in found.values()} == {"fits 6 of 6"}
    short, long = (documents.samples for documents in found.values())
    assert [sample.question for sample in short] == [sample.question for sample in long]
