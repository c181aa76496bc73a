"""Measures rollouts of many agents at once: are searches batched, does anything wait for nothing?

256 episodes of the planner are played beside each other. Their language model is an echo server,
whose every answer takes a second: prompts are such that their echo is a search, a reader's verdict
and an answer. The longest chain of calls bounds the time from below. The encoder is tiny: on a GPU
a real one takes as long.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.llm_client import echo_server
from benchmarks.report import Case
from configs import harr_grpo
from qrag_jax import systems
from qrag_jax.environments.rag.episode import Finished
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.systems import harr

QUESTIONS, MEMBERS, HOPS = 32, 8, 2
SECONDS = 1.0  # of every answer
CALLS = 2 * HOPS + 1  # a plan and a reading for each search, and the answer
PROMPTS = {
    "rag_steps": '[user]\n{steps} of {max_hops}\n{"action": "ASK", "sub_query": "{question}"}',
    "rag_qa": '[user]\n{question} {passages}\n{"status": "FOUND", "answer": "this"}',
    "rag_synthesis": "[user]\n{question} {steps}\nFinal answer: this",
}


def cases(seconds: float = SECONDS) -> Iterator[Case]:
    """The batches of searches, and the time beside the longest chain of calls.

    Args:
        seconds: of every answer.
    """
    with tempfile.TemporaryDirectory() as name, echo_server(seconds) as url:
        folder = Path(name)
        for prompt, text in PROMPTS.items():
            (folder / f"{prompt}.txt").write_text(text)
        config = harr_grpo.get_config("synthetic-planner-tiny")
        config.agent.update(prompts=name, max_hops=HOPS)
        config.llm.update(url=url, model="echo", concurrency=QUESTIONS * MEMBERS, cache="")
        systems.check(config)
        stop = StopSignal()
        with Run.open(folder / "run", 0.0) as run, harr.open_system(config, run) as system:
            system.experience(run, stop)  # waits for the server
            params = system.first_state().params
            asked, player = system.inputs.train[:QUESTIONS], system.player
            starts = player.starts(asked, MEMBERS, 0)
            for count in (1, 16, 64, 128, len(starts), len(starts)):  # compiles
                player.play(params, starts[:count], stop)
            before, began = player.counts.searches, time.monotonic()
            batches = player.counts.batches
            played = player.play(params, starts, stop)
            took = time.monotonic() - began
            searches = player.counts.searches - before
            mean = searches / (player.counts.batches - batches)
    whole = sum(isinstance(each.ended, Finished) for each in played)
    yield Case(
        f"{len(starts)} episodes at once: mean batch of searches",
        mean,
        "searches",
        target=">= 32",
        holds=mean >= 32,
        details={"searches": searches, "episodes that ended well": whole},
    )
    chain = CALLS * seconds
    yield Case(
        f"{len(starts)} episodes at once: time beside the longest chain of calls",
        took,
        "s",
        peer=chain,
        ratio=chain / took,
        target="<= 1.2 times the chain",
        holds=took <= 1.2 * chain,
        details={
            "calls of a chain": CALLS,
            "s of a call": seconds,
            "times the chain": took / chain,
        },
    )
