"""The Grain pipeline from token stores to shuffled, host-sharded, prefetched episode batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from multiprocessing import connection
from typing import Any, NamedTuple, TypeVar

import grain
import numpy as np
from absl import flags

from qrag_jax.data.tokens import TokenStore
from qrag_jax.errors import InputError

PADDING_SAMPLE = -1
NO_FACT = -1
_ENDLESS = 2**48  # episodes of a training
_LOOK_EVERY = 1.0  # seconds
T = TypeVar("T")


class EpisodeBatch(NamedTuple):
    """Questions with their chunks as token ids without special tokens, padded on the right."""

    question: Any  # `[B, Lq]` int32
    question_length: Any  # `[B]` int32
    chunks: Any  # `[B, C, La]` int32
    chunk_lengths: Any  # `[B, C]` int32
    chunk_mask: Any  # `[B, C]` bool, whether the document has this chunk
    # `[B, C]` int32, place of a supporting fact in the order in which they are needed, 0 of all
    # where no order is known, `NO_FACT` of other chunks
    rank: Any
    # `[B]` int32, number of the sample, counted over all stores one after the other;
    # `PADDING_SAMPLE` for a row that only fills up the batch
    sample: Any
    epoch: Any  # `[B]` int32, from 0, of the sample's store; both tell a redrawn document

    @property
    def support(self) -> Any:
        """`[B, C]` bool, whether the chunk is a supporting fact."""
        return self.rank != NO_FACT


@dataclasses.dataclass(frozen=True)
class EpisodeShape:
    """Static sizes that every batch of a run is padded to: Lq, La and C."""

    question_tokens: int
    chunk_tokens: int
    chunks: int

    @classmethod
    def holding(cls, stores: Sequence[TokenStore]) -> EpisodeShape:
        """The smallest shape that holds every sample of the stores."""
        return cls(
            question_tokens=max(int(s.question_lengths.max()) for s in stores),
            chunk_tokens=max(s.longest_chunk for s in stores),
            chunks=max(int(s.chunk_counts.max()) for s in stores),
        )


def episode(
    store: TokenStore, shape: EpisodeShape, index: int, epoch: int = 0, *, ordered: bool = False
) -> EpisodeBatch:
    """A document of a store in an epoch, padded to a shape, without the batch dimension.

    `ordered`: its supporting facts stand in the order in which they are needed.
    """
    question, chunks, support = store.document(index, epoch)
    rank = np.full(shape.chunks, NO_FACT, np.int32)
    rank[support] = np.arange(len(support)) if ordered else 0
    padded = _padded(shape, question, chunks, rank)
    return padded._replace(sample=np.int32(index), epoch=np.int32(epoch))


def empty_episode(shape: EpisodeShape) -> EpisodeBatch:
    """A row without question and chunks; every computation ignores it."""
    return _padded(shape, np.zeros(0), [], np.full(shape.chunks, NO_FACT, np.int32))


def _padded(
    shape: EpisodeShape, question: np.ndarray, chunks: Sequence[np.ndarray], rank: np.ndarray
) -> EpisodeBatch:
    (words,), (length,) = _pad([question], 1, shape.question_tokens)
    texts, lengths = _pad(chunks, shape.chunks, shape.chunk_tokens)
    mask = np.arange(shape.chunks) < len(chunks)
    none = np.int32(PADDING_SAMPLE)
    return EpisodeBatch(words, length, texts, lengths, mask, rank, none, np.int32(0))


def _at(
    store: TokenStore, shape: EpisodeShape, ordered: bool, before: int, *place: int
) -> EpisodeBatch:
    """The episode at a place of Grain's: a position, which goes on over the epochs, and an index.

    `before`: the number of samples in the stores before this one.
    """
    position, index = place
    row = episode(store, shape, index, position // len(store), ordered=ordered)
    return row._replace(sample=np.int32(before + index))


def training_batches(
    stores: Mapping[str, TokenStore],
    weights: Mapping[str, float],
    shape: EpisodeShape,
    *,
    batch_size: int,
    seed: int,
    workers: int = 0,
    shard: tuple[int, int] = (0, 1),
    ordered: Collection[str] = (),
    skipped: int = 0,
) -> grain.DatasetIterator[EpisodeBatch]:
    """An endless iterator of shuffled batches; its state is JSON and accounts for prefetched ones.

    Args:
        weights: shares of the episodes, which sum to 1.
        ordered: stores whose facts have an order, see `episode`.
        skipped: first episodes that are left out, as an earlier stage learned from them.
    """
    datasets, shares, before = [], [], 0
    for number, (name, store) in enumerate(stores.items()):
        made = functools.partial(_at, store, shape, name in ordered, before)
        # An episode depends only on its position, so it is the same in every thread and process.
        dataset = grain.MapDataset.range(len(store)).map_with_index(made)
        before += len(store)
        # Grain's own endless number of epochs overflows where a batch is one episode.
        endless = dataset.seed(seed + number).shuffle().repeat(_ENDLESS // len(store) + 1)
        datasets.append(endless)
        shares.append(weights[name])
    mixed = datasets[0] if len(datasets) == 1 else grain.MapDataset.mix(datasets, shares)
    index, count = shard
    # Hosts take turns: their parts, one after the other, are the batch that one host would have.
    parts = mixed[skipped:].batch(batch_size, batch_fn=stack)[index::count]
    return read_ahead(parts, workers)


def evaluation_batches(
    store: TokenStore,
    shape: EpisodeShape,
    batch_size: int,
    indices: Sequence[int],
    shard: tuple[int, int] = (0, 1),
) -> Iterator[EpisodeBatch]:
    """The episodes of `indices` in order; the last batch is filled up with empty rows.

    Of each batch, a host has its part; `shard`: its index, and the hosts' number.
    """
    index, count = shard
    size = batch_size // count
    for start in range(index * size, len(indices) + index * size, batch_size):
        rows = [episode(store, shape, i) for i in indices[start : start + size]]
        rows += [empty_episode(shape)] * (size - len(rows))
        yield stack(rows)


def stack(rows: Sequence[EpisodeBatch]) -> EpisodeBatch:
    return EpisodeBatch(*(np.stack(field) for field in zip(*rows, strict=True)))


def check_steps(max_steps: int, stores: Mapping[str, TokenStore]) -> None:
    """Refuses an episode length that no document of a source can fill."""
    for name, store in stores.items():
        most = int(store.chunk_counts.max())
        if max_steps > most:
            raise InputError(f"config.env.max_steps is {max_steps}; {name} has {most} at most.")


def _pad(texts: Sequence[np.ndarray], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    padded = np.zeros((rows, width), np.int32)
    lengths = np.zeros(rows, np.int32)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
        lengths[row] = len(text)
    return padded, lengths


# ---------------------------------------------------------------- threads and processes


def read_ahead(dataset: grain.MapDataset[T], workers: int) -> grain.DatasetIterator[T]:
    """An iterator over the items in order, a few of which are made before they are asked for."""
    read = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    iterable = dataset.to_iter_dataset(read)
    if workers:
        if not flags.FLAGS.is_parsed():  # Grain reads one; a program that has none parses none
            flags.FLAGS.mark_as_parsed()
        # Items come through pipes: shared memory would remain after the whole run is killed.
        by_pipe = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
        iterable = grain.experimental.WithOptionsIterDataset(iterable, by_pipe)
        settings = grain.MultiprocessingOptions(num_workers=workers)
        iterable = iterable.mp_prefetch(settings, worker_init_fn=follow_parent)
    return iter(iterable)


def follow_parent(worker: int = 0, workers: int = 1) -> None:
    """Makes this process end with its parent, even by SIGKILL; a worker calls it first.

    It ignores signals that are sent to the whole run: the parent handles them, and saves.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # PR_SET_PDEATHSIG follows the thread that started this process, and Grain's soon ends.
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    process = multiprocessing.parent_process()
    assert process is not None
    # The parent holds the sentinel open, but a fork of it may, too: its id is checked as well.
    while os.getppid() == parent:
        with contextlib.suppress(InterruptedError):
            if connection.wait([process.sentinel], _LOOK_EVERY):
                break
    os._exit(1)
