"""Measures greedy episodes over many questions against one episode at a time in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.measure import Work, details, forward_flops, interleave, ratio
from benchmarks.ours import Encoder, Player, Texts, chunk_row_lengths, computed_tokens
from benchmarks.peers.sequential import SequentialPeer
from benchmarks.report import Case
from benchmarks.speed_cases.setting import Setting, peer_settings, verdict
from benchmarks.speed_cases.training import DESCRIPTIONS, SEQUENTIAL
from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.metrics.retrieval_log import Row


def evaluation_case(
    setting: Setting, texts: Texts, encoder: Encoder, questions: int, batch_size: int
) -> Case:
    """Episodes per second of the evaluation that a user runs, log rows included."""
    player = Player(texts, encoder)
    peer = SequentialPeer(peer_settings(texts, encoder), encoder.towers(), setting.device)
    batch = texts.batch(0, questions)
    rows: list[Row] = []
    taken: list[list[int]] = []

    def ours(_: int) -> None:
        rows[:] = player.rows(range(questions), batch_size)

    def theirs(_: int) -> None:
        actions, valid = peer.play(batch)
        taken[:] = [row[mask].tolist() for row, mask in zip(actions, valid, strict=True)]

    timings = interleave({"ours": ours, SEQUENTIAL: theirs}, setting.rounds, setting.warmups)
    counter = peer.learner.count_tokens()
    peer.play(batch)
    same = np.mean([row.pred_idx == other for row, other in zip(rows, taken, strict=True)])
    chunks = chunk_row_lengths(texts, encoder, batch)
    states = state_row_lengths(texts, encoder, batch, [row.pred_idx for row in rows])
    flops = forward_flops(encoder.sizes, np.concatenate([chunks[chunks > 0], states[states > 0]]))
    computed = sum(
        computed_tokens(player.block_shapes.chunks, chunks[i : i + batch_size].ravel())
        + sum(
            computed_tokens(player.block_shapes.states, column)
            for column in states[i : i + batch_size].T
        )
        for i in range(0, questions, batch_size)
    )
    own = Work(float(chunks.sum() + states.sum()), computed, flops)
    other = Work(counter.text, counter.computed, flops)
    gain = ratio(timings["ours"], timings[SEQUENTIAL])
    return Case(
        f"evaluation, {encoder.name}, {questions} questions: beside {SEQUENTIAL}",
        questions / timings["ours"].median,
        "episodes/s",
        peer=questions / timings[SEQUENTIAL].median,
        ratio=gain,
        **verdict(gain, setting.at_least(3.0, 20.0), "x"),
        details={
            "encoder": encoder.name,
            "data": f"{texts.origin}, {batch_size} played at once",
            "peer": DESCRIPTIONS[SEQUENTIAL],
            **details((own, timings["ours"]), (other, timings[SEQUENTIAL]), setting.peaks.jax),
            "share of episodes with the same chunks": float(same),
        },
    )


def state_row_lengths(
    texts: Texts, encoder: Encoder, batch: EpisodeBatch, taken: Sequence[Sequence[int]]
) -> np.ndarray:
    """Tokens of every state acted in, `[B, T]`, given the chunks taken; 0 if there is none."""
    config, special = texts.config, len(encoder.encoder.state_opening) + 1
    states = np.zeros((len(taken), config.env.max_steps), np.int32)
    for i, chunks in enumerate(taken):
        length = special + int(batch.question_length[i])
        for t, chunk in enumerate(chunks):
            states[i, t] = length
            kept = min(int(batch.chunk_lengths[i, chunk]), config.data.max_chunk_tokens_in_state)
            length += 1 + kept
    return states
