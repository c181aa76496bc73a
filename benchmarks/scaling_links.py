"""Measures how fast the processes of one machine send to each other, by Gloo's all-reduce.

`launch/local.sh COUNT python -m benchmarks.scaling_links` prints one JSON object, from the first
process: seconds of an all-reduce of a few bytes, and of `BYTES`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.scaling_model import machine_links
from qrag_jax.errors import InputError
from qrag_jax.runtime import hosts
from qrag_jax.runtime.device_speeds import Links

BYTES = 2**24  # of each process: 16 MiB of float32
ROUNDS = 7  # the best one counts, as for the other peaks of this machine
REFUSED = 2


def links_from(processes: int, latency: float, seconds: float) -> Links:
    """The links that an all-reduce of `BYTES` in so many seconds tells.

    A ring sends 2 (n - 1) / n of the bytes; the seconds of a few bytes are the latency.

    Raises:
        InputError: there is one process, or the large array was not slower than the small one.
    """
    if processes < 2 or seconds <= latency:
        raise InputError(
            f"{processes} processes took {seconds:g} s for {BYTES} bytes and {latency:g} s for "
            "next to none, which tells no speed; give 2 processes or more on a quieter machine."
        )
    sent = 2 * (processes - 1) / processes * BYTES
    return machine_links(processes, sent / (seconds - latency), latency)


def measure() -> dict[str, float]:
    """Seconds of all-reduces between the processes that have joined."""
    mesh = Mesh(np.array(jax.devices()), ("all",))
    split, whole = NamedSharding(mesh, PartitionSpec("all")), NamedSharding(mesh, PartitionSpec())

    def reduced(count: int) -> float:
        rows = jax.make_array_from_callback(
            (mesh.size, count), split, lambda index: np.ones((1, count), np.float32)
        )
        total: Callable[[Any], Any] = jax.jit(lambda x: jnp.sum(x, axis=0), out_shardings=whole)
        return _best(lambda: jax.block_until_ready(total(rows)))

    return {"latency": reduced(1), "seconds": reduced(BYTES // 4)}


def _best(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> int:
    """Joins the others by the last argument, `--hosts=…`, and measures."""
    try:
        with hosts.joined(sys.argv[-1].removeprefix("--hosts=")):
            found = measure()
            if jax.process_index() == 0:
                print(json.dumps(found), flush=True)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
