"""Several hosts that compute together, one process on each: how they meet, wait and fail.

JAX's heartbeat ends those that wait for a host that has died. A process that fails ends without
waiting for the others, which then fail, too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.runtime.commandline import end_process
from qrag_jax.runtime.interrupt import Stopped, StopSignal

T = TypeVar("T")
HELP = "Of several hosts: ADDRESS:PORT of the first,COUNT,NUMBER of this one from 0; or auto."
_GIVEN = re.compile(r"([^\s,]+):(\d{1,5}),(\d{1,6}),(\d{1,6})")
_PATIENCE = 300.0  # seconds until all hosts must be there
_LONGER = 3600  # JAX's own patience, which ends after ours
_HEARTBEAT = 25  # seconds without one until a host is dead
_GRACE = 5.0  # seconds that a failed process has for its own end
_ALL = "all hosts have failed together"
_PEER = re.compile(r"\[([\w.:%-]+)\]:\d+")  # whom Gloo has lost
_LOST = re.compile("gloo|nccl|coordination ?service", re.IGNORECASE)


@contextlib.contextmanager
def joined(text: str, patience: float = _PATIENCE) -> Iterator[None]:
    """Joins the other hosts (see `HELP`; "": there are none), before JAX looks for devices."""
    if not text:
        yield
        return
    settings = _settings(text)
    alone = (
        f"error: --hosts={text}: not all hosts came within {patience:.0f} s; start the command on "
        "each, with the same address and count, and a number of its own."
    )
    late = _later(patience, end_process, alone, 1)  # no bad input: a launcher may try again
    # Its handler would take SIGTERM before `AgreedStop`, which must hear it inside of a step, too.
    # That of JAX 0.8 and before, which has no such switch, is replaced by `AgreedStop`'s.
    if hasattr(jax.config, switch := "jax_enable_preemption_service"):
        jax.config.update(switch, False)
    try:
        jax.distributed.initialize(
            **settings, initialization_timeout=_LONGER, heartbeat_timeout_seconds=_HEARTBEAT
        )
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"--hosts={text}: the other hosts cannot be found ({error}); start the command by "
            "SLURM, Open MPI or Kubernetes for auto, or give ADDRESS:PORT,COUNT,NUMBER."
        ) from None
    finally:
        late.cancel()
    if jax.process_count() != settings.get("num_processes", jax.process_count()):
        raise InputError(f"--hosts={text}, but COUNT of the first is {jax.process_count()}.")
    try:
        yield
    except BaseException as error:
        if _ALL in getattr(error, "__notes__", ()):
            raise
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        _end_without_waiting(2 if isinstance(error, InputError) else status)
        if isinstance(error, Exception) and _LOST.search(str(error)):
            peer = _PEER.search(str(error))
            named = f" ({peer[1]})" if peer else ""
            fix = "give the command on all hosts to go on."
            print(f"error: another host{named} has ended; {fix}", file=sys.stderr)
            raise SystemExit(1) from None
        raise


def first_does(do: Callable[[], None]) -> None:
    """Lets the first host do something; all others wait, and fail with its sentence if it fails."""
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            do()
        except Exception as error:
            failure = error
    fail_together(failure, InputError)


def fail_together(failure: Exception | None, other: type[Exception]) -> None:
    """Lets all hosts fail if one of them has a failure; all hosts call this together.

    Args:
        failure: of this host, which is raised here; None: it has none.
        other: what is raised where another host has a failure, with that one's sentence; `Stopped`
            is passed on as it is.
    """
    if jax.process_count() == 1:
        if failure is not None:
            raise failure
        return
    local = None if failure is None else (isinstance(failure, Stopped), str(failure))
    for failed in values_of_each(local):
        if failed is not None:
            stopped, sentence = failed
            failure = failure or (Stopped if stopped else other)(sentence)
    if failure is not None:
        failure.add_note(_ALL)
        raise failure


def all_or_none(do: Callable[[], T]) -> T:
    """Does something on each host; all fail together if one is stopped or has lost its feedback."""
    failure: Exception | None = None
    result: Any = None
    try:
        result = do()
    except (Stopped, FeedbackLost) as why:
        failure = why
    fail_together(failure, FeedbackLost)
    return result


def together(what: str) -> None:
    """Waits for all hosts to come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def any_of(flag: bool) -> bool:
    """Whether it is set on one of the hosts."""
    return bool(of_each(np.array(flag)).any())


def of_all(tree: Any) -> Any:
    """Arrays that are split over hosts, whole and on each host; all hosts call this together."""
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def rows_here(array: jax.Array) -> np.ndarray:
    """This host's rows of an array that is split by rows, in order."""
    if array.is_fully_addressable:
        return np.asarray(array)
    parts = sorted(array.addressable_shards, key=lambda part: part.index[0].start or 0)
    return np.concatenate([np.asarray(part.data) for part in parts])


