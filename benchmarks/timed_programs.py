"""Programs that are both run and estimated: the encoder's forward pass, PQN steps, evaluation.

Weights are random: they change no time.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.speed import ours
from benchmarks.speed.measure import forward_flops
from configs import hotpotqa
from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.environments import chunks
from qrag_jax.models.compute.ragged import TokenRows, embed_rows
from qrag_jax.models.heads.embedding import Params
from qrag_jax.rollouts.block_rounds import (
    RowLengths,
    draw_lengths,
    loop_rounds,
    rounds_of,
    widths_of,
)
from qrag_jax.rollouts.chunks import Actor
from qrag_jax.runtime import step_time
from qrag_jax.runtime.device_speeds import Speeds
from qrag_jax.runtime.mesh import shard_batch
from qrag_jax.runtime.minilm import find_minilm

ROUNDS = 5  # measured, after one that warms up
FULL_ROW = 128


@dataclasses.dataclass(frozen=True)
class Timed:
    """One program's measured and estimated time.

    Attributes:
        name: what it is.
        seconds: of each measured call.
        estimate: of one call's program.
        calls: programs run in a measured call.
        amount: what a measured call gets done.
        unit: of `amount`, in a second.
        needed: FLOPs that a device needs for a measured call, without padding and without what is
            computed twice.
    """

    name: str
    seconds: list[float]
    estimate: step_time.Estimate
    calls: int
    amount: float
    unit: str
    needed: float

    @property
    def median(self) -> float:
        """Measured seconds of a call."""
        return statistics.median(self.seconds)

    @property
    def expected(self) -> float:
        """Estimated seconds of a call."""
        return self.calls * self.estimate.seconds

    @property
    def share_of_peak(self) -> float:
        """The share of the peak that was reached, by the FLOPs that the task needs."""
        peak = self.estimate.speeds.peak(self.estimate.main_type)
        return self.needed / self.median / peak


@dataclasses.dataclass(frozen=True)
class Bench:
    """What all programs of one encoder share."""

    texts: ours.Texts
    encoder: ours.Encoder
    speeds: Speeds

    def forward(self, questions: int, *, full: bool) -> Timed:
        """The forward pass over the chunks of some questions, in blocks by length.

        Args:
            questions: their number; a question has some ten chunks.
            full: ten full rows of `FULL_ROW` tokens for each question instead, in one call.
        """
        if full:
            rng = np.random.default_rng(0)
            tokens = rng.integers(1000, 8000, (10 * questions, FULL_ROW), np.int32)
            lengths = np.full(len(tokens), FULL_ROW, np.int32)
        else:
            tokens, lengths = chunk_rows(self.texts, self.encoder, questions)
        embed = Embedder(self.texts, self.encoder, full=full)
        arguments = embed.params, jax.device_put(tokens), jax.device_put(lengths)
        compiled = embed.program.lower(*arguments).compile()
        loops = {} if full else {tokens.shape: rounds_of(embed.blocks, lengths[None])}
        kind = "full rows" if full else "chunks by length"
        return Timed(
            name=f"encoder forward, {self.encoder.name}, {len(tokens)} {kind}",
            seconds=seconds_of(lambda _: jax.block_until_ready(compiled(*arguments))),
            estimate=self._estimate(compiled, loops),
            calls=1,
            amount=float(lengths.sum()),
            unit="tokens/s",
            needed=forward_flops(self.encoder.sizes, lengths),
        )

    def step(self, questions: int) -> Timed:
        """The PQN step; its loops are expected to run as on batches drawn from the same data."""
        training = ours.Training(self.texts, self.encoder)
        mesh = training.mesh
        batches = [
            shard_batch(mesh, self.texts.batch(number, questions)) for number in range(ROUNDS + 1)
        ]
        program: Any = training.program
        compiled = program.lower(training.state, batches[0]).compile()
        lengths, loops = self._rows(training.block_shapes, questions // mesh.size)
        played: list[float] = []

        def step(number: int) -> None:
            training.state, metrics = compiled(training.state, batches[number])
            played.append(float(metrics["env_steps"]))  # so far; this waits for the step

        seconds = seconds_of(step)
        return Timed(
            name=f"PQN step, {self.encoder.name}, {questions} questions",
            seconds=seconds,
            estimate=self._estimate(compiled, loops),
            calls=1,
            amount=(played[-1] - played[0]) / ROUNDS,
            unit="transitions/s",
            needed=step_flops(self.encoder, lengths),
        )

    def evaluation(self, questions: int, batch_size: int) -> Timed:
        """Greedy episodes as evaluate.py plays them; the host's work is measured, not estimated."""
        player = ours.Player(self.texts, self.encoder)
        batch = shard_batch(player.mesh, self.texts.batch(0, batch_size))
        play: Any = player.play
        compiled = play.lower(player.params, batch).compile()
        lengths, loops = self._rows(player.block_shapes, batch_size // player.mesh.size)
        calls = -(-questions // batch_size)
        return Timed(
            name=f"evaluation, {self.encoder.name}, {questions} questions by {batch_size}",
            seconds=seconds_of(lambda _: player.rows(range(questions), batch_size)),
            estimate=self._estimate(compiled, loops),
            calls=calls,
            amount=float(questions),
            unit="questions/s",
            needed=calls * play_flops(self.encoder, lengths),
        )

    def _rows(
        self, block_shapes: ours.BlockShapes, questions: int
    ) -> tuple[RowLengths, dict[tuple[int, int], step_time.Rounds]]:
        texts = self.texts
        actor = Actor(self.encoder.encoder, block_shapes, texts.config.rollout)
        lengths = draw_lengths(actor, texts.shape, [texts.store], questions)
        return lengths, loop_rounds(block_shapes, widths_of(actor, texts.shape), lengths)

    def _estimate(
        self, compiled: Any, loops: dict[tuple[int, int], step_time.Rounds]
    ) -> step_time.Estimate:
        assumed = step_time.Assumptions(loops)
        return step_time.estimate(compiled.as_text(), self.speeds, assumed)


def seconds_of(call: Callable[[int], object]) -> list[float]:
    """Seconds of `ROUNDS` calls after one that warms up; a call gets its number."""
    seconds = []
    for number in range(ROUNDS + 1):
        start = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def step_flops(encoder: ours.Encoder, lengths: RowLengths) -> float:
    """FLOPs that a device's part of a PQN step needs, from rows of several batches.

    Online and target towers embed all chunks and the states, the target towers not the first ones.
    States and chosen chunks are embedded with gradients, which cost twice a forward pass.
    """
    later = lengths.states[:, 1:]
    counted = (lengths.chunks, 2), (lengths.states, 3), (lengths.chosen, 3), (later, 1)
    return _mean_flops(encoder, counted)


def play_flops(encoder: ours.Encoder, lengths: RowLengths) -> float:
    """FLOPs that greedy episodes need: every chunk and every state once."""
    return _mean_flops(encoder, ((lengths.chunks, 1), (lengths.states, 1)))


def _mean_flops(encoder: ours.Encoder, counted: tuple[tuple[np.ndarray, int], ...]) -> float:
    batches = len(counted[0][0])
    return sum(
        times * forward_flops(encoder.sizes, rows.ravel()) / batches for rows, times in counted
    )


def read_texts(folder: Path, questions: int) -> tuple[ours.Texts, TextTokenizer]:
    """HotpotQA's questions, or invented ones, as token ids; and their tokenizer."""
    config, samples, origin = ours.read_texts(
        hotpotqa.get_config("minilm"), "hotpotqa", questions, folder
    )
    tokenizer = ours.load_tokenizer(find_minilm(download=False), samples, folder / "tokenizer")
    return ours.load_texts(config, samples, origin, tokenizer), tokenizer


class Embedder:
    """Embeds chunk rows as the rollout does; `full`: in one call, for rows without padding."""

    def __init__(self, texts: ours.Texts, encoder: ours.Encoder, *, full: bool = False) -> None:
        self.blocks = ours.block_shapes(texts, encoder).chunks
        self.params = jax.device_put(encoder.params)

        def ragged(params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
            return embed_rows(encoder.encoder, self.blocks, params, TokenRows(tokens, lengths))[0]

        self.program = jax.jit(encoder.encoder.embed if full else ragged)

    def __call__(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """tokens `[N, L]`, lengths `[N]` → `[N, D]`; waits for the result."""
        return self.program(self.params, tokens, lengths).block_until_ready()


def chunk_rows(
    texts: ours.Texts, encoder: ours.Encoder, questions: int
) -> tuple[np.ndarray, np.ndarray]:
    """Every chunk of the first questions as an encoder row: tokens `[N, L]`, lengths `[N]`."""
    e = encoder.encoder
    tokens, lengths = chunks.chunk_rows(
        jax.tree.map(jnp.asarray, texts.batch(0, questions)),
        chunks.RowForm(e.chunk_opening, e.sep_id, e.pad_id),
        row_tokens=texts.config.data.max_chunk_tokens,
    )
    present = np.asarray(lengths) > 0
    return np.asarray(tokens)[present], np.asarray(lengths)[present]
