"""Batches of episodes: padding, workers; documents that each epoch draws again.

Orders, resuming and parts of hosts: tests/conformance/test_sources.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from absl import flags

from qrag_jax.data import episodes
from qrag_jax.data.long_docs import BabilongConfig, NiahConfig, babilong_documents, niah_documents
from qrag_jax.data.sample import LazySamples, drawn, joined
from qrag_jax.data.tokens import TextTokenizer, TokenStore, tokenise
from qrag_jax.errors import InputError
from qrag_jax.models.first_encoder import ScratchConfig, make_scratch_folder
from tests.episodes_maker import random_store

FIRST = 1000  # the first token of question 0
STORE = random_store(0, 24, FIRST)
OTHER = random_store(1, 10, 5000)
SHAPE = episodes.EpisodeShape.holding([STORE, OTHER])


@pytest.fixture(autouse=True)
def _flags() -> None:
    flags.FLAGS.mark_as_parsed()  # Grain's workers read flags; under app.run they are parsed


def test_episodes_are_the_samples_padded() -> None:
    (batch,) = episodes.evaluation_batches(STORE, SHAPE, 24, range(24))
    most = max(int(store.chunk_counts.max()) for store in (STORE, OTHER))
    assert SHAPE.chunks == most  # no more than needed
    assert batch.question.shape == (24, SHAPE.question_tokens)
    assert batch.chunks.shape == (24, SHAPE.chunks, SHAPE.chunk_tokens)
    assert {field.dtype for field in batch} == {np.dtype(np.int32), np.dtype(bool)}
    for index in range(24):
        episode = episodes.EpisodeBatch(*(field[index] for field in batch))
        first, end = STORE.sample_starts[index], STORE.sample_starts[index + 1]
        rows = [(episode.question, episode.question_length)]
        rows += [*zip(episode.chunks, episode.chunk_lengths, strict=True)]
        for place, (row, length) in enumerate(rows):
            text = STORE.text(first + place) if first + place < end else np.zeros(0)
            assert int(length) == len(text)
            np.testing.assert_array_equal(row, np.pad(text, (0, len(row) - len(text))))
        assert np.flatnonzero(episode.chunk_mask).tolist() == [*range(end - first - 1)]
        assert np.flatnonzero(episode.support).tolist() == STORE.support_of(index).tolist()
        assert int(episode.sample) == index
    # The order of facts is kept where it is known.
    facts = STORE.support_of(2).tolist()
    ordered = episodes.EpisodeSource(STORE, SHAPE, ordered=True)[2].rank
    assert [int(ordered[place]) for place in facts] == [0, 1]
    assert [int(batch.rank[2, place]) for place in facts] == [0, 0]
    with pytest.raises(InputError, match=r"config\.env\.max_steps"):
        episodes.check_steps(most + 1, {"one": STORE, "other": OTHER})


def test_rows_that_fill_up_a_batch_are_empty() -> None:
    (_, batch) = episodes.evaluation_batches(STORE, SHAPE, 3, [3, 0, 17, 5])
    for place in (1, 2):
        for field, empty in zip(batch, episodes.empty_episode(SHAPE), strict=True):
            np.testing.assert_array_equal(field[place], empty)
    assert list(episodes.evaluation_batches(STORE, SHAPE, 3, [])) == []


# ---------------------------------------------------------------- worker processes

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


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    assert holds()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux shows the memory that is shared")
def test_workers_live_exactly_as_long_as_their_trainer(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WITH_WORKERS)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command, pipe = [sys.executable, tmp_path / "program.py"], subprocess.PIPE
    trainer = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
    assert trainer.stdin is not None
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(workers) == 2
    # The first batch may be there before the second worker has begun.
    until(lambda: all(map(ignores_sigterm, workers)))
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
    until(lambda: not any(map(is_running, workers)) and not any(map(os.path.exists, shared)))


def ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (line.split()[1] for line in status if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---------------------------------------------------------------- documents

STORIES = BabilongConfig("qa2", chunks=32, train=10)  # so that all of them fit
NEEDLES = NiahConfig("multivalue", chunks=24, train=6)


def samples(config: BabilongConfig | NiahConfig) -> Any:
    if isinstance(config, BabilongConfig):
        return babilong_documents(config, "train").samples
    return niah_documents(config, "train").samples


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("model")
    texts = [text for sample in samples(STORIES) for text in sample.chunks]
    sizes = ScratchConfig(layers=1, hidden=16, heads=2, vocab=300, positions=64)
    make_scratch_folder(folder, texts, sizes, seed=0)
    return TextTokenizer.load(folder)


def tokens(config: BabilongConfig | NiahConfig, tokenizer: TextTokenizer, most: int = 9) -> Any:
    most_tokens = {"max_question_tokens": 12, "max_chunk_tokens": most}
    cache = Path(os.environ["QRAG_CACHE"])
    return tokenise(samples(config), tokenizer, **most_tokens, cache=cache)


@pytest.fixture(scope="module")
def stores(tokenizer: TextTokenizer) -> dict[str, TokenStore]:
    return {"babilong": tokens(STORIES, tokenizer), "niah": tokens(NEEDLES, tokenizer, 40)}


def test_tokens_are_those_of_the_texts(stores, tokenizer) -> None:
    for config, store, most in ((STORIES, stores["babilong"], 9), (NEEDLES, stores["niah"], 40)):
        for index in range(len(store)):
            for epoch in (0, 1, 7):
                sample, found = drawn(samples(config), index, epoch), store.document(index, epoch)
                assert found.question.tolist() == tokenizer.encode([sample.question])[0][:12]
                texts = [ids[:most] for ids in tokenizer.encode(sample.chunks)]
                assert [chunk.tolist() for chunk in found.chunks] == texts
                assert tuple(found.support.tolist()) == sample.support


def test_what_is_kept_does_not_grow_with_documents(tokenizer, stores) -> None:
    store = stores["babilong"]
    longer = tokens(dataclasses.replace(STORIES, chunks=400), tokenizer)
    assert longer.cut_chunks[1] == store.cut_chunks[1]
    # A worker gets the places where files are mapped from, and how to draw; no texts, no tokens.
    assert len(pickle.dumps(store)) < 10_000
    assert 0 < store.cut_chunks[0] <= store.cut_chunks[1]
    # The key says how documents are drawn.
    assert tokens(STORIES, tokenizer).content_key == store.content_key
    keys = {store.content_key, stores["niah"].content_key, longer.content_key}
    for change in ({"seed": 1}, {"noise_repeats": 0}, {"train": 11}):
        keys.add(tokens(dataclasses.replace(STORIES, **change), tokenizer).content_key)
    assert len(keys) == 6


def test_workers_draw_the_same_documents_over_the_border_of_an_epoch(stores) -> None:
    """Threads or processes, resumed or not."""
    weights = {"babilong": 0.75, "niah": 0.25}
    shape = episodes.EpisodeShape.holding([*stores.values()])

    def batches(**how: Any) -> Any:
        return episodes.training_batches(stores, weights, shape, batch_size=4, seed=3, **how)

    plain, iterator, resumed = batches(), batches(workers=2), batches(workers=2)
    every = [next(plain) for _ in range(8)]
    assert {int(epoch) for batch in every for epoch in batch.epoch} >= {0, 1, 2}
    first = next(iterator)
    resumed.set_state(json.loads(json.dumps(iterator.get_state())))
    for batch, other in zip(every, [first, *(next(resumed) for _ in range(7))]):
        for field, value in zip(batch, other, strict=True):
            np.testing.assert_array_equal(field, value)


def test_a_mixture_draws_each_part_by_its_own_place() -> None:
    stories, needles = samples(STORIES), samples(NEEDLES)
    fixed = LazySamples(2, lambda i: stories.parts[i])
    mixture = joined([[stories.parts[4]], stories, fixed, needles])
    assert [*mixture[2:9:3]] == [stories.parts[4], *stories, *fixed, *needles][2:9:3]
    assert drawn(mixture, 0, 5) == stories.parts[4]  # the same in every epoch
    assert drawn(mixture, 3, 5) == drawn(stories, 2, 5) != drawn(stories, 2, 4)
    assert drawn(mixture, 12, 5) == stories.parts[1]
    assert drawn(mixture, 18, 5) == drawn(needles, 5, 5)