def copied(tree: Any, shardings: Any) -> Any:
    """Arrays on one mesh of all hosts, whole, placed on this one; all hosts call this together."""

    def put(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        return jax.device_put(leaf.addressable_data(0), sharding)

    whole = _gathered(jax.tree.leaves(tree)[0].sharding.mesh)(tree)
    return jax.tree.map(put, whole, shardings)


@functools.cache
def _gathered(mesh: Mesh) -> Callable[[Any], Any]:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))


def of_each(array: np.ndarray) -> np.ndarray:
    """`[hosts, …]`, an array of each host, all of one shape; all hosts call this together."""
    if jax.process_count() == 1:
        return array[np.newaxis]
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)  # JAX would round doubles
    gathered = np.ascontiguousarray(multihost_utils.process_allgather(raw))
    return gathered.view(array.dtype).reshape(-1, *array.shape)


def values_of_each(value: Any) -> list[Any]:
    """A JSON value of each host, in their order; all hosts call this together."""
    raw = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = of_each(np.array(len(raw))).tolist()
    padded = np.zeros(max(lengths), np.uint8)
    padded[: len(raw)] = raw
    rows = zip(of_each(padded), lengths, strict=True)
    return [json.loads(row[:length].tobytes()) for row, length in rows]


def _settings(text: str) -> dict[str, Any]:
    if text == "auto":
        return {}
    match = _GIVEN.fullmatch(text)
    port = 0 if match is None else int(match[2])
    if match is None or not 0 < port < 2**16 or int(match[4]) >= int(match[3]):
        raise InputError(
            f"--hosts is {text!r}; give ADDRESS:PORT,COUNT,NUMBER, such as 10.0.0.1:8476,2,0 on "
            "the first of two hosts and 10.0.0.1:8476,2,1 on the other, or auto."
        )
    address, count, number = f"{match[1]}:{port}", int(match[3]), int(match[4])
    try:  # JAX's own attempt may end with a segmentation fault (0.10.2)
        known = socket.getaddrinfo(match[1].strip("[]"), port, type=socket.SOCK_STREAM)
        if number == 0:
            family, kind, _, _, place = known[0]
            with socket.socket(family, kind) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(place)
                trial.listen()
    except OSError as error:
        raise InputError(
            f"--hosts={text}: {error}; give the first host's address, and a port free there."
        ) from None
    return {
        "coordinator_address": address,
        "coordinator_bind_address": address,  # not every address that the host has
        "num_processes": count,
        "process_id": number,
        "cluster_detection_method": "deactivate",
    }


def _end_without_waiting(status: int) -> None:
    """Sees to the process's end, which would wait for the other hosts, as they now do for it.

    JAX waits for them at the exit. Before that, Python waits for threads, and one of them may save
    a checkpoint together with them.
    """

    def end_now() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)

    atexit.register(end_now)
    _later(_GRACE, end_now)


def _later(seconds: float, do: Callable[..., Any], *arguments: Any) -> threading.Timer:
    timer = threading.Timer(seconds, do, arguments)
    timer.daemon = True
    timer.start()
    return timer


class AgreedStop(StopSignal):
    """As `StopSignal`; of several hosts, a signal to one stops all before the same step.

    Between two steps `check` does not stop a host, because the others would wait for it in vain.
    `check_alone` does: it is for plays inside `all_or_none`, in which the others hear of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._several = jax.process_count() > 1
        self._asked: jax.Array | None = None

    def before_step(self) -> None:
        """All hosts call this before each step; it raises `Stopped` on all of them or on none."""
        if self._several:
            # The devices compare the signals behind the step that runs, and nobody waits for that:
            # what is read here was computed before this step.
            mine = signal.Signals[self.name] if self.name else 0
            before, self._asked = self._asked, _highest_signal()(mine)
            if before is not None and (number := int(before)):
                raise Stopped(signal.Signals(number).name)
        self.check()

    def check(self) -> None:
        if not self._several:
            self.check_alone()


@functools.cache
def _highest_signal() -> Callable[[int], jax.Array]:
    mesh = Mesh(np.array(jax.devices()), "devices")
    split = NamedSharding(mesh, PartitionSpec("devices"))
    highest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
    here = np.ones(jax.local_device_count(), np.int32)
    return lambda number: highest(jax.make_array_from_process_local_data(split, number * here))


def check_play(sizes: tuple[int, int, int], mesh: Mesh, staleness: int) -> None:
    """Refuses what several hosts cannot do whose policies play on each host alone."""
    count = jax.process_count()
    if count == 1:
        return
    if mesh.is_multi_process:
        raise InputError(
            f"config.runtime.mesh is {sizes}, but each host plays alone; use sizes of fsdp and "
            f"tensor whose product divides its {jax.local_device_count()} devices."
        )
    if staleness:
        raise InputError(f"the staleness is {staleness}; {count} hosts need 0: set it so.")
