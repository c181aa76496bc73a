"""The search as a tool of the Model Context Protocol, over standard input and output."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from qrag_jax.errors import InputError
from qrag_jax.runtime.commandline import BAD_INPUT, end_process
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.serving.searcher import Ask, Busy, SearchFailed, Worker

ABOUT = (
    "Searches a corpus of passages for those that help to answer a question. Gives each passage's "
    "id, title, text, metadata, the step that found it and its score, the best or the first found "
    "first."
)
STOP_SECONDS = 10  # for answers, when the server is asked to stop
_LOOK_EVERY = 0.05  # seconds
_WRITTEN = 0.5  # seconds in which the last answers are written


def serve_stdio(worker: Worker, stop: StopSignal) -> None:
    """Serves the tool `search` until standard input ends, a signal comes, or no index is loaded.

    It starts the worker, and calls wait until it has loaded.
    """

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
        await asyncio.to_thread(concurrent.futures.wait, [worker.loaded])
        try:
            (future,) = worker.submit([ask])
            hits = await asyncio.wrap_future(future)
        except (InputError, Busy, SearchFailed) as error:
            raise ToolError(str(error)) from None
        return {"hits": [hit._asdict() for hit in hits]}

    async def served() -> None:
        running = asyncio.create_task(server.run_stdio_async())
        while not (running.done() or stop.requested or worker.error):
            await asyncio.wait([running], timeout=_LOOK_EVERY)
        if running.done():
            return await running
        # The package reads standard input in a thread that nothing ends while the client is silent.
        await asyncio.to_thread(worker.close, STOP_SECONDS)
        await asyncio.wait([running], timeout=_WRITTEN)
        if worker.error is None:
            end_process(f"stopped by {stop.name}", 0)
        end_process(str(worker.error), BAD_INPUT if isinstance(worker.error, InputError) else 1)

    asyncio.run(served())
    worker.close()
