"""The client's HTTP connections: proves which server they reach, and limits the size of replies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai

from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.llm.endpoint import LONGEST_REPLY
from qrag_jax.llm.listener import NotOurs, OwnServer

_CONNECT_SECONDS = 5.0
_OF_A_CLIENT = 16  # connections


class TooLarge(Exception):
    """A reply is too long or compressed, and is not read to its end."""


class Connections:
    """Clients of the openai package, each with few connections; they are made as they are needed.

    A client's pool looks at all of its connections for every request and every reply. With 256 of
    them in one pool that takes longer than all else.

    Args:
        config, key, own: see `connect`.
    """

    def __init__(self, config: ClientConfig, key: str, own: OwnServer | None) -> None:
        self._made = functools.partial(connect, config, key, own)
        self._apis = [self._made()]
        self._busy = [0]
        self._url = ""

    @contextlib.contextmanager
    def api(self) -> Iterator[openai.AsyncOpenAI]:
        """A client with a connection to spare, for one request."""
        place = next((n for n, busy in enumerate(self._busy) if busy < _OF_A_CLIENT), None)
        if place is None:
            place = len(self._apis)
            self._apis.append(self._made())
            self._busy.append(0)
            if self._url:
                self._apis[place].base_url = self._url
        self._busy[place] += 1
        try:
            yield self._apis[place]
        finally:
            self._busy[place] -= 1

    def follow(self, url: str) -> None:
        """Sends what comes now to another URL."""
        self._url = url
        for api in self._apis:
            api.base_url = url

    async def close(self) -> None:
        """Closes the connections."""
        for api in self._apis:
            await api.close()


def connect(config: ClientConfig, key: str, own: OwnServer | None) -> openai.AsyncOpenAI:
    """Makes the openai package's client, without retries.

    It uses no key, organisation or project from the environment. It uses the environment's proxies
    only for a server on another machine.

    Args:
        own: the server, if we started it. A new connection is then used only if it is proven to
            lead there. Otherwise the call ends in `NotOurs` before anything is sent.
    """
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
        max_connections=_OF_A_CLIENT, max_keepalive_connections=_OF_A_CLIENT
    )
    # The caller limits the time of an attempt; this timeout detects a host that is switched off.
    timeout = openai.Timeout(None, connect=min(_CONNECT_SECONDS, config.attempt_timeout))
    http = openai.DefaultAsyncHttpxClient(
        limits=limits,
        timeout=timeout,
        trust_env=not config.is_local,
        follow_redirects=False,  # prompts go to the server that was named, and to no other
        event_hooks={"request": [_Proof(own).begin] if own else [], "response": [_bound]},
    )
    api = openai.AsyncOpenAI(
        api_key=key or "none",  # without one, the package takes OPENAI_API_KEY
        base_url=config.url,
        max_retries=0,
        timeout=timeout,
        http_client=http,
        # A small compressed body could expand to a huge one; compression hardly helps short texts.
        default_headers={"Accept-Encoding": "identity"},
    )
    # The package takes these from OPENAI_ORG_ID and OPENAI_PROJECT_ID.
    api.organization = api.project = None
    return api


class _Proof:
    """Checks who listens before and after a connection is made (httpx's `trace` extension).

    httpx calls the extension for each new connection before it sends the request's first byte.
    """

    def __init__(self, own: OwnServer) -> None:
        self._own = own

    async def begin(self, request: Any) -> None:
        """Adds the check to an outgoing request."""
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
    """Refuses a compressed reply, and stops reading one that is too long."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise TooLarge("the reply is packed, which was not asked for")
    kind: Any = type(response.stream)
    response.stream = _bounded(kind)(response.stream)


@functools.cache
def _bounded(kind: Any) -> Any:
    """A subclass of the package's stream (it accepts no other) that raises at `LONGEST_REPLY`."""

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
