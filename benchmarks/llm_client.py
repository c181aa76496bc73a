"""Measures answers per second: our client against asyncio.gather over the openai package."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import openai

from benchmarks.report import Case
from qrag_jax.llm.client.client import Client
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.llm.outcomes import Answer, ChatRequest

CONCURRENCY = 32
ANSWERS, QUICK_ANSWERS = 10_000, 500
ROUNDS = 5  # both sides take part in every round, so that the machine is the same for both
_WARM_UP = 2 * CONCURRENCY


class Round(NamedTuple):
    """One side's figures in one round.

    Attributes:
        seconds: wall-clock time.
        processor: CPU seconds of this process.
        latencies: seconds of each answer; empty for our client, which has its own counters.
        wrong: number of answers that are missing or belong to another prompt.
    """

    seconds: float
    processor: float
    latencies: list[float]
    wrong: int


@contextlib.contextmanager
def echo_server(seconds: float = 0.0) -> Iterator[str]:
    """Starts an echo server in a new process; every answer takes `seconds`. Yields its URL."""
    command = [sys.executable, "-m", "benchmarks.peers.echo_server", str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.terminate()


def cases(quick: bool) -> list[Case]:
    """Throughput, latencies, and how many answers were lost or swapped."""
    count = QUICK_ANSWERS if quick else ANSWERS
    rounds: list[tuple[Round, Round]] = []
    with (
        echo_server() as url,
        Client(ClientConfig(url, "echo", concurrency=CONCURRENCY)) as client,
        asyncio.Runner() as runner,
    ):
        api = openai.AsyncOpenAI(api_key="none", base_url=url)
        # Both keep their connections; opening them is not measured.
        ours_round(client, _prompts(-1, _WARM_UP))
        warm_up = runner.run(peer_round(api, _prompts(-1, _WARM_UP)))
        for index in range(ROUNDS):
            prompts = _prompts(index, count // ROUNDS)
            if index % 2:  # the sides take turns at going first
                peer, ours = runner.run(peer_round(api, prompts)), ours_round(client, prompts)
            else:
                ours, peer = ours_round(client, prompts), runner.run(peer_round(api, prompts))
            rounds.append((ours, peer))
        latency = client.counters().latency
        # Both include the warm-up, because the client's counters include it.
        ours_latency = {p: 1000 * latency.percentile(p) for p in (50, 99)}
        runner.run(api.close())
    times = [t for side in (warm_up, *(peer for _, peer in rounds)) for t in side.latencies]
    peer_latency = {p: 1000 * statistics.quantiles(times, n=100)[p - 1] for p in (50, 99)}
    ratio = statistics.median(peer.seconds / ours.seconds for ours, peer in rounds)
    return _as_cases(count, rounds, ratio, ours_latency, peer_latency)


def _as_cases(
    count: int,
    rounds: Sequence[tuple[Round, Round]],
    ratio: float,
    ours_latency: dict[int, float],
    peer_latency: dict[int, float],
) -> list[Case]:
    wrong = sum(ours.wrong for ours, _ in rounds)
    speed = Case(
        f"{count} answers, {CONCURRENCY} at once; peer: gather over openai",
        count / sum(ours.seconds for ours, _ in rounds),
        "answers/s",
        peer=count / sum(peer.seconds for _, peer in rounds),
        ratio=ratio,
        target="ratio >= 1.0",
        holds=ratio >= 1.0,
        details={
            f"p{p} latency in ms, ours / peer": f"{ours_latency[p]:.1f} / {peer_latency[p]:.1f}"
            for p in (50, 99)
        }
        | {
            "processor ms an answer, ours / peer": " / ".join(
                f"{1000 * sum(side.processor for side in sides) / count:.2f}"
                for sides in zip(*rounds, strict=True)
            ),
            "peer's seconds to ours, by round": ", ".join(
                f"{peer.seconds / ours.seconds:.2f}" for ours, peer in rounds
            ),
        },
    )
    lost = Case(
        "answers lost or swapped",
        float(wrong),
        f"of {count}",
        peer=float(sum(peer.wrong for _, peer in rounds)),
        target="0",
        holds=wrong == 0,
    )
    return [speed, lost]


def ours_round(client: Client, prompts: Sequence[str]) -> Round:
    """Sends the prompts through our client; its counters have the latencies."""
    requests = [ChatRequest((("user", prompt),)) for prompt in prompts]
    started, processor = time.perf_counter(), time.process_time()
    outcomes = client.ask_blocking(requests)
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    texts = [outcome.text if isinstance(outcome, Answer) else None for outcome in outcomes]
    return Round(seconds, processor, [], _wrong(prompts, texts))


async def peer_round(api: openai.AsyncOpenAI, prompts: Sequence[str]) -> Round:
    """Sends the prompts through the openai package with a semaphore, as its users do."""
    slots, latencies = asyncio.Semaphore(CONCURRENCY), []

    async def ask(prompt: str) -> str | None:
        async with slots:
            started = time.perf_counter()
            reply = await api.chat.completions.create(
                model="echo",
                messages=[{"role": "user", "content": prompt}],
                temperature=0.0,
                max_tokens=256,
            )
            latencies.append(time.perf_counter() - started)
        return reply.choices[0].message.content

    started, processor = time.perf_counter(), time.process_time()
    texts = await asyncio.gather(*map(ask, prompts))
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    return Round(seconds, processor, latencies, _wrong(prompts, texts))


def _prompts(index: int, count: int) -> list[str]:
    passage = "The tower stands north of the river that divides the old town. " * 12
    return [f"{passage}Round {index}, question {number}: where is it?" for number in range(count)]


def _wrong(prompts: Sequence[str], texts: Sequence[str | None]) -> int:
    """Counts answers that are missing or belong to another prompt; the server echoes prompts."""
    missing = len(prompts) - len(texts)
    return missing + sum(prompt != text for prompt, text in zip(prompts, texts, strict=False))
