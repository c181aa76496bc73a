"""Many clients at once: qrag's server beside a plain one of the same encoder and passages.

Each client sends one question, waits for its answer and sends the next. Both servers have
all-MiniLM-L6-v2 on the processors and exact search in float32 over 2WikiMultihopQA's open corpus.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from benchmarks.report import Case
from qrag_jax.data.files.records import read_records
from qrag_jax.errors import InputError
from qrag_jax.retrieval.corpus import LINES, StoredCorpus
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.runtime.minilm import find_minilm

DATA = Path(os.environ.get("QRAG_DATA", "../shared/data")) / "2wikimultihopqa"
REQUESTS, CLIENTS = 10_000, 64
TOPK, STEPS, PART = 3, 4, 2_000
START_LIMIT = 600  # seconds


class Course(NamedTuple):
    """What the clients of one server saw.

    seconds: of each answer, in the order of the questions; NaN: it was lost.
    whole: from the first request to the last answer.
    first: the id of the best passage of each question; "": there is none.
    """

    seconds: np.ndarray
    whole: float
    first: list[str]


async def course(url: str, questions: Sequence[str], clients: int, steps: int = 0) -> Course:
    """Asks all questions, `clients` of them at a time; of a retriever in so many steps, if any."""
    path = "/search" if steps else "/retrieve"
    seconds, first = np.full(len(questions), np.nan), [""] * len(questions)
    left = iter(enumerate(questions))
    certificates = ssl.create_default_context()  # not read, but slow to make

    async def ask() -> None:
        # A pool of connections that all clients share would take more time than the servers.
        async with httpx.AsyncClient(timeout=START_LIMIT, verify=certificates) as client:
            for place, question in left:
                body: dict[str, Any] = {"questions": [question], "steps": steps}
                if not steps:
                    body = {"queries": [question], "topk": TOPK, "return_scores": True}
                begun = time.perf_counter()
                try:
                    answer = await client.post(url + path, json=body)
                except httpx.HTTPError:
                    continue
                if answer.status_code == 200:
                    seconds[place] = time.perf_counter() - begun
                    found = answer.json()
                    hit = found["hits"][0][0] if steps else found["result"][0][0]["document"]
                    first[place] = hit["id"]

    begun = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(clients)))
    return Course(seconds, time.perf_counter() - begun, first)


@contextmanager
def running(arguments: Sequence[str], url: str) -> Iterator[subprocess.Popen]:
    """A server for the block, from when it is ready."""
    process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.DEVNULL)  # noqa: S603
    try:
        until = time.monotonic() + START_LIMIT
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{arguments[0]} did not start")
            time.sleep(0.2)
        yield process
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


def server_cases() -> Iterator[Case]:
    """Requests per second and the times of answers of both servers; and a server that was killed.

    Raises:
        InputError: the data or MiniLM are not on this machine.
    """
    model = find_minilm()
    if model is None:
        raise InputError("all-MiniLM-L6-v2 was found nowhere; the server's cases need it.")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        index, vectors = folder / "index", folder / "vectors.npy"
        corpus = DATA / "open_corpus.jsonl.gz"
        build = ("qrag_jax.index", f"--corpus={corpus}", f"--index={index}", "--encoder=minilm")
        subprocess.run([sys.executable, "-m", *build], check=True)  # noqa: S603
        stored = StoredCorpus(index / "corpus")
        exact = ExactIndex.open(index / "exact", stored)
        np.save(vectors, exact.vectors(range(len(stored))))
        del exact
        asked = (record["question"] for _, record in read_records(DATA / "open_dev.jsonl.gz"))
        questions = list(itertools.islice(itertools.cycle(list(asked)), REQUESTS))
        port, url = _free_url()
        own = ["qrag_jax.serve", f"--index={index}", "--encoder=minilm", f"--port={port}"]
        loading, again, ours = _killed(own, url, questions)
        peer_port, peer_url = _free_url()
        lines = index / "corpus" / LINES
        peer = ["benchmarks.peers.dense_server", str(model), str(vectors), str(lines), peer_port]
        with running(peer, peer_url):
            theirs = timed(peer_url, questions)
    yield from _compared(ours, theirs, len(stored))
    yield Case(
        "server, killed and started again: seconds to an answer",
        again,
        "s",
        target=f"at most 1.25 x its first start ({loading:.1f} s)",
        holds=again <= 1.25 * loading,
    )


def stepped_cases() -> Iterator[Case]:
    """Requests per second of a trained retriever, one step and four; training does not change them.

    Raises:
        InputError: the data or MiniLM are not on this machine.
    """
    with tempfile.TemporaryDirectory() as made:
        index, run = Path(made) / "index", f"--workdir={Path(made) / 'run'}"
        fields = (f"data.path={DATA}", "encoder.path=minilm", "train.steps=1", "eval.samples=1")
        config = ("--config=configs/two_wiki.py:minilm", *(f"--config.{each}" for each in fields))
        # The encoder takes the time, and not the search among its vectors: a part will do.
        corpus, records = Path(made) / "corpus.jsonl", read_records(DATA / "open_corpus.jsonl.gz")
        part = [json.dumps(record) + "\n" for _, record in itertools.islice(records, PART)]
        corpus.write_text("".join(part))
        for command in (
            ("qrag_jax.train", *config, run),
            ("qrag_jax.index", f"--corpus={corpus}", f"--index={index}", run, "--checkpoint=last"),
        ):
            subprocess.run([sys.executable, "-m", *command], check=True)  # noqa: S603
        records = read_records(DATA / "open_dev.jsonl.gz")
        asked = [record["question"] for _, record in itertools.islice(records, 2 * CLIENTS)]
        port, url = _free_url()
        own = ("qrag_jax.serve", f"--index={index}", run, "--checkpoint=last", f"--port={port}")
        with running(own, url) as process:
            for steps in (1, STEPS):
                asyncio.run(course(url, asked[:CLIENTS], CLIENTS, steps))  # compiles
                before, busy = processor_seconds(process.pid), os.getloadavg()[0]
                found = asyncio.run(course(url, asked, CLIENTS, steps))
                spent = processor_seconds(process.pid) - before
                yield Case(
                    f"server, {CLIENTS} clients, {PART:,} passages, MiniLM in steps: {steps}",
                    len(asked) / found.whole,
                    "requests/s",
                    details={
                        "p50, ms": float(np.nanpercentile(found.seconds, 50)) * 1000,
                        "p99, ms": float(np.nanpercentile(found.seconds, 99)) * 1000,
                        "processor time an answer, ms": 1000 * spent / len(asked),
                        "load before": busy,
                        "lost": int(np.isnan(found.seconds).sum()),
                    },
                )


def processor_seconds(process: int) -> float:
    """Of a process so far, by its system's clock."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _killed(own: list[str], url: str, questions: Sequence[str]) -> tuple[float, float, Course]:
    """Seconds to the first answer of a new server and of one that follows a killed one; its course.

    The first one is killed while all clients wait for their answers.
    """
    begun = time.perf_counter()
    with running(own, url) as process:
        asyncio.run(course(url, questions[:1], 1))
        loading = time.perf_counter() - begun
        killer = threading.Timer(1.0, process.kill)
        killer.start()
        asyncio.run(course(url, questions, CLIENTS))  # most are lost
        process.wait()
    begun = time.perf_counter()
    with running(own, url):
        answered = asyncio.run(course(url, questions[:1], 1))
        again = time.perf_counter() - begun
        assert np.isfinite(answered.seconds).all()
        return loading, again, timed(url, questions)


