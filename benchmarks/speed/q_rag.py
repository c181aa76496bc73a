"""Q-RAG's update against PyTorch: same questions, weights, optimizer.

HotpotQA's records come from the folder QRAG_DATA; without them, and in quick sizes, questions are
invented. The peer (`tests.support.torch_pqn`) computes whole batches; chunks in one padded batch or
in mini-batches sorted by length, of which the faster counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.report import Case
from benchmarks.speed import ours
from benchmarks.speed.measure import OURS, Program, Setting, beside
from configs import hotpotqa
from qrag_jax.runtime.pretrained_files import find_minilm
from tests.support.torch_pqn import BatchedPeer

PEERS = {"PyTorch, padded": False, "PyTorch, length-sorted": True}


class Task(NamedTuple):
    """What all cases share; `questions` of a batch."""

    texts: ours.Texts
    encoder: ours.Encoder
    questions: int


@cache
def task_of(setting: Setting) -> Task:
    """MiniLM, or random weights of its sizes, and questions; quick: two layers, few questions."""
    gpu, quick = setting.device == "cuda", setting.quick
    minilm: Path | None = find_minilm()
    given = hotpotqa.get_config("minilm")
    with given.unlocked():
        given.stages = ("pqn",)
        given.encoder.update(normalise=False, scale=0.1, **setting.blocks)  # as PyTorch's towers
    data, count = ("invented", 128) if quick else ("hotpotqa", 2048)
    config, samples, origin = ours.read_texts(given, data, count, setting.folder)
    tokenizer = ours.load_tokenizer(minilm, samples, setting.folder / "tokenizer")
    texts = ours.load_texts(config, samples, origin, tokenizer)
    if minilm is not None and not quick:
        encoder = ours.genuine_minilm(minilm, config)
    else:
        sizes, name = (ours.SMALL, "1 layer, 32 wide") if quick else (ours.MINILM, "MiniLM sizes")
        encoder = ours.random_encoder(sizes, name, tokenizer, config)
    return Task(texts, encoder, 2 if quick else 256 if gpu else 16)


def update_cases(setting: Setting) -> Iterator[Case]:
    """States that PQN learns from in a second."""
    texts, encoder, questions = task_of(setting)
    training = ours.Training(texts, encoder)
    settings = ours.peer_settings(texts, encoder)
    batches = [texts.batch(number, questions) for number in range(2 + setting.rounds)]
    states: dict[str, list[float]] = {name: [] for name in (OURS, *PEERS)}

    def mine(number: int) -> None:
        states[OURS].append(training.step(batches[number])["env_steps"])

    def of_peer(name: str, sort: bool) -> Program:
        peer = BatchedPeer(settings, encoder.towers(), setting.device, sort=sort)

        def step(number: int) -> None:
            states[name].append(peer.step(batches[number]).transitions)

        return step

    def amount() -> float:
        """States of a batch; `env_steps` counts from the first batch on."""
        learned = np.diff([0.0, *states[OURS]])
        if not all(np.array_equal(learned, states[name]) for name in PEERS):
            raise ValueError("both sides do not learn from the same states")
        return float(learned.mean())

    yield beside(
        setting,
        f"Q-RAG, PQN step, {encoder.name}, {questions} questions",
        amount,
        "transitions/s",
        {OURS: mine} | {name: of_peer(name, sort) for name, sort in PEERS.items()},
        least=1.3,
        details={"data": texts.origin},
    )
