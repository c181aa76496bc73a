"""What is learned from next: batches, what the host plays of them, rewards that come later."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape, training_batches
from qrag_jax.data.lazy_samples import joined
from qrag_jax.data.redrawn import RedrawnSamples, tokenise_redrawn
from qrag_jax.data.sample import Sample
from qrag_jax.data.sources import babilong
from qrag_jax.data.sources.babilong import BabilongConfig
from qrag_jax.data.tokens import tokenise
from qrag_jax.feedback.completion import EpisodeRewards
from qrag_jax.feedback.service import Asked
from qrag_jax.rollouts.experience import (
    Asking,
    Batches,
    Deferred,
    Fused,
    Played,
    ScoredEpisodes,
)
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.runtime.mesh import shard_batch
from tests.devices import mesh_of
from tests.episodes_maker import random_store
from tests.rollouts import long_documents

STEPS, BATCH, TAKEN = 9, 4, 3


class Notes:
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
    tokenizer, mesh = long_documents.loaded().tokenizer, mesh_of()
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

    notes = Notes()
    asking = Asking(notes, joined([others, told]), staleness, STEPS)  # type: ignore[arg-type]
    experience = Deferred(mesh, play, Batches(mesh, batches), asking)
    for number in range(STEPS):
        assert isinstance(experience.next(None, number, StopSignal()), ScoredEpisodes)
        experience.prepare(None)
        assert len(notes.asked) == len(played)  # before the update is over
    assert len(notes.asked) == len(played) == STEPS
    sources, documents = set(), set()
    for (samples, taken), said in zip(notes.asked, played, strict=True):
        for sample, chunks, tokens in zip(samples, taken, said, strict=True):
            assert tokenizer.encode([sample.chunks[i] for i in chunks]) == tokens
            sources.add(sample.source)
            documents.add((sample.id, sample.chunks))
    assert sources == {"made", "babilong"}
    assert len(documents) > 9  # several epochs


def small_batches(position: Any = None) -> Any:
    """An iterator, the same at every call, from there on."""
    stores = {"made": random_store(0, 7)}
    shape = EpisodeShape.holding([*stores.values()])
    batches = training_batches(stores, {"made": 1.0}, shape, batch_size=BATCH, seed=1)
    if position is not None:
        batches.set_state(position)
    return batches


def on_mesh(position: Any = None) -> Batches:
    return Batches(mesh_of(), small_batches(position))


class Computing:
    """An array of a state that the device still computes."""

    def is_ready(self) -> bool:
        return False


def requested() -> StopSignal:
    stop = StopSignal()
    stop.requested, stop.name = True, "SIGTERM"
    return stop


def assert_equal(found: EpisodeBatch, expected: EpisodeBatch) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_fused_gives_one_batch_after_the_other() -> None:
    experience, expected = Fused(on_mesh()), small_batches()
    for number in range(3):
        batch = next(expected)
        assert_equal(experience.next(Computing(), number, StopSignal()), batch)
        assert experience.samples.tolist() == [*map(list, zip(batch.sample, batch.epoch))]
        assert experience.position() == (expected.get_state(), [])
        if number == 1:  # fetched ahead it is not used yet
            experience.prepare(Computing())
            assert experience.position() == (expected.get_state(), [])
    assert experience.waited == {"input": 0.0}  # the device had work
    with pytest.raises(Stopped, match="SIGTERM"):
        experience.next(None, 3, requested())
    # A run that goes on from there has the batch that was not given.
    resumed, batch = Fused(on_mesh(experience.position()[0])), next(expected)
    assert_equal(resumed.next(None, 3, StopSignal()), batch)
    assert_equal(experience.next(None, 3, StopSignal()), batch)
    assert experience.waited["input"] > 0


def test_fused_knows_no_pending_episodes() -> None:
    with pytest.raises(ValueError, match="episodes of a run with another reward are pending"):
        Fused(on_mesh(), [{"actions": []}])
