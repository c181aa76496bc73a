"""Batches of episodes: padding, shuffling, sharding over hosts, resuming, mixing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from qrag_jax.data.episodes import (
    PADDING_SAMPLE,
    EpisodeBatch,
    EpisodeShape,
    EpisodeSource,
    check_steps,
    empty_episode,
    evaluation_batches,
    training_batches,
)
from qrag_jax.data.sources.registry import mix_weights
from qrag_jax.errors import InputError
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


def test_episodes_hold_the_samples() -> None:
    source = EpisodeSource(STORE, SHAPE)
    assert len(source) == 24
    for index in range(24):
        check_episode(source[index], STORE, index)


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


def test_every_epoch_holds_every_sample_once_in_an_order_of_its_own() -> None:
    iterator = batches()
    epochs = [take(iterator, 6) for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(FIRST, FIRST + 24))
        assert epoch != sorted(epoch)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_mixture_by_size_holds_every_question_once_an_epoch() -> None:
    stores = {"one": STORE, "two": OTHER}
    shares = mix_weights(dict.fromkeys(stores, 1.0), {n: len(s) for n, s in stores.items()})
    epoch = take(batches(size=17, stores=stores, weights=shares), 2)
    assert sorted(epoch) == [*range(FIRST, FIRST + 24), *range(5000, 5010)]
    assert [row < 5000 for row in epoch] != sorted((row < 5000 for row in epoch), reverse=True)


def test_batches_run_on_over_the_end_of_an_epoch() -> None:
    seen = take(batches(size=5), 24)
    assert np.bincount(np.array(seen) - FIRST).tolist() == [5] * 24


def test_the_seed_decides_the_order() -> None:
    assert take(batches(seed=3), 8) == take(batches(seed=3), 8)
    assert take(batches(seed=3), 8) != take(batches(seed=4), 8)


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_share_out_the_batches_of_one(hosts) -> None:
    one = batches(size=4)
    shards = [batches(size=4 // hosts, shard=(host, hosts)) for host in range(hosts)]
    for _ in range(9):
        parts = [rows(next(shard)) for shard in shards]
        together = [row for part in parts for row in part]
        assert sorted(together) == sorted(rows(next(one)))
    # Over the first epoch no sample goes to two hosts, and none to nobody.
    shards = [batches(size=4 // hosts, shard=(host, hosts)) for host in range(hosts)]
    shares = [take(shard, 6) for shard in shards]
    assert sorted(row for share in shares for row in share) == list(range(FIRST, FIRST + 24))


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


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_where_it_stood(workers) -> None:
    stores, weights = {"one": STORE, "other": OTHER}, {"one": 0.7, "other": 0.3}
    iterator = batches(stores=stores, weights=weights, workers=workers)
    take(iterator, 7)
    state = json.loads(json.dumps(iterator.get_state()))
    rest = [next(iterator) for _ in range(9)]

    resumed = batches(stores=stores, weights=weights, workers=workers)
    resumed.set_state(state)
    for batch in rest:
        for field, value in zip(batch, next(resumed), strict=True):
            np.testing.assert_array_equal(field, value)

    if workers:  # building ahead in processes changes no order
        plain = batches(stores=stores, weights=weights)
        take(plain, 7)
        assert [rows(batch) for batch in rest] == [rows(next(plain)) for _ in range(9)]


def test_a_mixture_keeps_its_proportions() -> None:
    stores, weights = {"one": STORE, "other": OTHER}, {"one": 0.75, "other": 0.25}
    seen = np.array(take(batches(stores=stores, weights=weights), 60))
    ours = seen < 5000
    assert ours.sum() == 180
    assert (np.abs(ours.reshape(-1, 20).sum(1) - 15) <= 1).all()  # everywhere, not only in all
    # Each source goes through its own epochs: 180 of 24 samples, 60 of 10.
    assert set(np.bincount(seen[ours] - FIRST).tolist()) == {7, 8}
    assert np.bincount(seen[~ours] - 5000).tolist() == [6] * 10


def test_evaluation_goes_through_the_indices_and_fills_the_last_batch() -> None:
    indices = [3, 0, 17, 5, 23, 1, 8]
    found = list(evaluation_batches(STORE, SHAPE, 3, indices))
    assert len(found) == 3
    assert all(batch.question.shape == (3, SHAPE.question_tokens) for batch in found)
    samples = [int(i) for batch in found for i in batch.sample]
    assert samples == [*indices, PADDING_SAMPLE, PADDING_SAMPLE]
    flat = [at(batch, place) for batch in found for place in range(3)]
    for episode, index in zip(flat, indices):
        check_episode(episode, STORE, index)
    for episode in flat[len(indices) :]:
        for field, empty in zip(episode, empty_episode(SHAPE), strict=True):
            np.testing.assert_array_equal(field, empty)
            assert field.dtype == np.asarray(empty).dtype
        assert not episode.chunk_mask.any()
        assert not episode.support.any()
    assert list(evaluation_batches(STORE, SHAPE, 3, [])) == []
    assert len(list(evaluation_batches(STORE, SHAPE, 3, indices[:6]))) == 2


def test_check_steps() -> None:
    most = {name: int(s.chunk_counts.max()) for name, s in (("one", STORE), ("other", OTHER))}
    stores = {"one": STORE, "other": OTHER}
    check_steps(min(most.values()), stores)
    with pytest.raises(InputError, match=re.escape(f"max_steps is {max(most.values()) + 1}")):
        check_steps(max(most.values()) + 1, stores)
    with pytest.raises(InputError, match=rf"no one question .* at most {most['one']}\."):
        check_steps(100, {"one": STORE})
