"""Who listens on a port of 127.0.0.1: the proof that a server there is our own.

Whoever takes a port first is answered to by every client of it. So before anything secret is sent
to a server that we started, the socket that listens is looked up (Linux: /proc/net/tcp names it by
its inode) and must be held by a process that came of ours (/proc/PID/fd).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple, Protocol

PROC = Path("/proc")
HOST = "127.0.0.1"  # never another: whoever reaches the port may use the server
_LISTENS = "0A"  # TCP_LISTEN in the kernel's table
_HERE = socket.inet_aton(HOST)
_MAPPED = bytes(10) + b"\xff\xff" + _HERE  # ::ffff:127.0.0.1, an IPv6 socket that is bound here


class NotOurs(ConnectionError):
    """What listens is not the server that we started; the message is one sentence."""


class OwnServer(Protocol):
    """A server of our own, as those who connect to it see it."""

    @property
    def url(self) -> str:
        """Where it is now, with /v1."""
        ...

    def check(self) -> tuple[int, ...]:
        """Proves that it listens at `url`; returns the same as long as the same sockets do.

        The same before a connection is made and after it: the connection is to one of them.

        Raises:
            NotOurs: nothing listens there, or another process does.
        """
        ...


class Listener(NamedTuple):
    """A socket that a connection to the port reaches; `uid` is its owner's number."""

    inode: int
    uid: int


def listeners(port: int) -> list[Listener]:
    """The sockets that a connection to 127.0.0.1:port may reach, as the system chooses them.

    A socket bound to that address goes before one bound to all addresses; several that share a
    port (SO_REUSEPORT) are all there, for a connection may reach any of them.

    Raises:
        OSError: the system does not tell (no /proc).
    """
    exact: list[Listener] = []
    to_all: list[Listener] = []
    for name, here in (("tcp", _HERE), ("tcp6", _MAPPED)):
        table = PROC / "net" / name
        if name == "tcp6" and not table.exists():  # a system without IPv6
            continue
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            address, _, number = fields[1].partition(":")
            if fields[3] != _LISTENS or int(number, 16) != port:
                continue
            words = struct.iter_unpack(">I", bytes.fromhex(address))
            bound = b"".join(struct.pack("=I", word) for (word,) in words)
            found = Listener(int(fields[9]), int(fields[7]))
            if bound == here:
                exact.append(found)
            elif not any(bound):
                to_all.append(found)
    return exact or to_all


def family(root: int) -> list[int]:
    """The process `root` and all that came of it and are still there."""
    parents: dict[int, list[int]] = {}
    for pid in _processes():
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name, in brackets, may hold blanks and brackets itself.
            stat = (PROC / str(pid) / "stat").read_text()
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(pid)
    found, at = [root], 0
    while at < len(found):
        found += parents.get(found[at], [])
        at += 1
    return found


def held_by(inode: int, pids: list[int]) -> Path | None:
    """The link /proc/PID/fd/N to a socket, of the first of the processes that holds it."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in (PROC / str(pid) / "fd").iterdir():
                if still_held(inode, link):
                    return link
    return None


def still_held(inode: int, link: Path) -> bool:
    """Whether a link found by `held_by` is still one to that socket."""
    try:
        return os.readlink(link) == f"socket:[{inode}]"
    except OSError:
        return False


def described(port: int) -> str:
    """Who listens on the port: `process 812 (python3)`; "" if nobody does or it cannot be seen."""
    try:
        found = listeners(port)
    except OSError:
        return ""
    if not found:
        return ""
    # The files of other users' processes may not be seen, their number may.
    link = held_by(found[0].inode, _processes())
    if link is None:
        return f"a process of the user with number {found[0].uid}"
    name = ""
    with contextlib.suppress(OSError):
        name = f" ({(link.parents[1] / 'comm').read_text().strip()})"
    return f"process {link.parents[1].name}{name}"


def can_be_told() -> bool:
    """Whether this system tells who listens: tried with a socket of this process."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        probe.listen(1)
        try:
            found = listeners(probe.getsockname()[1])
        except (OSError, ValueError, IndexError):
            return False
        return any(held_by(each.inode, [os.getpid()]) for each in found)


def _processes() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(PROC) if name.isdecimal()]
    return []
