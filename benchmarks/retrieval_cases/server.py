"""Many clients at once: qrag's server beside a plain one of the same encoder and passages.

    python -m benchmarks.retrieval_cases.server [REQUESTS [CLIENTS [PASSAGES]]]

Each client sends one question, waits for its answer and sends the next (10,000 requests, 64 clients
and 20,000 passages unless told). Both servers have all-MiniLM-L6-v2 on the processors and exact
search in float32. The corpus is made of words at random, and so are the questions, of 5 to 15
words: what is measured does not depend on what they say. Of each server the lines tell the
requests per second, the median and the 99th percentile of the time of an answer, how many answers
were lost or other than 200, and how many first hits both servers agree on.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from qrag_jax.retrieval.corpus import LINES, StoredCorpus
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.runtime.minilm import find_minilm

REQUESTS, CLIENTS, PASSAGES = 10_000, 64, 20_000
TOPK = 3
START_LIMIT = 600  # seconds
WORDS = [a + b for a in ("ri", "sto", "lam", "win", "clo", "gar") for b in ("ver", "ne", "den")]


class Course(NamedTuple):
    """What the clients of one server saw.

    seconds: of each answer, in the order of the questions; NaN: it was lost.
    whole: from the first request to the last answer.
    first: the id of the best passage of each question; "": there is none.
    """

    seconds: np.ndarray
    whole: float
    first: list[str]

    def line(self, name: str) -> str:
        """The figures in one line."""
        good = self.seconds[np.isfinite(self.seconds)]
        lost = len(self.seconds) - len(good)
        middle, slow = np.percentile(good, [50, 99]) * 1000 if len(good) else (np.nan, np.nan)
        return (
            f"{name}: {len(good) / self.whole:,.1f} requests/s, p50 {middle:,.1f} ms, "
            f"p99 {slow:,.1f} ms, {lost} of {len(self.seconds)} lost"
        )


async def course(url: str, questions: Sequence[str], clients: int) -> Course:
    """Asks all questions, `clients` of them at a time."""
    seconds, first = np.full(len(questions), np.nan), [""] * len(questions)
    left = iter(enumerate(questions))
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)

    async def ask(client: httpx.AsyncClient) -> None:
        for place, question in left:
            body = {"queries": [question], "topk": TOPK, "return_scores": True}
            begun = time.perf_counter()
            try:
                answer = await client.post(url + "/retrieve", json=body)
            except httpx.HTTPError:
                continue
            if answer.status_code == 200:
                seconds[place] = time.perf_counter() - begun
                first[place] = answer.json()["result"][0][0]["document"]["id"]

    async with httpx.AsyncClient(timeout=START_LIMIT, limits=limits) as client:
        begun = time.perf_counter()
        await asyncio.gather(*(ask(client) for _ in range(clients)))
        return Course(seconds, time.perf_counter() - begun, first)


@contextmanager
def running(arguments: Sequence[str], url: str) -> Iterator[None]:
    """A server for the block, from when it is ready."""
    process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.DEVNULL)  # noqa: S603
    try:
        until = time.monotonic() + START_LIMIT
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{arguments[0]} did not start")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


def _ready(url: str) -> bool:
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.HTTPError:
        return False


def _free_url() -> tuple[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    return port, f"http://127.0.0.1:{port}"


def texts(count: int, words: tuple[int, int], seed: int) -> list[str]:
    """Texts of so many words at random."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(*words))) for _ in range(count)]


def main(requests: int = REQUESTS, clients: int = CLIENTS, passages: int = PASSAGES) -> None:
    """Builds the index once, and measures both servers."""
    model = find_minilm()
    if model is None:
        raise SystemExit("all-MiniLM-L6-v2 is needed")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        source, index, vectors = folder / "corpus.jsonl", folder / "index", folder / "vectors.npy"
        rows = (
            {"id": f"p{number}", "title": "", "text": text}
            for number, text in enumerate(texts(passages, (20, 60), 0))
        )
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        build = ["qrag_jax.index", f"--corpus={source}", f"--index={index}", "--encoder=minilm"]
        subprocess.run([sys.executable, "-m", *build], check=True)  # noqa: S603
        exact = ExactIndex.open(index / "exact", StoredCorpus(index / "corpus"))
        np.save(vectors, exact.vectors(range(passages)))
        del exact
        questions = texts(requests, (5, 15), 1)
        port, url = _free_url()
        own = ["qrag_jax.serve", f"--index={index}", "--encoder=minilm", f"--port={port}"]
        peer_port, peer_url = _free_url()
        lines = index / "corpus" / LINES
        peer = ["benchmarks.peers.dense_server", str(model), str(vectors), str(lines), peer_port]
        courses: dict[str, Course] = {}
        cases: list[tuple[str, list[str], str]] = [
            ("qrag serve", own, url),
            ("sentence-transformers + faiss", peer, peer_url),
        ]
        for name, arguments, address in cases:
            with running(arguments, address):
                asyncio.run(course(address, questions[:clients], clients))  # nobody is timed yet
                courses[name] = asyncio.run(course(address, questions, clients))
            print(courses[name].line(name), flush=True)
        both: Any = zip(*(each.first for each in courses.values()), strict=True)
        agreed = sum(one == other != "" for one, other in both)
        print(f"the first hit is the same for {agreed} of {requests} questions")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
