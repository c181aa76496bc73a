"""The client of a model server; a thread sends the requests while the caller continues."""

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

from qrag_jax.llm.client.asking import Asker
from qrag_jax.llm.client.cache import AnswerCache
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.llm.client.counters import Counters
from qrag_jax.llm.listener import OwnServer
from qrag_jax.llm.outcomes import Outcome, Request

_CLOSE_SECONDS = 10.0

logger = logging.getLogger(__name__)


class Client:
    """Asks any server that offers OpenAI's chat completions and plain completions, or `/rerank`.

    Every request ends in an `Answer` or a `Failure`; an exception means a mistake in the program.
    `ClientConfig` describes attempts, deadlines and what happens while the server is down.

    A daemon thread with an event loop waits for the replies. Any other thread may call all
    methods. After a fork, the child process must make a new client. Compiled programs run in
    parallel with that thread. Python code that keeps the interpreter busy makes it wait up to
    `sys.getswitchinterval()` (5 ms) for each of its turns.

    Attributes:
        config: the settings, as given.
    """

    def __init__(
        self,
        config: ClientConfig,
        log: Callable[[str], None] | None = None,
        own: OwnServer | None = None,
    ) -> None:
        """
        Args:
            log: receives lines for people, such as that the server is down; None: to `logging`.
            own: the server, if we started it (`Server`). The client follows it to another port,
                and sends nothing over a connection that is not proven to lead to it.
        """
        self.config, self._own = config, own
        self._log = _never_raising(log or logger.warning)
        config.api_key()  # fail here, not on the thread
        self._cache: AnswerCache | None = None
        if config.cache:
            self._cache = AnswerCache(Path(config.cache), self._log, f"{config.prefix}cache")
        self._process, self._closed = os.getpid(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        self._asker = asyncio.run_coroutine_threadsafe(self._make_asker(), self._loop).result()

    async def _make_asker(self) -> Asker:
        return Asker(self.config, self._cache, self._log, self._own)

    def submit(self, requests: Sequence[Request]) -> concurrent.futures.Future[list[Outcome]]:
        """Starts to ask; the future's result has one outcome per request, in order.

        Cancelling the future cancels the requests that have no answer yet. Its callbacks run on the
        client's thread and must not block.
        """
        self._check_usable()
        return asyncio.run_coroutine_threadsafe(self._asker.ask(tuple(requests)), self._loop)

    def ask_blocking(self, requests: Sequence[Request]) -> list[Outcome]:
        """Asks and waits; returns one outcome per request, in order."""
        future = self.submit(requests)
        try:
            return future.result()
        except BaseException:  # Ctrl-C
            future.cancel()
            raise

    def counters(self) -> Counters:
        """A copy of the counts so far."""
        return self._asker.counters.snapshot()

    def close(self) -> None:
        """Cancels requests, closes the connections and ends the thread; may be called again."""
        if self._closed or self._process != os.getpid():
            return
        self._check_usable()
        self._closed = True
        self._log_reading()
        # A task that hangs there ends with the process.
        with contextlib.suppress(concurrent.futures.TimeoutError):
            closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
            closing.result(timeout=_CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def _log_reading(self) -> None:
        """Says how many answers could not be read, or lacked their mark."""
        counts = self.counters()
        if not (counts.unread or counts.unmarked):
            return
        replies = counts.answers + counts.cache_hits + counts.shared
        where = f"; the others are kept in {self.config.cache}" if self.config.cache else ""
        self._log(
            f"{self.config.model}: {counts.unread} of {replies} replies could not be read, and "
            f'{counts.unmarked} had no "Final answer:"{where}'
        )

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
    """Wraps `log` so that an error in it, such as a closed terminal, does not end the thread."""

    def said(line: str) -> None:
        try:
            log(line)
        except Exception:
            logger.exception("could not tell: %s", line)

    return said
