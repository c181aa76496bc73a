"""What is learned from next: batches, late rewards, batches in flight, and where a run goes on."""

from __future__ import annotations

import concurrent.futures
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape, training_batches
from qrag_jax.data.long_docs import BabilongConfig, RedrawnSamples, babilong_documents
from qrag_jax.data.sample import Sample, joined
from qrag_jax.data.tokens import tokenise
from qrag_jax.feedback.rewards import Asked, EpisodeRewards
from qrag_jax.policies.plackett_luce import PlackettLuceConfig
from qrag_jax.retrieval.protocol import NONE
from qrag_jax.rollouts import pool_search
from qrag_jax.rollouts.experience import (
    AgentExperience,
    Batches,
    Deferred,
    Played,
    Playing,
    ScoredEpisodes,
    questions_at,
)
from qrag_jax.rollouts.pool_search import Drawn, HopShape, Rewarded
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.runtime.mesh import shard_batch
from tests.devices import mesh_of
from tests.rollouts import play_setup

BATCH = 4


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


def test_texts_are_those_of_the_tokens_played(tmp_path: Path) -> None:
    steps, staleness = 9, 2
    redrawn = babilong_documents(BabilongConfig("qa1", chunks=16, train=6), "train").samples
    assert isinstance(redrawn, RedrawnSamples)
    others = [play_setup.sample(seed, 10) for seed in range(3)]
    tokenizer, mesh = play_setup.loaded().tokenizer, mesh_of()
    limits: dict[str, Any] = {"max_question_tokens": 40, "max_chunk_tokens": 200, "cache": tmp_path}
    stores = {
        "made": tokenise(others, tokenizer, **limits),
        "babilong": tokenise(redrawn, tokenizer, **limits),
    }
    shape = EpisodeShape.holding([*stores.values()])
    weights = {"made": 0.25, "babilong": 0.75}
    batches = training_batches(stores, weights, shape, batch_size=BATCH, seed=0)
    rng, played = np.random.default_rng(0), []

    def play(state: Any, batch: EpisodeBatch, number: Any) -> Played:
        """Chunks at random; what they say is kept."""
        actions = np.stack([rng.choice(10, 3, replace=False) for _ in range(BATCH)])
        rows = np.arange(BATCH)[:, None]
        both = batch.chunks, batch.chunk_lengths
        tokens, lengths = (np.asarray(of)[rows, actions] for of in both)
        played.append([[t[:n].tolist() for t, n in zip(*row)] for row in zip(tokens, lengths)])
        valid, entropy = np.ones(actions.shape, bool), np.zeros(actions.shape, np.float32)
        return Played(*shard_batch(mesh, (actions.astype(np.int32), valid, entropy)))

    notes = Notes()
    samples, of_run = joined([others, redrawn]), {"staleness": staleness, "steps": steps}
    experience = Deferred(mesh, play, Batches(mesh, batches), notes, samples, **of_run)  # type: ignore[arg-type]
    for number in range(steps):
        assert isinstance(experience.next(None, number, StopSignal()), ScoredEpisodes)
        experience.prepare(None)
        assert len(notes.asked) == len(played)  # before the update is over
    assert len(played) == steps
    documents = set()
    for (samples, taken), said in zip(notes.asked, played, strict=True):
        for sample, chunks, tokens in zip(samples, taken, said, strict=True):
            assert tokenizer.encode([sample.chunks[i] for i in chunks]) == tokens
            documents.add((sample.source, sample.id, sample.chunks))
    assert {source for source, *_ in documents} == {"made", "babilong"}
    assert len(documents) > 9  # several epochs


# ---------------------------------------------------------------- agents


def test_each_question_comes_once_an_epoch_and_hosts_share_a_batch() -> None:
    drawn = [questions_at(step, 10, 4, 3) for step in range(5)]
    numbers, epochs = np.concatenate(drawn).T
    numbers = numbers.tolist()
    assert sorted(numbers[:10]) == sorted(numbers[10:]) == [*range(10)]
    assert numbers[:10] != numbers[10:] != [*range(10)]
    np.testing.assert_array_equal(epochs, [0] * 10 + [1] * 10)
    first = range(9, -1, -1)  # the order of the first epoch
    numbers = [n for step in range(5) for n, _ in questions_at(step, 10, 4, 3, first=first)]
    assert numbers[:10] == [*range(9, -1, -1)] != numbers[10:]
    shards = (0, 1), (0, 3), (1, 3), (2, 3)
    for step in range(3):
        whole, *parts = (questions_at(step, 9, 6, 0, shard) for shard in shards)
        np.testing.assert_array_equal(np.concatenate(parts), whole)


