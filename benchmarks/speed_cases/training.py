"""Measures the whole PQN step against PyTorch peers on the same batches and initial weights."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.measure import Timing, Work, details, forward_flops, interleave, ratio
from benchmarks.ours import Encoder, Texts, Training, chunk_row_lengths
from benchmarks.peers.batched import BatchedPeer
from benchmarks.peers.learner import StepResult
from benchmarks.peers.sequential import SequentialPeer
from benchmarks.peers.towers import Counter
from benchmarks.report import Case
from benchmarks.speed_cases.setting import Setting, peer_settings, verdict
from qrag_jax.data.episodes import EpisodeBatch

TORCH, COMPILED, SORTED = "torch", "torch, compiled", "torch, length-sorted"
SEQUENTIAL = "torch-sequential"

DESCRIPTIONS = {
    TORCH: "one padded batch for all chunks, one for the states of each step",
    COMPILED: "the same with torch.compile(dynamic=True)",
    SORTED: "chunks sorted by length, in mini-batches of 32 cut to their longest row",
    SEQUENTIAL: "one question at a time, every state embedded anew, rows padded to powers of two",
}


def step_cases(
    setting: Setting,
    texts: Texts,
    encoder: Encoder,
    questions: int,
    targets: Mapping[str, float | None],
) -> list[Case]:
    """Transitions per second, compared with each peer.

    Args:
        setting: settings of the suite.
        texts: the questions to train on.
        encoder: the encoder with its initial weights.
        questions: size of a batch.
        targets: least ratio to each peer; None: no target.
    """
    batches = [texts.batch(i, questions) for i in range(1 + setting.warmups + setting.rounds)]
    training = Training(texts, encoder)
    shares: list[float] = []
    played: list[float] = [0.0]

    def ours(number: int) -> None:
        metrics = training.step(batches[number])
        shares.append(metrics["padding_share"])
        played.append(metrics["env_steps"])

    peers = {name: _Peer(name, setting, texts, encoder) for name in targets}
    programs: dict[str, Callable[[int], None]] = {"ours": ours}
    programs |= {name: peer.program(batches) for name, peer in peers.items()}
    timings = interleave(programs, setting.rounds, setting.warmups)
    own_transitions = played[-1] / len(batches)
    reference = next(iter(peers.values()))
    own = _own_work(texts, encoder, batches, reference.results, statistics.mean(shares))
    title = f"PQN step, {encoder.name}, {questions} questions"
    common: dict[str, float | str] = {"encoder": encoder.name, "data": texts.origin}
    cases = []
    for name, peer in peers.items():
        gain = ratio(timings["ours"], timings[name]) * own_transitions / peer.transitions
        cases.append(
            Case(
                f"{title}: beside {name}",
                own_transitions / timings["ours"].median,
                "transitions/s",
                peer=peer.transitions / timings[name].median,
                ratio=gain,
                **verdict(gain, targets[name], "x"),
                details={
                    **common,
                    "peer": DESCRIPTIONS[name],
                    **details(
                        (own, timings["ours"]),
                        (peer.work(texts, encoder, batches), timings[name]),
                        setting.peaks.jax,
                    ),
                },
            )
        )
    return [*cases, *_own_cases(setting, title, own, timings["ours"])]


def _own_cases(setting: Setting, title: str, own: Work, timing: Timing) -> list[Case]:
    share = own.flops / timing.median / setting.peaks.jax
    least = setting.at_least(0.0, 0.40) if setting.gpu else None
    return [Case(f"{title}: share of matmul peak", share, "share", **verdict(share, least))]


class _Peer:
    """One peer with what it has played and computed."""

    def __init__(self, name: str, setting: Setting, texts: Texts, encoder: Encoder) -> None:
        arguments: tuple[Any, ...] = (
            peer_settings(texts, encoder),
            encoder.towers(),
            setting.device,
        )
        self.peer: BatchedPeer | SequentialPeer
        if name == SEQUENTIAL:
            self.peer = SequentialPeer(*arguments)
        else:
            self.peer = BatchedPeer(*arguments, sort=name == SORTED)
        if name == COMPILED:
            self.peer.learner.compile_towers()
        self.counter: Counter = self.peer.learner.count_tokens()
        self.results: list[StepResult] = []

    def program(self, batches: list[EpisodeBatch]) -> Callable[[int], None]:
        def step(number: int) -> None:
            self.results.append(self.peer.step(batches[number]))  # float() waits for the GPU

        return step

    @property
    def transitions(self) -> float:
        """Mean number of transitions per step."""
        return statistics.mean(result.transitions for result in self.results)

    def work(self, texts: Texts, encoder: Encoder, batches: list[EpisodeBatch]) -> Work:
        """Mean work per step."""
        steps = len(self.results)
        flops = _flops(texts, encoder, batches, self.results)
        return Work(self.counter.text / steps, self.counter.computed / steps, flops)


def _flops(
    texts: Texts, encoder: Encoder, batches: list[EpisodeBatch], results: list[StepResult]
) -> float:
    """Mean FLOPs that a step needs.

    All chunks are embedded by the online and the target towers. States and chosen chunks are
    embedded with gradients (backward = twice forward). The target towers also embed the states
    after the first.
    """
    total = 0.0
    for batch, result in zip(batches, results, strict=True):
        chunks = chunk_row_lengths(texts, encoder, batch)[batch.chunk_mask]
        total += 2 * forward_flops(encoder.sizes, chunks)
        total += 3 * forward_flops(encoder.sizes, result.state_lengths)
        total += 3 * forward_flops(encoder.sizes, result.chunk_lengths)
        total += forward_flops(encoder.sizes, result.state_lengths[result.steps > 0])
    return total / len(batches)


def _own_work(
    texts: Texts,
    encoder: Encoder,
    batches: list[EpisodeBatch],
    results: list[StepResult],
    padding_share: float,
) -> Work:
    """Our work, with the lengths of states and chosen chunks that a peer saw on these batches."""
    means = (
        statistics.mean(float(chunk_row_lengths(texts, encoder, batch).sum()) for batch in batches),
        statistics.mean(float(result.state_lengths.sum()) for result in results),
        statistics.mean(float(result.chunk_lengths.sum()) for result in results),
    )
    text = Training.text_tokens(*means)
    return Work(text, text / (1 - padding_share), _flops(texts, encoder, batches, results))
