"""The tool as a client of the Model Context Protocol meets it: a process, asked over its pipes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from tests.entry_points import ROOT, Commands
from tests.serving.small_index import WORDS, words_index

LIMIT = 100  # seconds
CLIENT = {"name": "test", "version": "1"}


def asked(
    commands: Commands, index: Path, log: Path, ask: Callable[[ClientSession], Awaitable[Any]]
) -> Any:
    """What a client gets from a server that it starts; the server's log is written to a file."""
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "qrag_jax.serve", "--mcp", f"--index={index}"],
        env=commands.environment,
        cwd=ROOT,
    )

    async def run() -> Any:
        with log.open("w") as file:
            async with (
                stdio_client(server, errlog=file) as (reading, writing),
                ClientSession(reading, writing) as session,
            ):
                await session.initialize()
                return await ask(session)

    return asyncio.run(asyncio.wait_for(run(), LIMIT))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mcp") / "index"
    words_index(folder)
    return folder


def test_a_client_finds_the_tool_and_searches(
    commands: Commands, index: Path, tmp_path: Path
) -> None:
    async def ask(session: ClientSession) -> Any:
        tools = (await session.list_tools()).tools
        asks = [
            {"question": "all about rivers", "topk": 2},
            {"question": "all about rivers", "where": {"page": 0}},
            {"question": " "},
            {"question": "cats", "where": {"pages": 0}},
            {"question": "cats", "topk": len(WORDS) + 1},
        ]
        return tools, [await session.call_tool("search", each) for each in asks]

    tools, answers = asked(commands, index, tmp_path / "log", ask)
    (tool,) = tools
    assert tool.name == "search"
    assert tool.input_schema["required"] == ["question"]
    assert set(tool.input_schema["properties"]) == {"question", "topk", "steps", "where"}
    found, filtered, *refused = answers
    assert not found.is_error
    hits = found.structured_content["hits"]
    assert json.loads(found.content[0].text) == {"hits": hits}
    assert len(hits) == 2
    assert hits[0]["score"] > hits[1]["score"] > 0
    assert (hits[0]["id"], hits[0]["title"], hits[0]["metadata"]) == ("p4", "Rivers", {"page": 1})
    assert {hit["metadata"]["page"] for hit in filtered.structured_content["hits"]} == {0}
    assert all(answer.is_error for answer in refused)
    for answer, name in zip(refused, ("question", "pages", "topk"), strict=True):
        assert name in answer.content[0].text
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert "rivers" not in log


def test_a_signal_ends_it_while_its_client_reads_nothing(commands: Commands, index: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "qrag_jax.serve", "--mcp", f"--index={index}"],
        cwd=ROOT,
        env=commands.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": CLIENT}
    call = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    line = json.dumps(call).encode() + b"\n"
    os.write(process.stdin.fileno(), line)
    assert json.loads(process.stdout.readline())["id"] == 1  # it has started
    os.set_blocking(process.stdin.fileno(), False)
    full = 0
    while full < 20:  # two seconds in which it takes nothing: both pipes hold all that they can
        try:
            os.write(process.stdin.fileno(), line)
            full = 0
        except BlockingIOError:
            full += 1
            time.sleep(0.1)
    process.terminate()
    assert process.wait(LIMIT) == 0  # its input is still open
    with process.stdin, process.stdout:
        pass
