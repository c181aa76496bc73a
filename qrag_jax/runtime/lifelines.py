"""Connections by which each host sees at once that another one has ended.

Through Gloo, JAX sees a dead host at once. But where the others wait for it at a barrier, as for a
checkpoint, or in NCCL, JAX finds out after up to 100 s without a heartbeat. Then it aborts, with a
page of C++. When a process ends, however it does, its system closes its connections. So each host
keeps one to the first host, which tells the others. A host that is only busy keeps its own.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

_PATIENCE = 30.0  # seconds until all hosts have connected
_HELLO = 5.0  # seconds in which a connection must say the token
_BYE, _FAILED, _ENDED = b"bye", b"failed", b"ended "

Ended = Callable[[str, bool], None]


class Door:
    """Where the first host takes the others' connections.

    It is open until all hosts have come. Who does not know the token is turned away.

    Args:
        address: of the first host; the system chooses the port.

    Raises:
        OSError: the address cannot be used.
    """

    def __init__(self, address: str) -> None:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        self._listening = socket.create_server((address, 0), family=family)
        self._token = secrets.token_hex(16)
        self.invitation = f"{self._listening.getsockname()[1]} {self._token}"

    def taken(self, count: int, patience: float = _PATIENCE) -> list[socket.socket]:
        """So many connections, or those that came within the patience, in seconds."""
        peers: list[socket.socket] = []
        until = time.monotonic() + patience
        with self._listening:
            while len(peers) < count and (left := until - time.monotonic()) > 0:
                self._listening.settimeout(left)
                try:
                    peer, _ = self._listening.accept()
                except OSError:
                    continue
                if self._knows_token(peer):
                    peers.append(peer)
                else:
                    peer.close()
        return peers

    def _knows_token(self, peer: socket.socket) -> bool:
        said, until = b"", time.monotonic() + _HELLO
        while len(said) < len(self._token) and (left := until - time.monotonic()) > 0:
            peer.settimeout(left)
            try:
                more = peer.recv(len(self._token) - len(said))
            except OSError:
                return False
            if not more:
                return False
            said += more
        peer.settimeout(None)
        return hmac.compare_digest(said, self._token.encode())


def connected(address: str, invitation: str) -> socket.socket:
    """Connects to the first host's door.

    Args:
        address: of the first host.
        invitation: the door's.

    Raises:
        OSError: there is no way to the door.
    """
    port, token = invitation.split()
    peer = socket.create_connection((address, int(port)), timeout=_PATIENCE)
    peer.settimeout(None)
    peer.sendall(token.encode())
    return peer


class Lifelines:
    """The connections of this host: of the first one to all others, of another one to the first.

    Args:
        peers: the connections.
        is_first: whether this is the first host.
    """

    def __init__(self, peers: Sequence[socket.socket], *, is_first: bool) -> None:
        self._is_first = is_first
        self._peers = {peer: _address(peer) for peer in peers}
        self._rest = dict.fromkeys(peers, b"")  # of a line that is not whole
        self._minds = True

    def watch(self, ended: Ended) -> None:
        """Starts a thread that reads the connections until all are closed.

        Args:
            ended: called once at most, in a thread of its own, when another host fails or has ended
                without a word: with its address, and whether that was the first one, so that JAX
                is about to abort this one.
        """
        self._ended = ended
        threading.Thread(target=self._watch, name="lifelines", daemon=True).start()

    def close(self) -> None:
        """Tells the others that this host ends in good order, and minds no other's end."""
        self._minds = False
        self._say(_BYE)

    def end_others(self, patience: float) -> None:
        """Lets the others end before the first host, because JAX aborts those that outlive it.

        Of another host, this does nothing.

        Args:
            patience: seconds to wait for them at most.
        """
        self._minds = False
        if not self._is_first:
            return
        self._say(_FAILED)
        until = time.monotonic() + patience
        while self._peers and time.monotonic() < until:
            time.sleep(0.02)

    def _say(self, line: bytes, but: socket.socket | None = None) -> None:
        for peer in [*self._peers]:
            if peer is not but:
                with contextlib.suppress(OSError):  # it has ended
                    peer.sendall(line + b"\n")

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for each in self._peers:
                selector.register(each, selectors.EVENT_READ, data=each)
            while self._peers:
                for key, _ in selector.select():
                    peer = key.data
                    if not self._goes_on(peer):
                        selector.unregister(peer)
                        del self._peers[peer]
                        peer.close()

    def _goes_on(self, peer: socket.socket) -> bool:
        """Reads what a peer says; False: it says no more."""
        try:
            said = peer.recv(4096)
        except OSError:
            said = b""
        if not said:
            self._tell(peer, self._peers[peer], at_once=not self._is_first)
            return False
        *lines, self._rest[peer] = (self._rest[peer] + said).split(b"\n")
        for line in lines:
            if line == _BYE:
                return False
            if line == _FAILED:
                self._tell(peer, self._peers[peer])
            elif line.startswith(_ENDED):
                address = line.removeprefix(_ENDED).decode("ascii", "replace")
                self._tell(peer, address)
        return True

    def _tell(self, source: socket.socket, address: str, *, at_once: bool = False) -> None:
        self._say(_ENDED + address.encode(), but=source)
        if self._minds:
            self._minds = False
            threading.Thread(target=self._ended, args=(address, at_once), daemon=True).start()


def _address(peer: socket.socket) -> str:
    try:
        return str(peer.getpeername()[0])
    except OSError:  # it has just ended
        return ""
