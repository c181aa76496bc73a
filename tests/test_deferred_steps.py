"""Steps whose rewards come later: a language model is asked about the documents played."""

from __future__ import annotations

import concurrent.futures
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape, training_batches
from qrag_jax.data.lazy_samples import joined
from qrag_jax.data.redrawn import RedrawnSamples, tokenise_redrawn
from qrag_jax.data.sample import Sample
from qrag_jax.data.sources import babilong
from qrag_jax.data.sources.babilong import BabilongConfig
from qrag_jax.data.tokens import tokenise
from qrag_jax.deferred_steps import DeferredSteps
from qrag_jax.feedback.completion import EpisodeRewards
from qrag_jax.feedback.service import Asked
from qrag_jax.learners.deferred import Played
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import shard_batch
from qrag_jax.steps import Batches
from tests.rollouts import long_documents

STEPS, BATCH, TAKEN = 9, 4, 3


class Asking:
    """Writes down what is asked, and gives every episode the reward 1."""

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[Sample], Sequence[Sequence[int]]]] = []

    def begin(self, samples: Sequence[Sample], taken: Sequence[Sequence[int]]) -> Asked:
        self.asked.append((samples, taken))
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        steps = [len(chunks) for chunks in taken]
        future.set_result([EpisodeRewards((*[0.0] * (n - 1), 1.0), n) for n in steps])
        return Asked([], future)

    def wait(self, asked: Asked, stop: StopSignal) -> list[EpisodeRewards]:
        return asked.future.result()

    def counts(self) -> dict[str, float]:
        return {}


@pytest.mark.parametrize("staleness", [0, 2])
def test_texts_are_those_of_the_tokens_played(tmp_path: Path, staleness: int) -> None:
    told = babilong.documents(BabilongConfig("qa1", chunks=16, train=6), "train")
    assert isinstance(told, RedrawnSamples)
    others = [long_documents.sample(seed, 10) for seed in range(3)]
    tokenizer, mesh = long_documents.loaded().tokenizer, long_documents.one_device()
    limits: dict[str, Any] = {
        "max_question_tokens": 40,
        "max_chunk_tokens": 200,
        "cache": tmp_path,
    }
    stores = {
        "made": tokenise(others, tokenizer, **limits),
        "babilong": tokenise_redrawn(told, tokenizer, **limits),
    }
    shape = EpisodeShape.holding([*stores.values()])
    weights = {"made": 0.25, "babilong": 0.75}
    batches = training_batches(stores, weights, shape, batch_size=BATCH, seed=0)
    rng, played = np.random.default_rng(0), []

    def play(state: Any, batch: EpisodeBatch, number: Any) -> Played:
        """Chunks at random; what they say is kept."""
        actions = np.stack([rng.choice(10, TAKEN, replace=False) for _ in range(BATCH)])
        rows = np.arange(BATCH)[:, None]
        tokens = np.asarray(batch.chunks)[rows, actions]
        lengths = np.asarray(batch.chunk_lengths)[rows, actions]
        played.append(
            [
                [row[:length].tolist() for row, length in zip(*episode, strict=True)]
                for episode in zip(tokens, lengths, strict=True)
            ]
        )
        valid, entropy = np.ones(actions.shape, bool), np.zeros(actions.shape, np.float32)
        return Played(*shard_batch(mesh, (actions.astype(np.int32), valid, entropy)))

    def learn(state: Any, episodes: Any) -> tuple[Any, dict[str, Any]]:
        return state, {"loss": jax.device_put(np.float32(0))}

    asking = Asking()
    steps = DeferredSteps(
        mesh,
        play,  # type: ignore[arg-type]
        learn,  # type: ignore[arg-type]
        Batches(mesh, batches),
        joined([others, told]),
        asking,  # type: ignore[arg-type]
        staleness,
        STEPS,
    )
    steps.begin([])
    stop = types.SimpleNamespace(requested=False)
    for number in range(STEPS):
        steps.step(None, number, stop)  # type: ignore[arg-type]
    assert len(asking.asked) == len(played) == STEPS
    sources, documents = set(), set()
    for (samples, taken), said in zip(asking.asked, played, strict=True):
        for sample, chunks, tokens in zip(samples, taken, said, strict=True):
            assert tokenizer.encode([sample.chunks[i] for i in chunks]) == tokens
            sources.add(sample.source)
            documents.add((sample.id, sample.chunks))
    assert sources == {"made", "babilong"}
    assert len(documents) > 9  # several epochs
