"""The search as a tool of the Model Context Protocol, over standard input and output."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from qrag_jax.errors import InputError
from qrag_jax.serving.searcher import Ask, as_json
from qrag_jax.serving.worker import Busy, SearchFailed, Worker

ABOUT = (
    "Searches a corpus of passages for those that help to answer a question. Gives each passage's "
    "id, title, text, metadata, the step that found it and its score, the best or the first found "
    "first."
)


def make_tool(worker: Worker) -> MCPServer:
    """A server with the one tool `search`.

    Args:
        worker: answers the questions; a call waits until it has loaded.
    """
    server = MCPServer("qrag_jax", log_level="ERROR")

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


def serve_stdio(worker: Worker) -> None:
    """Serves the tool until standard input ends or a signal comes.

    Raises:
        Exception: what kept the index from being loaded.
    """
    worker.start()
    tool = make_tool(worker)

    async def served() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, done.set)
        running = asyncio.create_task(tool.run_stdio_async())
        told = asyncio.create_task(done.wait())
        await asyncio.wait([running, told], return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if running.done():
            running.result()
            return
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(served())
    worker.close()
    if worker.error is not None:
        raise worker.error
