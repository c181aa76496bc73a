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


class Gate:
    """Where the first host takes the others' connections, until all hosts have come.

    Who does not know the token is turned away. The system chooses the port.
    """

    def __init__(self, address: str) -> None:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        self._listening = socket.create_server((address, 0), family=family)
        self._token = secrets.token_hex(16)
        self.invitation = f"{self._listening.getsockname()[1]} {self._token}"

    def accepted(self, count: int, patience: float = _PATIENCE) -> list[socket.socket]:
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
    """Connects to the gate at the first host's address."""
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
        self._heeds = True

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
        """Tells the others that this host ends in good order, and heeds no other's end."""
        self._heeds = False
        self._say(_BYE)

    def end_others(self, patience: float) -> None:
        """Lets the others end before the first host, because JAX aborts those that outlive it.

        Of another host, this does nothing.

        Args:
            patience: seconds to wait for them at most.
        """
        self._heeds = False
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
            for peer in self._peers:
                selector.register(peer, selectors.EVENT_READ, data=peer)
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
        if self._heeds:
            self._heeds = False
            threading.Thread(target=self._ended, args=(address, at_once), daemon=True).start()


def _address(peer: socket.socket) -> str:
    try:
        return str(peer.getpeername()[0])
    except OSError:  # it has just ended
        return ""
