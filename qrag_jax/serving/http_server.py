"""Serves an application over HTTP until the process is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from ipaddress import ip_address

import uvicorn
from fastapi import FastAPI

from qrag_jax.errors import InputError
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.serving.worker import READY, Worker

STOP_SECONDS = 60  # for what waits when the server is told to stop
_LOOK_EVERY = 0.05  # seconds


def bound_socket(host: str, port: int, exposed: bool) -> socket.socket:
    """The socket of an address; it refuses connections until the server listens.

    Port 0 is a free one; only if it is `exposed` may it be an address that other machines reach.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise InputError(f"--host={host} is no address; give one of this machine.") from None
    if not (exposed or ip_address(str(address[0]).partition("%")[0]).is_loopback):
        raise InputError(
            f"--host={host} can be reached from other machines, and the server asks for no "
            "password; add --expose if that is meant, or leave --host out."
        )
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise InputError(
            f"--host={host} --port={port} cannot be used ({error.strerror}); give another --port, "
            "or end what uses this one."
        ) from None
    return bound


def url_of(listening: socket.socket) -> str:
    """Where clients reach it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """A server that leaves signals alone: after its own handlers, the process would die of them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve_http(
    app: FastAPI,
    listening: socket.socket,
    worker: Worker,
    stop: StopSignal,
    on_ready: Callable[[], None],
) -> None:
    """Loads the index and serves until a signal comes; then answers what waits.

    While the index is loaded, `/health` and all questions are answered with 503; then `on_ready` is
    called.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    server = _Server(config)

    async def watched() -> None:
        is_announced = False
        while not (stop.requested or worker.error):
            if worker.state == READY and not is_announced:
                is_announced = True
                on_ready()
            await asyncio.sleep(_LOOK_EVERY)
        worker.stop()
        for connection in [*server.server_state.connections]:
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and cycle.more_body:  # half a body, whose rest may never come
                connection.transport.close()
        server.should_exit = True

    async def served() -> None:
        watch = asyncio.create_task(watched())
        try:
            await server.serve([listening])
        finally:
            watch.cancel()

    worker.start()
    try:
        asyncio.run(served())
    finally:
        worker.close(STOP_SECONDS)
    if worker.error is not None:
        raise worker.error
