"""The search as a tool of the Model Context Protocol, over standard input and output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from qrag_jax.errors import InputError
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.output import end_process
from qrag_jax.serving.searcher import Ask, as_json
from qrag_jax.serving.worker import Busy, SearchFailed, Worker

ABOUT = (
    "Searches a corpus of passages for those that help to answer a question. Gives each passage's "
    "id, title, text, metadata, the step that found it and its score, the best or the first found "
    "first."
)
STOP_SECONDS = 10  # for answers, when the server is told to stop
_LOOK_EVERY = 0.05  # seconds
_PIECE = 2**16  # bytes


def make_tool(worker: Worker) -> MCPServer:
    """A server with the one tool `search`; it starts the worker, and calls wait until it loaded."""

    @contextlib.asynccontextmanager
    async def lifespan(server: MCPServer) -> AsyncIterator[None]:
        # Not before: now standard output is the client's, and what loading prints is kept from it.
        worker.start()
        yield

    server = MCPServer("qrag_jax", log_level="ERROR", lifespan=lifespan)

    @server.tool(name="search", description=ABOUT)
    async def search(
        question: str,
        topk: int | None = None,
        steps: int | None = None,
        where: dict[str, Any] | None = None,
    ) -> dict[str, list[dict[str, Any]]]:
        ask = Ask(question, count=topk, steps=steps, where=where)
        await asyncio.to_thread(worker.await_loaded)
        try:
            (future,) = worker.submit([ask])
            hits = await asyncio.wrap_future(future)
        except (InputError, Busy, SearchFailed) as error:
            raise ToolError(str(error)) from None
        return {"hits": [dict(as_json(hit)) for hit in hits]}

    return server


class _Input:
    """Standard input that can be ended from here.

    The package reads it in a thread, which nothing stops while the client says nothing. So fd 0
    becomes a pipe, which a thread of ours, that may be left behind, fills from what fd 0 was.
    """

    def __init__(self) -> None:
        self._source = os.dup(0)
        end, self._pipe = os.pipe()
        os.dup2(end, 0)
        os.close(end)
        self._lock, self._open = threading.Lock(), True
        os.set_blocking(self._pipe, False)
        threading.Thread(target=self._fill, name="input", daemon=True).start()

    def end(self) -> None:
        """Lets readers find the end of the input."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._pipe)

    def _fill(self) -> None:
        data = b""
        while data := data or os.read(self._source, _PIECE):
            with self._lock:  # never while it waits for the reader, so that `end` can have it
                if not self._open:
                    return
                with contextlib.suppress(BlockingIOError):  # the pipe is full
                    data = data[os.write(self._pipe, data) :]
            if data:
                time.sleep(_LOOK_EVERY)
        self.end()


def serve_stdio(worker: Worker, stop: StopSignal) -> None:
    """Serves the tool until standard input ends, a signal comes, or the index cannot be loaded."""
    tool, given = make_tool(worker), _Input()

    async def served() -> None:
        running = asyncio.create_task(tool.run_stdio_async())
        while not (running.done() or stop.requested or worker.error):
            await asyncio.wait([running], timeout=_LOOK_EVERY)
        given.end()
        done, _ = await asyncio.wait([running], timeout=STOP_SECONDS)
        if not done:
            end_process("stopped, while the client reads no answers", 0)
        await running

    asyncio.run(served())
    worker.close()
    if worker.error is not None:
        raise worker.error
