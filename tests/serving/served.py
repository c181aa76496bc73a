"""A server of a real process, clients of it, and the small index that it serves."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import LINES, StoredCorpus, write_corpus
from qrag_jax.retrieval.protocol import Passage
from tests.entry_points import Commands

LIMIT = 60  # seconds
_REQUESTS = ThreadPoolExecutor(16)


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
        return _REQUESTS.submit(self.post, path, body)

    def measure(self, name: str) -> float:
        """A value of `/metrics`, such as `qrag_queue_questions`."""
        text = httpx.get(self.url + "/metrics", timeout=LIMIT).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    def ended(self) -> tuple[int, str]:
        """Waits for the end of the process; returns its exit status and what it logged."""
        _, output = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, output


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
        status, output = server.ended()
    assert status == 0, output


WORDS = [
    *("cats", "dogs", "birds", "trees", "rivers", "mountains", "stars"),
    *("ships", "bridges", "lamps"),
]


def words_index(folder: Path) -> StoredCorpus:
    """An index of BM25 as `qrag index` lays it out: one passage for each of `WORDS`."""
    corpus = write_corpus(
        folder / "corpus",
        (
            Passage(f"p{i}", f"All about {word}\nand more of it.", word.title(), {"page": i % 3})
            for i, word in enumerate(WORDS)
        ),
    )
    BM25Index.build(corpus).save(folder / "bm25")
    return corpus


def damage(folder: Path, word: str) -> None:
    """Spoils the stored passage of a word, in the file that a server has open."""
    path = folder / "corpus" / LINES
    data = path.read_bytes()
    line = next(line for line in data.split(b"\n") if word.encode() in line)
    with path.open("r+b") as file:
        file.seek(data.index(line))
        file.write(b"x" * len(line))