def timed(url: str, questions: Sequence[str]) -> Course:
    """The course of all questions, after a first round that is not timed."""
    asyncio.run(course(url, questions[:CLIENTS], CLIENTS))
    return asyncio.run(course(url, questions, CLIENTS))


def _compared(ours: Course, theirs: Course, passages: int) -> Iterator[Case]:
    name = f"server, {CLIENTS} clients, {passages:,} passages, MiniLM"
    rates = [len(each.seconds) / each.whole for each in (ours, theirs)]
    agreed = np.mean([one == other for one, other in zip(ours.first, theirs.first, strict=True)])
    yield Case(
        f"{name}: beside sentence-transformers, faiss and FastAPI",
        rates[0],
        "requests/s",
        peer=rates[1],
        ratio=rates[0] / rates[1],
        details={"share of equal first hits": float(agreed)},
    )
    for share in (50, 99):
        mine, other = (
            float(np.nanpercentile(each.seconds, share)) * 1000 for each in (ours, theirs)
        )
        yield Case(f"{name}: p{share}", mine, "ms", peer=other, ratio=other / mine)
    lost = int(np.isnan(ours.seconds).sum())
    yield Case(
        f"{name}: lost of {len(ours.seconds):,} requests",
        lost,
        "requests",
        peer=int(np.isnan(theirs.seconds).sum()),
        target="0",
        holds=lost == 0,
    )
