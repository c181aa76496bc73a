"""`qrag serve` against a plain server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np

from benchmarks.report import Case
from benchmarks.speed.measure import OURS, Setting, beside, equal, with_details
from benchmarks.speed.search import STEPS, towers_of

CLIENTS, START_LIMIT = 64, 600  # seconds


class Course:
    """What the clients of a server saw in the last round.

    Attributes:
        seconds: of each answer; NaN: it was lost.
        taken: the ids of the passages of each question.
    """

    def __init__(self, url: str, questions: Sequence[str], steps: int) -> None:
        self.url, self.questions, self.steps = url, questions, steps
        self.seconds, self.taken = np.empty(0), [[""]]

    def __call__(self, _: int) -> None:
        """Every client sends one question, waits for its answer and sends the next."""
        self.seconds = np.full(len(self.questions), np.nan)
        self.taken = [[] for _ in self.questions]
        asyncio.run(self._ask())

    async def _ask(self) -> None:
        left = iter(enumerate(self.questions))
        certificates = ssl.create_default_context()  # not read, but slow to make

        async def ask() -> None:
            # A pool of connections that all clients share would take more time than the servers.
            async with httpx.AsyncClient(timeout=START_LIMIT, verify=certificates) as client:
                for place, question in left:
                    body = {"questions": [question], "steps": self.steps}
                    begun = time.perf_counter()
                    with contextlib.suppress(httpx.HTTPError):
                        answer = await client.post(f"{self.url}/search", json=body)
                        if answer.status_code == 200:
                            self.seconds[place] = time.perf_counter() - begun
                            self.taken[place] = [hit["id"] for hit in answer.json()["hits"][0]]

        await asyncio.gather(*(ask() for _ in range(CLIENTS)))

    def percentile(self, percent: int) -> float:
        """Milliseconds within which so many answers came."""
        return 1000 * float(np.nanpercentile(self.seconds, percent))


def server_cases(setting: Setting) -> Iterator[Case]:
    """Answers/s of the user's own server, one step and four, against a plain FastAPI server."""
    towers, folder = towers_of(setting), setting.folder
    np.save(folder / "served.npy", towers.vectors())
    passages = zip((p.name for p in towers.texts.passages), towers.state_texts(), strict=True)
    (folder / "served.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in passages))
    ports = [_free_port() for _ in range(2)]
    server = ("qrag_jax.serve", f"--index={towers.indexed}", f"--retriever={towers.export}")
    files = (str(folder / "served.npy"), str(folder / "served.jsonl"))
    peer = ("benchmarks.speed.dense", str(towers.export), *files, str(ports[1]))
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with _running([(*server, f"--port={ports[0]}"), peer], urls) as process:
        for steps, count in ((1, 1_000), (STEPS, 64)):
            questions = towers.texts.questions[: 16 if setting.quick else count]
            ours, theirs = (Course(url, questions, steps) for url in urls)
            before = processor_seconds(process.pid)
            passages_of = f"{len(towers.texts.passages):,} passages"
            case = beside(
                setting,
                f"server, {CLIENTS} clients, {passages_of}, steps: {steps}",
                len(questions),
                "answers/s",
                {OURS: ours, "sentence-transformers, faiss and FastAPI": theirs},
            )
            spent = processor_seconds(process.pid) - before
            asked = len(questions) * (2 + setting.rounds)
            same = [one == other for one, other in zip(ours.taken, theirs.taken, strict=True)]
            yield with_details(
                case,
                **{
                    "processor time an answer, ms": 1000 * spent / asked,
                    "p50, ms": ours.percentile(50),
                    "p99, ms": ours.percentile(99),
                    "peer: p50, ms": theirs.percentile(50),
                    "peer: p99, ms": theirs.percentile(99),
                    "share of equal hits": float(np.mean(same)),
                },
            )
            lost = float(np.isnan(ours.seconds).sum())
            yield equal(f"server, steps: {steps}, answers lost of {len(questions)}", lost, 0.0)


@contextlib.contextmanager
def _running(commands: Sequence[Sequence[str]], urls: Sequence[str]) -> Iterator[subprocess.Popen]:
    """Servers for the block, from when all are ready; yields the first one's process."""
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            words = [sys.executable, "-m", *command]
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL)  # noqa: S603
            stack.callback(process.wait)
            stack.callback(process.terminate)
            processes.append(process)
        until = time.monotonic() + START_LIMIT
        for process, command, url in zip(processes, commands, urls, strict=True):
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{command[0]} did not start")
                time.sleep(0.2)
        yield processes[0]


def _is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def processor_seconds(process: int) -> float:
    """Of a process so far, by its system's clock."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
