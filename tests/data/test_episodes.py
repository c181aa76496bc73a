"""Batches of episodes: padding, mixtures, workers; documents that each epoch draws again."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from qrag_jax.data.episodes import (
    EpisodeBatch,
    EpisodeShape,
    EpisodeSource,
    check_steps,
    empty_episode,
    evaluation_batches,
    training_batches,
)
from qrag_jax.data.generators import haystacks
from qrag_jax.data.generators.haystacks import NiahConfig
from qrag_jax.data.lazy_samples import LazySamples, drawn, joined
from qrag_jax.data.redrawn import RedrawnSamples, RedrawnStore, tokenise_redrawn
from qrag_jax.data.sample import Sample
from qrag_jax.data.sources import babilong
from qrag_jax.data.sources.babilong import BabilongConfig
from qrag_jax.data.sources.registry import mix_weights
from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.errors import InputError
from qrag_jax.models.scratch import ScratchConfig, make_scratch_folder
from tests.episodes_maker import random_store

FIRST = 1000  # the first token of question 0


STORE = random_store(0, 24, FIRST)


OTHER = random_store(1, 10, 5000)


SHAPE = EpisodeShape.holding([STORE, OTHER])


@pytest.fixture(autouse=True)
def _flags() -> None:
    flags.FLAGS.mark_as_parsed()  # Grain's workers read flags; under app.run they are parsed


def batches(seed: int = 0, size: int = 4, stores=None, weights=None, **settings):
    stores = stores or {"one": STORE}
    weights = weights or dict.fromkeys(stores, 1 / len(stores))
    return training_batches(stores, weights, SHAPE, batch_size=size, seed=seed, **settings)


def rows(batch: EpisodeBatch) -> list[int]:
    """Which sample each episode is, read off its question rather than off its number."""
    return [int(token) for token in batch.question[:, 0]]


def check_episode(episode: EpisodeBatch, store, index: int) -> None:
    first, end = store.sample_starts[index], store.sample_starts[index + 1]
    question = store.text(first)
    assert int(episode.question_length) == len(question)
    np.testing.assert_array_equal(episode.question[: len(question)], question)
    assert not episode.question[len(question) :].any()
    for place in range(SHAPE.chunks):
        there = first + 1 + place < end
        text = store.text(first + 1 + place) if there else np.zeros(0)
        assert bool(episode.chunk_mask[place]) == there
        assert int(episode.chunk_lengths[place]) == len(text)
        np.testing.assert_array_equal(episode.chunks[place, : len(text)], text)
        assert not episode.chunks[place, len(text) :].any()
    assert np.flatnonzero(episode.support).tolist() == store.support_of(index).tolist()
    assert int(episode.sample) == index


def at(batch: EpisodeBatch, place: int) -> EpisodeBatch:
    return EpisodeBatch(*(field[place] for field in batch))


def test_shape_is_the_smallest_that_holds_all() -> None:
    for size, lengths in (
        (SHAPE.question_tokens, [s.question_lengths for s in (STORE, OTHER)]),
        (SHAPE.chunk_tokens, [s.chunk_lengths for s in (STORE, OTHER)]),
        (SHAPE.chunks, [s.chunk_counts for s in (STORE, OTHER)]),
    ):
        assert size == np.concatenate(lengths).max()


def test_a_batch_stacks_episodes() -> None:
    batch = next(batches())
    tokens, chunks = SHAPE.chunk_tokens, SHAPE.chunks
    assert batch.question.shape == (4, SHAPE.question_tokens)
    assert batch.question_length.shape == batch.sample.shape == (4,)
    assert batch.chunks.shape == (4, chunks, tokens)
    assert batch.chunk_lengths.shape == (4, chunks)
    assert batch.chunk_mask.shape == batch.support.shape == (4, chunks)
    for name in ("question", "question_length", "chunks", "chunk_lengths", "sample"):
        assert getattr(batch, name).dtype == np.int32, name
    assert batch.chunk_mask.dtype == batch.support.dtype == np.bool_
    for place, index in enumerate(batch.sample):
        check_episode(at(batch, place), STORE, int(index))


def take(iterator, count: int) -> list[int]:
    return [row for _ in range(count) for row in rows(next(iterator))]


def test_a_mixture_by_size_holds_every_question_once_an_epoch() -> None:
    stores = {"one": STORE, "two": OTHER}
    shares = mix_weights(dict.fromkeys(stores, 1.0), {n: len(s) for n, s in stores.items()})
    epoch = take(batches(size=17, stores=stores, weights=shares), 2)
    assert sorted(epoch) == [*range(FIRST, FIRST + 24), *range(5000, 5010)]
    assert [row < 5000 for row in epoch] != sorted((row < 5000 for row in epoch), reverse=True)


WITH_WORKERS = """
import multiprocessing, sys
from absl import flags
from qrag_jax.data.episodes import EpisodeShape, training_batches
from tests.episodes_maker import random_store

