"""Finds out who listens on a port of 127.0.0.1, to prove that a server there is our own.

Any process may take a port first; all clients of the port then talk to that process. So before we
send a secret to a server that we started, we look up the listening socket (on Linux,
/proc/net/tcp lists sockets by inode). The server's process or one of its descendants must hold
this socket (/proc/PID/fd).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple, Protocol

PROC = Path("/proc")
HOST = "127.0.0.1"  # never another address: anyone who can reach the port can use the server
_LISTENS = "0A"  # TCP_LISTEN in the kernel's table
_HERE = socket.inet_aton(HOST)
_MAPPED = bytes(10) + b"\xff\xff" + _HERE  # ::ffff:127.0.0.1: IPv6 sockets bound to HOST


class NotOurs(ConnectionError):
    """The server that we started does not listen on its port; the message is one sentence."""


class OwnServer(Protocol):
    """A server that we started, as its clients see it."""

    @property
    def url(self) -> str:
        """Its current URL, with /v1."""
        ...

    def check(self) -> tuple[int, ...]:
        """Proves that it listens at `url`; returns the inodes of the listening sockets.

        If it returns the same value before and after a connection is made, the connection leads to
        one of these sockets.

        Raises:
            NotOurs: nothing listens there, or another process does.
        """
        ...


class Listener(NamedTuple):
    """A listening socket that a connection to the port may reach; `uid`: its owner's user id."""

    inode: int
    uid: int


def listeners(port: int) -> list[Listener]:
    """The listening sockets that a connection to 127.0.0.1:port may reach.

    Like the system, it prefers sockets bound to that address to sockets bound to all addresses. If
    several sockets share the port (SO_REUSEPORT), a connection may reach any of them, so all are
    returned.

    Raises:
        OSError: the system does not list its sockets (no /proc).
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
    """The process `root` and all its descendants that still exist."""
    parents: dict[int, list[int]] = {}
    for pid in _processes():
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name, which is in brackets, may itself contain spaces and brackets.
            stat = (PROC / str(pid) / "stat").read_text()
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(pid)
    found, at = [root], 0
    while at < len(found):
        found += parents.get(found[at], [])
        at += 1
    return found


def held_by(inode: int, pids: list[int]) -> Path | None:
    """The link /proc/PID/fd/N of the first process that holds the socket; None if none does."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in (PROC / str(pid) / "fd").iterdir():
                if still_held(inode, link):
                    return link
    return None


def still_held(inode: int, link: Path) -> bool:
    """Whether a link found by `held_by` still points to that socket."""
    try:
        return os.readlink(link) == f"socket:[{inode}]"
    except OSError:
        return False


def described(port: int) -> str:
    """Who listens on the port: `process 812 (python3)`, or its user if the process is hidden.

    Returns "" if nobody listens, or if the system does not list its sockets.
    """
    try:
        found = listeners(port)
    except OSError:
        return ""
    if not found:
        return ""
    # The open files of other users' processes are hidden; the user id is not.
    link = held_by(found[0].inode, _processes())
    if link is None:
        return f"a process of the user with number {found[0].uid}"
    name = ""
    with contextlib.suppress(OSError):
        name = f" ({(link.parents[1] / 'comm').read_text().strip()})"
    return f"process {link.parents[1].name}{name}"


def can_be_told() -> bool:
    """Whether this system shows who listens; tested with a socket of this process."""
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
