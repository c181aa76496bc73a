"""Sends the passages and their vectors to a collection, and goes on where it was interrupted."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from qrag_jax.errors import InputError
from qrag_jax.retrieval.protocol import Corpus
from qrag_jax.retrieval.qdrant_collection import Collection
from qrag_jax.retrieval.vectors import Vectors, check_finite
from qrag_jax.runtime import bounded_json, whole_files
from qrag_jax.runtime.typed_json import made

NAME = "qdrant_progress.json"  # is there while passages are missing


class Progress:
    """Which batches the server has confirmed, in a small file that is replaced after each.

    Args:
        folder: the index's.
        collection: the file of another one, or of another try to make it, counts for nothing.

    Attributes:
        batch: passages of a batch; that of the file if it counts.
    """

    def __init__(self, folder: Path, collection: Collection) -> None:
        server, self._count = collection.connection.server, collection.made.count
        self._path = folder / NAME
        self._of = {
            "url": server.url,
            "collection": server.collection,
            "made": dataclasses.asdict(collection.made),
        }
        self.batch, self._first, self._ahead = server.batch, 0, set[int]()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            said = bounded_json.load(self._path)
            batch, first = made(int, said["batch"]), made(int, said["first"])
            ahead = set(made(list[int], said["ahead"]))
            if said["of"] == self._of and batch > 0 and first >= 0:
                self.batch, self._first, self._ahead = batch, first, ahead

    @property
    def done(self) -> int:
        """The passages of confirmed batches."""
        return min(self._first + len(self._ahead) * self.batch, self._count)

    def left(self) -> Iterator[int]:
        """The first passages of the other batches, in order."""
        ahead = set(self._ahead)
        return (n for n in range(self._first, self._count, self.batch) if n not in ahead)

    def add(self, first: int) -> None:
        """Notes that the batch from passage `first` on is confirmed, once or again.

        Raises:
            OSError: the file cannot be written.
        """
        if first < self._first:
            return
        self._ahead.add(first)
        while self._first in self._ahead:
            self._ahead.remove(self._first)
            self._first += self.batch
        said = {"batch": self.batch, "first": self._first, "ahead": sorted(self._ahead)}
        whole_files.write_whole(self._path, json.dumps({"of": self._of} | said))

    def forget(self) -> None:
        """Starts at the first passage; the file is deleted."""
        self._first, self._ahead = 0, set()
        self._path.unlink(missing_ok=True)


def upload(
    collection: Collection,
    corpus: Corpus,
    vectors: Vectors,
    folder: Path,
    told: Callable[[int], None] = lambda passages: None,
) -> None:
    """Fills a collection.

    After a kill or an error, a further call sends the batches that the server has not confirmed:
    of those that it has, at most one per worker. Where the collection has fewer points than were
    confirmed, something else has changed it, and all are sent again.

    Args:
        folder: the index's, for the file of the progress.
        told: called with the number of passages that are there, after each batch; what it raises
            breaks the upload off.

    Raises:
        InputError: the server fails or refuses, a vector holds NaN or an infinite number, or the
            collection has other points as well.
        OSError: the file of the progress cannot be written.
    """
    progress = Progress(folder, collection)
    there = collection.count()
    if there < progress.done:
        progress.forget()

    def send(first: int, size: int) -> int:
        last = min(first + size, len(corpus))
        rows = vectors.rows(range(first, last))
        check_finite(rows, "the index", first)
        collection.put(first, corpus.passages(range(first, last)), rows)
        return first

    told(progress.done if there < len(corpus) else there)
    if there < len(corpus):
        if not there:
            send(0, 1)  # says at once what the collection is made from
        workers = 1 if collection.connection.local else collection.connection.server.workers
        _send_all(progress, lambda first: send(first, progress.batch), workers, told)
        there = collection.count()
    if there != len(corpus):
        progress.forget()
        raise InputError(
            f"{collection.connection.what} has {there} points after {len(corpus)} passages were "
            "sent, so that another program writes to it; end that one, and give replace=True."
        )
    progress.forget()


def _send_all(
    progress: Progress, send: Callable[[int], int], workers: int, told: Callable[[int], None]
) -> None:
    waiting: set[Future[int]] = set()
    with ThreadPoolExecutor(workers, thread_name_prefix="qdrant") as pool:
        try:
            for first in progress.left():
                waiting.add(pool.submit(send, first))
                if len(waiting) == workers:
                    waiting = _noted(progress, waiting)
                told(progress.done)
            while waiting:
                waiting = _noted(progress, waiting)
                told(progress.done)
        except BaseException:
            # What is on its way still counts.
            for future in waiting:
                if not future.cancel() and future.exception() is None:
                    progress.add(future.result())
            raise


def _noted(progress: Progress, waiting: set[Future[int]]) -> set[Future[int]]:
    """Waits for a batch; returns the others."""
    ended, others = wait(waiting, return_when=FIRST_COMPLETED)
    for future in ended:
        if future.exception() is None:
            progress.add(future.result())
    for future in ended:
        future.result()
    return others
