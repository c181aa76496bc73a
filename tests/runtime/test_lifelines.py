"""Hosts see each other's end: connections of threads here, then processes that are killed."""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from qrag_jax.runtime.lifelines import Gate, Lifelines, connected
from tests.devices import environment_of

ADDRESS, LIMIT = "127.0.0.1", 60


class Host(NamedTuple):
    """A living host's lifelines, its ends of the connections, and what it was told."""

    lifelines: Lifelines
    peers: list[socket.socket]
    told: queue.Queue[tuple[str, bool]]

    @classmethod
    def of(cls, peers: list[socket.socket], *, is_first: bool = False) -> Host:
        told: queue.Queue[tuple[str, bool]] = queue.Queue()
        lifelines = Lifelines(peers, is_first=is_first)
        lifelines.watch(lambda peer, at_once: told.put((peer, at_once)))
        return cls(lifelines, peers, told)


class Ends(NamedTuple):
    """The ends of two connections; a system closes those of a process that has ended."""

    of_first: list[socket.socket]
    second: socket.socket
    third: socket.socket


@pytest.fixture
def ends() -> Iterator[Ends]:
    gate = Gate(ADDRESS)
    with ThreadPoolExecutor() as pool:
        accepted = pool.submit(gate.accepted, 2)
        second, third = (connected(ADDRESS, gate.invitation) for _ in range(2))
        made = Ends(accepted.result(), second, third)
    yield made
    for each in (*made.of_first, second, third):
        each.close()


def wait_until_closed(host: Host) -> None:
    """Then all that was said to this host has been read."""
    until = time.monotonic() + LIMIT
    while any(peer.fileno() >= 0 for peer in host.peers):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_who_ends_without_a_word_ends_all_others(ends: Ends) -> None:
    first, second = Host.of(ends.of_first, is_first=True), Host.of([ends.second])
    ends.third.close()
    assert first.told.get(timeout=LIMIT) == (ADDRESS, False)
    assert second.told.get(timeout=LIMIT) == (ADDRESS, False)


def test_the_end_of_the_first_host_ends_the_others_at_once(ends: Ends) -> None:
    second, third = Host.of([ends.second]), Host.of([ends.third])
    for each in ends.of_first:
        each.close()
    assert second.told.get(timeout=LIMIT) == (ADDRESS, True)
    assert third.told.get(timeout=LIMIT) == (ADDRESS, True)


def test_a_failure_of_the_first_host_ends_the_others_before_it(ends: Ends) -> None:
    first, second = Host.of(ends.of_first, is_first=True), Host.of([ends.second])
    with ThreadPoolExecutor() as pool:
        ending = pool.submit(first.lifelines.end_others, LIMIT)
        assert second.told.get(timeout=LIMIT) == (ADDRESS, False)
        ends.second.shutdown(socket.SHUT_RDWR)
        heard = b""
        while b"failed\n" not in heard:  # and that the second one has ended
            heard += ends.third.recv(100)
        assert not ending.done()  # the third one has not ended
        ends.third.close()
        ending.result(timeout=LIMIT)
    wait_until_closed(first)
    assert first.told.empty()


def test_who_ends_in_good_order_ends_nobody(ends: Ends) -> None:
    first = Host.of(ends.of_first, is_first=True)
    second, third = Host.of([ends.second]), Host.of([ends.third])
    third.lifelines.close()
    wait_until_closed(third)  # the first one lets it go
    assert second.peers[0].fileno() >= 0
    first.lifelines.close()
    wait_until_closed(second)
    wait_until_closed(first)
    for host in (first, second, third):
        assert host.told.empty()


@pytest.mark.parametrize("hello", [b"x" * 32, b"", b"GET / HTTP/1.1\r\n\r\n" * 9])
def test_strangers_are_turned_away(hello: bytes) -> None:
    gate = Gate(ADDRESS)
    port = int(gate.invitation.split()[0])
    with ThreadPoolExecutor() as pool:
        accepted = pool.submit(gate.accepted, 1)
        stranger = socket.create_connection((ADDRESS, port))
        with contextlib.suppress(OSError):  # it may be turned away before its end
            stranger.sendall(hello)
            stranger.shutdown(socket.SHUT_WR)
        known = connected(ADDRESS, gate.invitation)
        (peer,) = accepted.result(timeout=LIMIT)
    assert peer.getpeername() == known.getsockname()
    with pytest.raises(ConnectionRefusedError):  # all have come, and the door is shut
        socket.create_connection((ADDRESS, port))
    for each in (stranger, known, peer):
        each.close()


@pytest.mark.parametrize(
    ("number", "status", "waits"),
    [
        (2, -signal.SIGKILL, "barrier"),
        (2, -signal.SIGKILL, "arrays"),
        (0, 1, "barrier"),
        (0, 130, "interrupt"),
    ],
)
def test_a_host_that_is_killed_or_fails_ends_those_that_wait(
    number: int, status: int, waits: str
) -> None:
    """Of three processes, JAX would abort the two others: after up to 100 s, or at once."""
    with socket.create_server((ADDRESS, 0)) as free:
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.runtime.dying_hosts"),
                *(f"{ADDRESS}:{port},3,{each}", str(number), waits),
            ],
            cwd=Path(__file__).parents[2],
            env=environment_of(1),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in range(3)
    ]
    try:
        told = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    statuses = [process.returncode for process in processes]
    assert (statuses.pop(number), statuses) == (status, [1, 1]), told
    own = told.pop(number)
    assert ("ValueError: a failure of its own" in own) == (status == 1)
    for text in told:
        assert text.count("error: ") == 1
        assert text.splitlines()[-1].startswith(f"error: another host ({ADDRESS}) has ended")
