"""Tokens computed without text in a training step, on documents of several shapes."""

from __future__ import annotations

import statistics

import numpy as np
from ml_collections import ConfigDict

from benchmarks.ours import Encoder, Texts, Training
from benchmarks.report import Case
from benchmarks.speed_cases.setting import Setting
from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.data.tokens import TokenStore

BATCHES = 5
MOST = 0.10


def padding_case(setting: Setting, texts: Texts, encoder: Encoder, questions: int) -> Case:
    """The mean of `padding_share` over a few steps; it depends on lengths, not on the encoder."""
    training = Training(texts, encoder)
    steps = [training.step(texts.batch(i, questions)) for i in range(BATCHES)]
    share = statistics.mean(metrics["padding_share"] for metrics in steps)
    return Case(
        f"padding of a PQN step, {texts.origin}",
        share,
        "share of computed tokens",
        target=None if setting.quick else f"<= {MOST}",
        holds=None if setting.quick else share <= MOST,
        details={
            "batches": f"{BATCHES} of {questions} questions",
            **{
                f"blocks of {name}": f"{blocks.tokens} tokens, rows of {blocks.lengths}"
                for name, blocks in training.plan._asdict().items()
            },
        },
    )


def many_short_sentences(config: ConfigDict, questions: int, vocabulary: int) -> Texts:
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
