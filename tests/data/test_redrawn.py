"""Redrawn documents: tokens and texts of an epoch agree, in any order, worker, host and start."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape, training_batches
from qrag_jax.data.generators import haystacks
from qrag_jax.data.generators.haystacks import NiahConfig
from qrag_jax.data.lazy_samples import LazySamples, drawn, joined
from qrag_jax.data.redrawn import RedrawnSamples, RedrawnStore, tokenise_redrawn
from qrag_jax.data.sources import babilong
from qrag_jax.data.sources.babilong import BabilongConfig
from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.models.scratch import ScratchConfig, make_scratch_folder

STORIES = BabilongConfig("qa2", chunks=32, train=10)  # so that all of them fit
NEEDLES = NiahConfig("multivalue", chunks=24, train=6)


@pytest.fixture(autouse=True)
def _flags() -> None:
    flags.FLAGS.mark_as_parsed()  # Grain's workers read flags; under app.run they are parsed


def samples(config: BabilongConfig | NiahConfig) -> RedrawnSamples:
    made = (babilong if isinstance(config, BabilongConfig) else haystacks).documents(
        config,  # type: ignore[arg-type]
        "train",
    )
    assert isinstance(made, RedrawnSamples)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("redrawn")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    texts = [text for sample in samples(STORIES) for text in sample.chunks]
    sizes = ScratchConfig(layers=1, hidden=16, heads=2, vocab=300, positions=64)
    make_scratch_folder(folder / "model", texts, sizes, seed=0)
    return TextTokenizer.load(folder / "model")


def tokens(made: RedrawnSamples, tokenizer: TextTokenizer, folder: Path, most: int) -> RedrawnStore:
    return tokenise_redrawn(
        made, tokenizer, max_question_tokens=12, max_chunk_tokens=most, cache=folder
    )


@pytest.fixture(scope="module")
def stores(tokenizer: TextTokenizer, folder: Path) -> dict[str, RedrawnStore]:
    return {
        "babilong": tokens(samples(STORIES), tokenizer, folder, 9),
        "niah": tokens(samples(NEEDLES), tokenizer, folder, 40),
    }


@pytest.fixture(scope="module")
def shape(stores: dict[str, RedrawnStore]) -> EpisodeShape:
    return EpisodeShape.holding([*stores.values()])


def batches(stores: dict[str, RedrawnStore], shape: EpisodeShape, size: int = 4, **settings):
    weights = {"babilong": 0.75, "niah": 0.25}
    weights = {name: weights[name] if len(stores) > 1 else 1.0 for name in stores}
    return training_batches(stores, weights, shape, batch_size=size, seed=3, **settings)


def same(batch: EpisodeBatch, other: EpisodeBatch) -> None:
    for field, value in zip(batch, other, strict=True):
        np.testing.assert_array_equal(field, value)


def test_tokens_are_those_of_the_texts(
    stores: dict[str, RedrawnStore], tokenizer: TextTokenizer
) -> None:
    for config, store, most in ((STORIES, stores["babilong"], 9), (NEEDLES, stores["niah"], 40)):
        made = samples(config)
        assert len(store) == len(made)
        for index in range(len(made)):
            for epoch in (0, 1, 7):
                sample, found = drawn(made, index, epoch), store.document(index, epoch)
                assert found.question.tolist() == tokenizer.encode([sample.question])[0][:12]
                texts = [ids[:most] for ids in tokenizer.encode(sample.chunks)]
                assert [chunk.tolist() for chunk in found.chunks] == texts
                assert tuple(found.support.tolist()) == sample.support


def test_epochs_of_a_story_differ(stores: dict[str, RedrawnStore]) -> None:
    store = stores["babilong"]
    for index in range(len(store)):
        first, second = store.document(index, 0), store.document(index, 1)
        assert first.question.tolist() == second.question.tolist()
        facts = [[doc.chunks[i].tolist() for i in doc.support] for doc in (first, second)]
        assert facts[0] == facts[1]
        assert [c.tolist() for c in first.chunks] != [c.tolist() for c in second.chunks]


def test_what_is_kept_does_not_grow_with_documents(
    tokenizer: TextTokenizer, folder: Path, stores: dict[str, RedrawnStore]
) -> None:
    store = stores["babilong"]
    facts = sum(len(sample.chunks) for sample in samples(STORIES).parts)
    assert store.chunk_texts == facts + len(samples(STORIES).background)
    # A worker gets the places where files are mapped from, and how to draw; no texts, no tokens.
    assert len(pickle.dumps(store)) < 10_000
    assert pickle.loads(pickle.dumps(store)).document(3, 2).support.tolist() == (  # noqa: S301
        store.document(3, 2).support.tolist()
    )
    longer = samples(dataclasses.replace(STORIES, chunks=400))
    assert tokens(longer, tokenizer, folder, 9).chunk_texts == store.chunk_texts
    assert store.longest_chunk >= store.chunk_lengths.max()
    assert 0 < store.truncated_chunks <= store.chunk_texts


def test_content_key_tells_how_documents_are_drawn(
    tokenizer: TextTokenizer, folder: Path, stores: dict[str, RedrawnStore]
) -> None:
    keys = [stores["babilong"].content_key, stores["niah"].content_key]
    assert tokens(samples(STORIES), tokenizer, folder, 9).content_key == keys[0]
    for change in (
        {"seed": 1},
        {"chunks": 33},
        {"noise_repeats": 0},
        {"train": 11},
        {"task": "qa1"},
    ):
        other = samples(dataclasses.replace(STORIES, **change))
        keys.append(tokens(other, tokenizer, folder, 9).content_key)
    assert len(set(keys)) == len(keys)


def test_batches_count_epochs(stores: dict[str, RedrawnStore], shape: EpisodeShape) -> None:
    only = {"babilong": stores["babilong"]}
    iterator = batches(only, shape, size=5)
    for epoch in range(3):
        halves = [next(iterator) for _ in range(2)]
        assert [set(half.epoch.tolist()) for half in halves] == [{epoch}] * 2
        numbers = [int(number) for half in halves for number in half.sample]
        assert sorted(numbers) == list(range(10))
        for half in halves:
            for place, number in enumerate(half.sample.tolist()):
                document = stores["babilong"].document(number, epoch)
                assert np.flatnonzero(half.support[place]).tolist() == document.support.tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_over_the_border_of_an_epoch(
    stores: dict[str, RedrawnStore], shape: EpisodeShape, workers: int
) -> None:
    iterator = batches(stores, shape, workers=workers)
    for _ in range(2):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    rest = [next(iterator) for _ in range(8)]
    assert {int(epoch) for batch in rest for epoch in batch.epoch} >= {0, 1, 2}
    resumed = batches(stores, shape, workers=workers)
    resumed.set_state(state)
    for batch in rest:
        same(batch, next(resumed))
    if workers:  # nor does it matter who builds a batch
        plain = batches(stores, shape)
        for _ in range(2):
            next(plain)
        for batch in rest:
            same(batch, next(plain))


def test_hosts_draw_what_one_would(stores: dict[str, RedrawnStore], shape: EpisodeShape) -> None:
    def rows(batch: EpisodeBatch) -> dict[tuple[int, int], bytes]:
        which = zip(batch.sample.tolist(), batch.epoch.tolist(), strict=True)
        return {key: batch.chunks[place].tobytes() for place, key in enumerate(which)}

    one = batches(stores, shape)
    hosts = [batches(stores, shape, size=2, shard=(host, 2)) for host in range(2)]
    for _ in range(8):
        assert rows(next(one)) == rows(next(hosts[0])) | rows(next(hosts[1]))


def test_samples_of_a_mixture_by_number_and_epoch() -> None:
    told, needles = samples(STORIES), samples(NEEDLES)
    fixed = LazySamples(2, lambda i: told.parts[i])
    mixture = joined([[told.parts[4]], told, fixed, needles])
    assert drawn(mixture, 0, 5) == told.parts[4]
    assert drawn(mixture, 3, 5) == drawn(told, 2, 5) != drawn(told, 2, 4)
    assert drawn(mixture, 12, 5) == told.parts[1]
    assert drawn(mixture, 18, 5) == drawn(needles, 5, 5)
    assert mixture[-1] == needles[-1] == drawn(needles, 5, 0)
    assert mixture[3] == drawn(told, 2, 0)
