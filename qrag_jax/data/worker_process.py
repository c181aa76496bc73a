"""A process that builds batches for a trainer: it lives exactly as long as that."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from multiprocessing import connection

LOOK_EVERY = 1.0  # seconds


def follow_parent(worker: int = 0, workers: int = 1) -> None:
    """To be called first in a worker process, in its main thread.

    However the parent dies, by SIGKILL too, this process ends with it; the processes gone, Python's
    resource tracker removes their semaphores. Signals that a terminal or a scheduler sends to all
    of a run are for the parent alone, which then saves and needs batches no more.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if number := getattr(signal, name, None):
            signal.signal(number, signal.SIG_IGN)
    # The kernel's own way (PR_SET_PDEATHSIG) follows the thread that began this process, not the
    # process: Grain begins it in a thread that soon ends.
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    process = multiprocessing.parent_process()
    assert process is not None
    # A pipe that the parent holds open; a fork of the parent may hold it, too, hence the second.
    while os.getppid() == parent:
        with contextlib.suppress(InterruptedError):
            if connection.wait([process.sentinel], LOOK_EVERY):
                break
    os._exit(1)
