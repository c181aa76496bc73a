"""Measures the padding that a training step computes, on documents of several shapes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.ours import Encoder, Texts, Training
from benchmarks.report import Case
from benchmarks.speed_cases.attention_padding import Shares, count_places, shares
from benchmarks.speed_cases.setting import Setting
from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape
from qrag_jax.data.tokens import TokenStore
from qrag_jax.models.compute.ragged import BlockShapes
from qrag_jax.systems.q_rag_config import QRagConfig

BATCHES = 5
MOST = 0.10


def padding_cases(setting: Setting, texts: Texts, encoder: Encoder, questions: int) -> list[Case]:
    """One case for the padding of linear maps, and one for that of attention's rows.

    The first is the mean of `padding_share` over a few steps; it depends on lengths, not on the
    encoder. The second shows what attention's padded rows add, in places and in FLOPs.
    """
    training = Training(texts, encoder)
    batches = [texts.batch(i, questions) for i in range(BATCHES)]
    share = statistics.mean(training.step(batch)["padding_share"] for batch in batches)
    linear = Case(
        f"padding of a PQN step, linear maps, {texts.origin}",
        share,
        "share of computed tokens",
        target=None if setting.quick else f"<= {MOST}",
        holds=None if setting.quick else share <= MOST,
        details={
            "batches": f"{BATCHES} of {questions} questions",
            **{
                f"blocks of {name}": f"{blocks.tokens} tokens, rows of {blocks.lengths}"
                for name, blocks in training.block_shapes._asdict().items()
            },
        },
    )
    return [linear, attention_case(training.block_shapes, encoder, texts, batches)]


def attention_case(
    block_shapes: BlockShapes, encoder: Encoder, texts: Texts, batches: Sequence[EpisodeBatch]
) -> Case:
    """The share of the places of attention's rows that hold no text."""
    counted = [shares(count_places(block_shapes, encoder, texts, batch)) for batch in batches]
    mean = {name: statistics.mean(getattr(one, name) for one in counted) for name in Shares._fields}
    return Case(
        f"padding of a PQN step, attention's rows, {texts.origin}",
        mean["attention"],
        "share of their places",
        details={
            "linear maps, counted alike": mean["linear"],
            "attention's share of the FLOPs computed, MiniLM's widths": mean["attention_flops"],
            "share of all FLOPs computed that text does not need": mean["padding_flops"],
        },
    )


def many_short_sentences(config: QRagConfig, questions: int, vocabulary: int) -> Texts:
    """Documents of 100 chunks of 5 to 25 random tokens each."""
    rng = np.random.default_rng(0)
    chunks = 100
    sizes = rng.integers(5, 26, (questions, 1 + chunks))
    starts = np.cumsum([0, *sizes.ravel()])
    store = TokenStore(
        tokens=rng.integers(1000, vocabulary, starts[-1]).astype(np.int32),
        text_starts=starts.astype(np.int64),
        sample_starts=np.arange(questions + 1, dtype=np.int64) * (1 + chunks),
        support=np.tile(np.array([3, 60], np.int32), questions),
        support_starts=np.arange(questions + 1, dtype=np.int64) * 2,
        truncated_questions=0,
        truncated_chunks=0,
    )
    origin = f"documents of {chunks} short sentences, {questions} questions"
    return Texts(config, [], store, EpisodeShape.holding([store]), origin)
