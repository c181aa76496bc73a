"""The client of a model server: a thread of its own asks while the caller goes on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from qrag_jax.llm.client.asking import Asker, Served
from qrag_jax.llm.client.cache import AnswerCache
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.llm.client.counters import Counters
from qrag_jax.llm.listener import OwnServer
from qrag_jax.llm.outcomes import Outcome, Request

_CLOSE_SECONDS = 10.0

logger = logging.getLogger(__name__)


class Client:
    """Asks any server that speaks OpenAI's chat and plain completions.

    Every request ends in an `Answer` or a `Failure`; exceptions are mistakes in the program.
    Replies are awaited on a thread with an event loop, a daemon that ends with the process; all
    methods may be called from any thread. A process that forks makes a client of its own in the
    child. Attempts, deadlines and what happens while the server is down: see `ClientConfig`.
    Compiled programs run beside that thread freely; Python code that keeps the interpreter busy
    makes it wait up to `sys.getswitchinterval()` (5 ms) for each of its turns.

    Attributes:
        config: as given.

    Raises:
        InputError: the API key is not set, or the cache's file cannot be used.
    """

    def __init__(
        self,
        config: ClientConfig,
        log: Callable[[str], None] | None = None,
        own: OwnServer | None = None,
    ) -> None:
        """
        Args:
            log: takes the lines for people, such as that the server is down; None logs them.
            own: the server, where it is one that we started (`Server`): it is followed to another
                port, and nothing is sent over a connection that is not proven to lead to it.
        """
        self.config, self._own = config, own
        self._log = _never_raising(log or logger.warning)
        config.api_key()  # fail here, not on the thread
        self._cache = AnswerCache(Path(config.cache), self._log) if config.cache else None
        self._process, self._closed = os.getpid(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        self._asker = asyncio.run_coroutine_threadsafe(self._make_asker(), self._loop).result()

    async def _make_asker(self) -> Asker:
        return Asker(self.config, self._cache, self._log, self._own)

    def submit(self, requests: Sequence[Request]) -> concurrent.futures.Future[list[Outcome]]:
        """Begins to ask; the future's result has one outcome a request, in their order.

        Cancelling the future takes back what was not answered yet. Its callbacks run on the
        client's thread and may not block.
        """
        self._check_usable()
        return asyncio.run_coroutine_threadsafe(self._asker.ask(tuple(requests)), self._loop)

    def ask_blocking(self, requests: Sequence[Request]) -> list[Outcome]:
        """One outcome a request, in their order."""
        future = self.submit(requests)
        try:
            return future.result()
        except BaseException:  # Ctrl-C
            future.cancel()
            raise

    async def ask(self, requests: Sequence[Request]) -> list[Outcome]:
        """One outcome a request, in their order; for callers with an event loop of their own."""
        return await asyncio.wrap_future(self.submit(requests))

    def use(self, model: str, version: str) -> None:
        """From now on requests ask for `model`, whose weights are `version`.

        Answers under way keep the version they were asked with if another model is named, and
        lose it ("", not cached) if the weights changed under the same name.
        """
        self._check_usable()

        async def change() -> None:
            self._asker.served = Served(model, version)

        asyncio.run_coroutine_threadsafe(change(), self._loop).result()

    def counters(self) -> Counters:
        """What was counted so far; a copy."""
        return self._asker.counters.snapshot()

    def close(self) -> None:
        """Cancels what is under way, ends the connections and the thread; may be called again."""
        if self._closed or self._process != os.getpid():
            return
        self._check_usable()
        self._closed = True
        # Whatever hangs there ends with the process.
        with contextlib.suppress(concurrent.futures.TimeoutError):
            closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
            closing.result(timeout=_CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._asker.close()

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError("this client was made before a fork; make one in this process.")
        if self._closed:
            raise RuntimeError("this client was closed.")
        if threading.current_thread() is self._thread:
            raise RuntimeError("a future's callback may not call the client; use another thread.")

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.config.url}, model={self.config.model})"


def _never_raising(log: Callable[[str], None]) -> Callable[[str], None]:
    """A terminal that is gone must not end the thread's work."""

    def said(line: str) -> None:
        try:
            log(line)
        except Exception:
            logger.exception("could not tell: %s", line)

    return said
