"""Measures a token policy that a server samples: overlap of play and update, and the hand-over.

Part `overlap`: 128 episodes of three turns on a stand-in server, each of whose answers takes a
second. Part `handover`: adapters that are loaded into the real vLLM, from the arrays on the device
to its answer; it needs vLLM's environment (`make sidecar-cpu`, or QRAG_SIDECAR_PYTHON).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.report import Case
from configs.rlvr import get_config
from qrag_jax.data.generators.bridge_world import bridge_question
from qrag_jax.environments.tools.play import COMPLETE, RETRIEVE
from qrag_jax.llm.text.tool_calls import HERMES, ToolCall, write_call
from qrag_jax.models.files.tiny_lm import TinyLMConfig, write_tiny_lm
from qrag_jax.models.pretrained_lm import load_language_model
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.systems import rlvr
from qrag_jax.systems.rlvr import Rlvr
from qrag_jax.systems.served_policy import ServedPolicy, Versioned

PYTHON = os.environ.get("QRAG_SIDECAR_PYTHON", ".venv-vllm/bin/python")
SECONDS, QUESTIONS, MEMBERS, TURNS = 1.0, 16, 8, 3
WARM_UP, STEPS, PLAYS, HANDOVERS = 2, 6, 5, 30
MOST_WALL, LEAST_GAIN, MOST_HANDOVER = 1.2, 1.3, 0.5
SIZES = TinyLMConfig(layers=2)


class Unchecked(ServedPolicy):
    """A policy on a server without a model, whose log-probabilities mean nothing."""

    def check(
        self, params: Params, base: Params | None, prompts: Sequence[np.ndarray], stop: StopSignal
    ) -> float:
        """Nothing."""
        del params, base, prompts, stop
        return 0.0


def overlap_cases() -> list[Case]:
    """Wall time of a batch beside its longest chain, and steps/s with K = 1 beside K = 0."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder / "model")
        with stand_in(model, folder) as url:
            walls = play_seconds(model, folder / "plays", url)
            speeds = {
                staleness: steps_per_second(model, folder / f"run-{staleness}", url, staleness)
                for staleness in (0, 1)
            }
    wall, chain = float(np.median(walls)), TURNS * SECONDS
    title = f"{QUESTIONS * MEMBERS} episodes of {TURNS} turns, answers after {SECONDS:g} s"
    gain = speeds[1]["steps"] / speeds[0]["steps"]
    return [
        Case(
            f"{title}: wall time beside the longest chain",
            wall,
            "s",
            peer=chain,
            ratio=chain / wall,
            target=f"<= {MOST_WALL} × the chain",
            holds=wall <= MOST_WALL * chain,
            details={"lowest s": min(walls), "highest s": max(walls)},
        ),
        Case(
            f"{title}, and a GRPO update of adapters: K = 1 beside K = 0",
            speeds[1]["steps"],
            "steps/s",
            peer=speeds[0]["steps"],
            ratio=gain,
            target=f">= {LEAST_GAIN} × K = 0",
            holds=gain >= LEAST_GAIN,
            details={
                f"{word}, K = {staleness}, s": found[word]
                for staleness, found in speeds.items()
                for word in ("update", "waiting for play")
            },
        ),
    ]


def write_model(folder: Path) -> Path:
    """A random decoder of 2 × 192 whose tokenizer knows the questions' words."""
    questions = [bridge_question(0, "train", index) for index in range(200)]
    texts = [f"{q.question} {p.text}" for q in questions for p in q.passages]
    calls = [write_call(ToolCall(RETRIEVE, {"query": "a name"}), HERMES)] * 100
    write_tiny_lm(folder, [*texts, *calls], SIZES, seed=0)
    return folder


@contextlib.contextmanager
def stand_in(model: Path, folder: Path) -> Iterator[str]:
    """A server with scripted turns: two searches, then an answer, or none; its URL."""
    tokenizer = load_language_model(model).tokenizer
    (mark,) = tokenizer("<tool_response>", add_special_tokens=False).input_ids

    def ids(text: str) -> list[int]:
        return [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]

    searches = [
        ids(write_call(ToolCall(RETRIEVE, {"query": query}), HERMES)) for query in ("north", "born")
    ]
    answer = {"reasoning": "So.", "final_answer": "Oslo", "cited_doc_ids": ["1"]}
    ends = [ids(write_call(ToolCall(COMPLETE, answer), HERMES)), ids("I do not know.")]
    told = {"seconds": SECONDS, "mark": mark, "turns": [searches, searches, ends]}
    (folder / "turns.json").write_text(json.dumps(told))
    words = [sys.executable, "-m", "benchmarks.peers.turn_server", str(folder / "turns.json")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)  # noqa: S603
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.terminate()
        process.communicate()


