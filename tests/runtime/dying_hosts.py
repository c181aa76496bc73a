"""`dying_hosts HOSTS NUMBER`: one of several processes; this one dies, the others wait for it.

The first one fails; another one is killed.
"""

from __future__ import annotations

import os
import signal
import sys

import jax
from orbax.checkpoint import multihost

from qrag_jax.runtime import hosts


def main() -> None:
    with hosts.joined(sys.argv[1]):
        hosts.together("all are here")
        if jax.process_index() == int(sys.argv[2]):
            if not jax.process_index():
                raise ValueError("a failure of its own")
            os.kill(os.getpid(), signal.SIGKILL)
        multihost.get_barrier_sync_fn()(key="a checkpoint", timeout_ms=600_000)


if __name__ == "__main__":
    main()
