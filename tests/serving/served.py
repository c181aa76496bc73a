"""A server of a real process, and clients of it."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.entry_points import Commands

LIMIT = 60  # seconds


class Served(NamedTuple):
    """A running server.

    url: its address.
    process: like `subprocess.Popen`.
    """

    url: str
    process: Any

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=LIMIT)

    def later(self, path: str, body: Mapping[str, Any]) -> Future[httpx.Response]:
        """The answer to a request that is sent by a thread of its own."""
        answer: Future[httpx.Response] = Future()

        def ask() -> None:
            try:
                answer.set_result(self.post(path, body))
            except httpx.HTTPError as error:
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()
        return answer

    def measure(self, name: str) -> float:
        """A value of `/metrics`, such as `qrag_queue_questions`."""
        text = httpx.get(self.url + "/metrics", timeout=LIMIT).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    def ended(self) -> tuple[int, str]:
        """Waits for the end of the process; returns its exit status and what it logged."""
        _, told = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, told


def started(commands: Commands, index: Path, *flags: str, port: int = 0) -> Served:
    """Starts a server, and waits until it is ready."""
    process = commands.start("serve", f"--index={index}", f"--port={port}", *flags)
    url = process.stdout.readline().strip()
    if not url:
        raise AssertionError(process.communicate(timeout=LIMIT)[1])
    return Served(url, process)


@contextlib.contextmanager
def serving(commands: Commands, index: Path, *flags: str) -> Iterator[Served]:
    """A server for the block; it must end well."""
    server = started(commands, index, *flags)
    try:
        yield server
    finally:
        server.process.terminate()
        status, told = server.ended()
    assert status == 0, told