if __name__ == "__main__":
    flags.FLAGS(sys.argv[:1])
    store = random_store(0, 24)
    shape = EpisodeShape.holding([store])
    batches = training_batches(
        {"one": store}, {"one": 1.0}, shape, batch_size=4, seed=0, workers=2
    )
    while True:
        next(batches)
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux shows the memory that is shared")
def test_workers_live_exactly_as_long_as_their_trainer(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WITH_WORKERS)
    root = Path(__file__).parents[2]
    trainer = subprocess.Popen(
        [sys.executable, program],
        env=os.environ | {"PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(workers) == 2
    # The first batch may be there before the second worker has begun.
    end = time.monotonic() + 60
    while time.monotonic() < end and not all(map(ignores_sigterm, workers)):
        time.sleep(0.05)
    # What a scheduler or a closing terminal sends to all of a run is for the trainer alone.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        for pid in workers:
            os.kill(pid, number)
    for _ in range(6):  # more than what is built ahead
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert [int(pid) for pid in trainer.stdout.readline().split()] == workers
    shared = {
        line.split()[-1]
        for pid in (trainer.pid, *workers)
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "/shm/" in line and "(deleted)" not in line
    }
    assert shared
    assert not [path for path in shared if "psm_" in path]  # nothing large
    trainer.kill()
    trainer.communicate()
    end = time.monotonic() + 60
    while time.monotonic() < end and (
        any(is_running(pid) for pid in workers) or any(map(os.path.exists, shared))
    ):
        time.sleep(0.1)
    assert not [pid for pid in workers if is_running(pid)]
    assert not [path for path in shared if os.path.exists(path)]


def ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (line.split()[1] for line in status if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_mixture_keeps_its_proportions() -> None:
    stores, weights = {"one": STORE, "other": OTHER}, {"one": 0.75, "other": 0.25}
    seen = np.array(take(batches(stores=stores, weights=weights), 60))
    ours = seen < 5000
    assert ours.sum() == 180
    assert (np.abs(ours.reshape(-1, 20).sum(1) - 15) <= 1).all()  # everywhere, not only in all
    # Each source goes through its own epochs: 180 of 24 samples, 60 of 10.
    assert set(np.bincount(seen[ours] - FIRST).tolist()) == {7, 8}
    assert np.bincount(seen[~ours] - 5000).tolist() == [6] * 10


def test_rows_that_fill_up_a_batch_are_empty() -> None:
    (_, batch) = evaluation_batches(STORE, SHAPE, 3, [3, 0, 17, 5])
    check_episode(at(batch, 0), STORE, 5)
    for place in (1, 2):
        for field, empty in zip(at(batch, place), empty_episode(SHAPE), strict=True):
            np.testing.assert_array_equal(field, empty)
    assert list(evaluation_batches(STORE, SHAPE, 3, [])) == []


def test_steps_that_no_document_can_fill_are_refused() -> None:
    stores = {"one": STORE, "other": OTHER}
    most = min(int(store.chunk_counts.max()) for store in stores.values())
    check_steps(most, stores)
    with pytest.raises(InputError, match=r"config\.env\.max_steps"):
        check_steps(most + 1, stores)


def test_the_order_of_facts_is_kept_where_it_is_known() -> None:
    facts = STORE.support_of(2).tolist()
    ordered = EpisodeSource(STORE, SHAPE, ordered=True)[2].rank
    assert [int(ordered[place]) for place in facts] == [0, 1]
    assert [int(EpisodeSource(STORE, SHAPE)[2].rank[place]) for place in facts] == [0, 0]


# Documents that are drawn again


STORIES = BabilongConfig("qa2", chunks=32, train=10)  # so that all of them fit


NEEDLES = NiahConfig("multivalue", chunks=24, train=6)


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
def redrawn_shape(stores: dict[str, RedrawnStore]) -> EpisodeShape:
    return EpisodeShape.holding([*stores.values()])


def redrawn_batches(
    stores: dict[str, RedrawnStore], redrawn_shape: EpisodeShape, size: int = 4, **settings
):
    weights = {"babilong": 0.75, "niah": 0.25}
    weights = {name: weights[name] if len(stores) > 1 else 1.0 for name in stores}
    return training_batches(stores, weights, redrawn_shape, batch_size=size, seed=3, **settings)


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
    for change in ({"seed": 1}, {"chunks": 33}, {"noise_repeats": 0}, {"train": 11}):
        other = samples(dataclasses.replace(STORIES, **change))
        keys.append(tokens(other, tokenizer, folder, 9).content_key)
    assert len(set(keys)) == len(keys)


def test_resumes_over_the_border_of_an_epoch(
    stores: dict[str, RedrawnStore], redrawn_shape: EpisodeShape
) -> None:
    """By threads or processes: it does not matter who builds a batch."""
    every = [
        next(iterator) for iterator in [redrawn_batches(stores, redrawn_shape)] for _ in range(8)
    ]
    assert {int(epoch) for batch in every for epoch in batch.epoch} >= {0, 1, 2}
    iterator = redrawn_batches(stores, redrawn_shape, workers=2)
    same(every[0], next(iterator))
    resumed = redrawn_batches(stores, redrawn_shape)
    resumed.set_state(json.loads(json.dumps(iterator.get_state())))
    for batch in every[1:]:
        same(batch, next(resumed))


def test_hosts_draw_what_one_would(
    stores: dict[str, RedrawnStore], redrawn_shape: EpisodeShape
) -> None:
    def rows(batch: EpisodeBatch) -> dict[tuple[int, int], bytes]:
        which = zip(batch.sample.tolist(), batch.epoch.tolist(), strict=True)
        return {key: batch.chunks[place].tobytes() for place, key in enumerate(which)}

    one = redrawn_batches(stores, redrawn_shape)
    hosts = [redrawn_batches(stores, redrawn_shape, size=2, shard=(host, 2)) for host in range(2)]
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


def sample(index: int, source: str = "a") -> Sample:
    return Sample(str(index), "Who?", ("x",), (0,), (), source)


def test_lazy_samples_are_a_sequence() -> None:
    made: list[int] = []
    lazy = LazySamples(10, lambda index: made.append(index) or sample(index))
    assert (len(lazy), made) == (10, [])
    assert lazy[3] == lazy[-7] == sample(3)
    assert made == [3, 3]
    for part in (slice(None), slice(2, 9, 3), slice(None, None, -1)):
        assert isinstance(lazy[part], LazySamples)
        assert [*lazy[part]] == [*map(sample, range(10))][part]
    for index in (10, -11):
        with pytest.raises(IndexError):
            lazy[index]


def test_joined() -> None:
    lists = [[sample(0), sample(1)], [sample(2, "b")]]
    lazy = LazySamples(3, lambda i: sample(i, "c"))
    assert joined([lazy]) is lazy
    both = joined([lists[0], lazy, lists[1]])
    assert isinstance(both, LazySamples)
    assert [*both] == [*lists[0], *lazy, *lists[1]] == [*joined([*lists[:1], [*lazy], lists[1]])]
    assert both[-1] == sample(2, "b")