K, HOPS, WIDTH = 4, 2, 3
CONFIG = PlackettLuceConfig(pool=K, passages=2, tau=0.1)
SHAPE = HopShape(HOPS, tokens=5, width=WIDTH, episode_rewards=1, hop_rewards=1)
ORDER = partial(questions_at, questions=10, batch=4, seed=0)
VECTORS = np.random.default_rng(0).normal(size=(20, WIDTH)).astype(np.float32)


class Player:
    """Plays by drawing at random, seeded by the step, and writes down what it was asked to play.

    The reward tells which parameters acted.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.asked: list[tuple[float, list[int], int]] = []
        self._delay = delay

    def __call__(
        self, params: Any, numbers: Sequence[int], number: int, stop: StopSignal
    ) -> list[Rewarded]:
        time.sleep(self._delay)
        stop.check()
        self.asked.append((params, list(numbers), number))
        rng = np.random.default_rng(number)
        return [self._episode(rng, params) for _ in range(8)]

    def _episode(self, rng: np.random.Generator, params: float) -> Rewarded:
        pool = np.append(rng.choice(20, K - 1, replace=False), NONE)
        vectors = np.append(VECTORS[pool[:-1]], np.zeros((1, WIDTH), np.float32), axis=0)
        row = rng.integers(0, 9, 4).astype(np.int32)
        log_prob = float(np.float32(rng.normal()))
        actions = np.array([2, 0], np.int32)
        search = Drawn(row, pool, vectors, actions, log_prob)
        if rng.random() < 0.3:
            return Rewarded([search], None)
        return Rewarded([search, search], [params], [[0.25], [float(np.float32(rng.random()))]])


def experience(
    play: Player, staleness: int = 0, batches: int = 0, pending: Sequence[Any] = ()
) -> AgentExperience:
    playing = Playing(
        play=play,
        batch=lambda episodes, number: pool_search.hop_batch(episodes, SHAPE, CONFIG),
        save=pool_search.saved,
        restore=lambda kept: pool_search.restored(kept, lambda numbers: VECTORS[numbers]),
        params=float,
        staleness=staleness,
        steps=6,
    )
    return AgentExperience(ORDER, playing, dict, batches, pending=pending)


def taken(played: AgentExperience, steps: Sequence[int]) -> list[Any]:
    """The batches and the samples of these steps; the state is the number of updates."""
    found = []
    for step in steps:
        arrays = jax.tree.map(np.asarray, played.next(step, step, StopSignal()))
        found.append((*arrays, played.samples))
    return found


def assert_same(some: list[Any], others: list[Any]) -> None:
    for one, other in zip(some, others, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("staleness", "delay"), [(0, 0.0), (2, 0.01)])
def test_which_weights_play_which_questions(staleness: int, delay: float) -> None:
    play = Player(delay)
    batches = taken(experience(play, staleness), range(6))
    versions = [max(step - staleness, 0) for step in range(6)]
    numbers = [ORDER(step)[:, 0].tolist() for step in range(6)]
    assert play.asked == [*zip(versions, numbers, range(6), strict=True)]
    for step, (*arrays, samples) in enumerate(batches):
        np.testing.assert_array_equal(samples, ORDER(step))
        batch = pool_search.HopBatch(*arrays)
        assert (batch.episode_rewards[batch.scored] == versions[step]).all()


def test_batches_in_flight_are_kept_bit_for_bit_or_played_again_where_stopped() -> None:
    whole = taken(experience(Player(), 2), range(6))
    first = experience(Player(0.02), 2)
    assert_same(taken(first, range(3)), whole[:3])
    batches, pending = json.loads(json.dumps(first.position()))
    assert (batches, len(pending)) == (3, 2)
    play = Player()
    again = experience(play, 2, batches, pending)
    assert_same(taken(again, range(3, 6)), whole[3:])
    assert [number for _, _, number in play.asked] == [5]
    stop = StopSignal()
    stopped = experience(Player(0.05), 1)
    stopped.next(0, 0, stop)
    stop.requested = True
    with pytest.raises(Stopped):
        stopped.next(1, 1, stop)
    assert stopped.position() == (1, [])  # that of step 1 was in flight
    samples = [batch[-1] for batch in taken(experience(Player(), 1, 1), range(1, 6))]
    assert_same([samples], [[batch[-1] for batch in whole[1:]]])
