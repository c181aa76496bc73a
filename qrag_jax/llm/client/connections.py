"""The HTTP connections of a client: to whom they may be, and how much may come back over them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import openai

from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.llm.endpoint import LONGEST_REPLY
from qrag_jax.llm.listener import NotOurs, OwnServer

_CONNECT_SECONDS = 5.0


class TooLarge(Exception):
    """A reply that is not read to its end."""


def connect(config: ClientConfig, key: str, own: OwnServer | None) -> openai.AsyncOpenAI:
    """The package's client without its retries, and without what it takes from the environment.

    Args:
        own: the server, where it is one that we started. A new connection is then used only if it
            is proven to lead there, else the call ends in `NotOurs` before anything was sent.
    """
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
        max_connections=config.concurrency + 1,  # one for the probe
        max_keepalive_connections=config.concurrency + 1,
    )
    # Attempts are timed as a whole by the caller; a host that is switched off is told by this one.
    timeout = openai.Timeout(None, connect=min(_CONNECT_SECONDS, config.attempt_timeout))
    http = openai.DefaultAsyncHttpxClient(
        limits=limits,
        timeout=timeout,
        trust_env=not config.is_local,
        event_hooks={"request": [_Proof(own).begin] if own else [], "response": [_bound]},
    )
    api = openai.AsyncOpenAI(
        api_key=key or "none",  # else the package takes one from OPENAI_API_KEY
        base_url=config.url,
        max_retries=0,
        timeout=timeout,
        http_client=http,
        # A small body could unpack to a huge one; texts this short gain nothing from packing.
        default_headers={"Accept-Encoding": "identity"},
    )
    # The package takes these from OPENAI_ORG_ID and OPENAI_PROJECT_ID.
    api.organization = api.project = None
    return api


class _Proof:
    """Looks who listens before and after a connection is made (httpx's `trace` extension).

    The extension is told of each connection before the request's first byte goes out over it.
    """

    def __init__(self, own: OwnServer) -> None:
        self._own = own

    async def begin(self, request: Any) -> None:
        """Adds the look to a request that goes out."""
        before: list[tuple[int, ...]] = []

        async def trace(event: str, info: dict[str, Any]) -> None:
            if event == "connection.connect_tcp.started":
                before[:] = [await asyncio.to_thread(self._own.check)]
            elif event == "connection.connect_tcp.complete":
                try:
                    if [await asyncio.to_thread(self._own.check)] != before:
                        raise NotOurs("another server began to listen")
                except BaseException:
                    await info["return_value"].aclose()
                    raise

        request.extensions["trace"] = trace


async def _bound(response: Any) -> None:
    """Stops reading a reply that is too long."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise TooLarge("the reply is packed, which was not asked for")
    kind: Any = type(response.stream)
    response.stream = _bounded(kind)(response.stream)


@functools.cache
def _bounded(kind: Any) -> Any:
    """Streams of the package's own kind, which it insists on, that end at `LONGEST_REPLY`."""

    class Bounded(kind):
        def __init__(self, stream: Any) -> None:
            self._whole = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            read = 0
            async with contextlib.aclosing(self._whole.__aiter__()) as parts:
                async for part in parts:
                    read += len(part)
                    if read > LONGEST_REPLY:
                        raise TooLarge(f"the reply is longer than {LONGEST_REPLY >> 20} MiB")
                    yield part

        async def aclose(self) -> None:
            await self._whole.aclose()

    return Bounded
