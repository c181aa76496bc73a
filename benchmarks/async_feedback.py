"""Measures training steps per second with rewards from a language model that is slow to answer.

The peer is a training whose rewards come from the supporting facts. The two take turns in one
process.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import jax
from ml_collections import ConfigDict

from benchmarks.llm_client import echo_server
from benchmarks.report import Case
from configs import quickstart
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.systems import q_rag

# Seconds that an answer takes, and a staleness K that gives the model this time.
SECONDS, STALENESS, ROUNDS, STEPS = 2.0, 1, 9, 6
QUICK_SECONDS, QUICK_STALENESS, QUICK_ROUNDS, QUICK_STEPS = 0.2, 16, 3, 20


class Side:
    """A system that trains, with its own state and experience."""

    def __init__(self, system: q_rag.QRag, run: Run) -> None:
        self.system, self.state, self.number = system, system.first_state(), 0
        self.experience = system.experience(run, StopSignal())

    def go(self, count: int) -> float:
        """Takes `count` training steps; returns the seconds they took."""
        before = time.perf_counter()
        for _ in range(count):
            episodes = self.experience.next(self.state, self.number, StopSignal())
            self.state, metrics = self.system.update(self.state, episodes)
            self.number += 1
        jax.block_until_ready(metrics)
        return time.perf_counter() - before


def cases(quick: bool) -> list[Case]:
    """Steps per second with the model's rewards, as a share of those without the model."""
    seconds, staleness = (QUICK_SECONDS, QUICK_STALENESS) if quick else (SECONDS, STALENESS)
    rounds, count = (QUICK_ROUNDS, QUICK_STEPS) if quick else (ROUNDS, STEPS)
    with echo_server(seconds) as url, tempfile.TemporaryDirectory() as folder:
        config = quickstart.get_config("tiny" if quick else "").unlock()
        config.reward.name = "answer_f1"
        config.reward.staleness = staleness
        config.llm.update(url=url, model="echo", cache="", concurrency=1024)
        config.train.steps = 10_000
        if not quick:
            config.data.synthetic.train = 1000
        q_rag.check(config)
        return _measured(config, Path(folder), rounds, count, seconds)


def _measured(
    config: ConfigDict, workdir: Path, rounds: int, count: int, answers: float
) -> list[Case]:
    with (
        Run.open(workdir, time.monotonic()) as run,
        q_rag.open_system(config, run) as by_model,
    ):
        # The same play, data and encoder, but each update scores the episodes it has just played.
        by_facts = dataclasses.replace(by_model, service=None)
        facts, model = Side(by_facts, run), Side(by_model, run)
        facts.go(2), model.go(2)  # compilation
        times: list[tuple[float, float]] = []
        waited = 0.0
        for turn in range(rounds):
            pair = {}
            for side in (facts, model) if turn % 2 else (model, facts):
                if side is model:
                    side.go(config.reward.staleness + 1)  # use up the answers that came meanwhile
                before = side.experience.waited.get("feedback", 0.0)
                pair[side] = side.go(count)
                waited += side.experience.waited.get("feedback", 0.0) - before
            times.append((pair[facts], pair[model]))
        unscored = model.experience.counts()["llm/failures"]
    kept = statistics.median(facts / model for facts, model in times)
    tiny = not config.encoder.path
    return [
        Case(
            f"steps/s with answers that take {answers:g} s, K = {config.reward.staleness} "
            f"({'tiny encoder' if tiny else 'MiniLM'}); peer: rewards from the supporting facts",
            count / statistics.median(model for _, model in times),
            "steps/s",
            peer=count / statistics.median(facts for facts, _ in times),
            ratio=kept,
            # No target for a tiny encoder: its steps end before the client has sent the questions.
            target=None if tiny else "ratio >= 0.9",
            holds=None if tiny else kept >= 0.9,
            details={
                "ratio by round": ", ".join(f"{facts / model:.2f}" for facts, model in times),
                "seconds waited for answers": waited,
                "failed calls": unscored,
                "steps by round": float(count),
            },
        )
    ]