def configured(model: Path, url: str, staleness: int) -> Any:
    """RLVR's config: adapters of rank 8, and the server."""
    config = get_config("quick").unlock()
    config.model.path = str(model)
    config.model.lora.update(rank=8)
    config.stages = ("grpo",)
    config.sampling.update(engine="server", room=640)
    config.questions.update(bridge_train=256, bridge_dev=4)
    config.grpo.update(members=MEMBERS)
    config.train.update(steps=WARM_UP + STEPS, batch_size=QUESTIONS)
    config.tools.update(staleness=staleness, max_turns=4)
    config.llm.update(url=url, model="base" if url else "")
    return config


@contextlib.contextmanager
def opened(config: Any, workdir: Path) -> Iterator[tuple[Rlvr, Run]]:
    """The system; on the stand-in its check is left out."""
    with Run.open(workdir, 0.0) as run, rlvr.open_system(config, run) as system:
        if config.llm.url:
            assert system.served is not None
            system.served.__class__ = Unchecked
        yield system, run


def play_seconds(model: Path, workdir: Path, url: str) -> list[float]:
    """Seconds in which all episodes of a batch are played."""
    with opened(configured(model, url, 0), workdir) as (system, run):
        stop, seconds = StopSignal(), []
        system.experience(run, stop)
        weights = Versioned(system.first_state().params, 0)
        assert system.served is not None
        system.served.sampler(weights, stop)
        for step in range(PLAYS):
            tasks = [system.inputs.train[n] for n in system._order.at(step).numbers]
            starts = system.player.starts(tasks, MEMBERS, step)
            began = time.monotonic()
            episodes = system.player.on_server(weights, starts, stop)
            seconds.append(time.monotonic() - began)
            turns = {sum(map(len, each.segments)) for each in episodes}
            assert turns == {TURNS}, turns
        return seconds


def steps_per_second(model: Path, workdir: Path, url: str, staleness: int) -> dict[str, float]:
    """Steps/s of the training loop, and seconds of a step that wait for episodes."""
    with opened(configured(model, url, staleness), workdir) as (system, run):
        stop, state = StopSignal(), system.first_state()
        experience = system.experience(run, stop)
        began = waited = updating = 0.0
        for step in range(WARM_UP + STEPS):
            if step == WARM_UP:
                began, waited, updating = time.monotonic(), experience.waited["play"], 0.0
            episodes = experience.next(state, step, stop)
            before = time.monotonic()
            state, metrics = system.update(state, episodes)
            jax.block_until_ready(state)
            updating += time.monotonic() - before
            assert float(metrics["flat_groups"]) < 0.5
        seconds = time.monotonic() - began
        return {
            "steps": STEPS / seconds,
            "update": updating / STEPS,
            "waiting for play": (experience.waited["play"] - waited) / STEPS,
        }


def handover_cases() -> list[Case]:
    """Seconds from adapters on the device to the answer of vLLM that they are loaded."""
    if not Path(PYTHON).exists():
        return [Case(f"hand-over of an adapter: no vLLM at {PYTHON}; make sidecar-cpu", None, "")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder / "model")
        config = configured(model, "", 1)
        config.llm.server.python = str(Path(PYTHON).absolute())
        config.llm.server.cpu_cache_gib = 1
        config.llm.server.arguments = ("--enforce-eager",)
        with opened(config, folder / "run") as (system, run):
            stop = StopSignal()
            system.experience(run, stop)  # and compares log-probabilities
            served, params = system.served, system.first_state().params
            assert served is not None
            served.seconds.clear()
            for version in range(HANDOVERS):
                served.sampler(Versioned(params, version), stop)
            seconds = np.array(served.seconds)
    median = float(np.median(seconds))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 2**20
    return [
        Case(
            f"hand-over of an adapter of rank 8 ({size:.1f} MiB) to vLLM on CPU, p50 of "
            f"{HANDOVERS}",
            median,
            "s",
            target=f"<= {MOST_HANDOVER} s",
            holds=median <= MOST_HANDOVER,
            details={"p90 s": float(np.quantile(seconds, 0.9)), "highest s": float(seconds.max())},
        )
    ]
