"""`dying_hosts HOSTS NUMBER WAITS`: one of several processes; NUMBER dies, the others wait for it.

The first one fails, or is interrupted if WAITS is "interrupt"; another one is killed. WAITS is how
they wait: at a "barrier", or for "arrays", while a thread saves a checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial

import jax
from orbax.checkpoint import multihost

from qrag_jax.runtime import hosts


def main() -> None:
    with hosts.joined(sys.argv[1]):
        hosts.together("all are here")
        if jax.process_index() == int(sys.argv[2]):
            if not jax.process_index():
                if sys.argv[3] == "interrupt":
                    raise KeyboardInterrupt
                raise ValueError("a failure of its own")
            os.kill(os.getpid(), signal.SIGKILL)
        barrier = multihost.get_barrier_sync_fn()
        save = partial(barrier, key="a checkpoint", timeout_ms=600_000)
        if sys.argv[3] == "arrays":
            threading.Thread(target=save).start()  # Python waits for it when the process ends
            hosts.together("after it")
        save()


if __name__ == "__main__":
    main()
