"""Ties the life of a batch-building worker process to the life of its trainer."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from multiprocessing import connection

LOOK_EVERY = 1.0  # seconds


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
