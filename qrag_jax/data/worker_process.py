"""Reads data ahead in threads or in worker processes, which end with their parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import connection
from typing import TypeVar

import grain
from absl import flags

LOOK_EVERY = 1.0  # seconds

T = TypeVar("T")


def read_ahead(dataset: grain.MapDataset[T], workers: int) -> grain.DatasetIterator[T]:
    """An iterator over the items in order, a few of which are made before they are asked for.

    Args:
        workers: processes that make them; with 0, two threads of this process do.
    """
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
    """Makes this process end with its parent; a worker calls it first, in its main thread.

    The process ends however the parent dies, even by SIGKILL. When all processes are gone, Python's
    resource tracker removes their semaphores. The worker ignores signals that a terminal or a
    scheduler sends to the whole run: only the parent handles them. It then saves and needs no more
    batches.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if number := getattr(signal, name, None):
            signal.signal(number, signal.SIG_IGN)
    # PR_SET_PDEATHSIG, the kernel's mechanism, does not work here: it follows the thread that
    # started this process, not the parent process, and Grain starts it in a thread that soon ends.
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    process = multiprocessing.parent_process()
    assert process is not None
    # The sentinel is a pipe that the parent holds open. A fork of the parent may hold it open too,
    # so the loop also checks the parent's id.
    while os.getppid() == parent:
        with contextlib.suppress(InterruptedError):
            if connection.wait([process.sentinel], LOOK_EVERY):
                break
    os._exit(1)
