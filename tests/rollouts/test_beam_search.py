"""Planned episodes: greedy ones are the rollout's, beams those of an obvious search."""

from __future__ import annotations

import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape, evaluation_batches
from qrag_jax.data.sample import Sample
from qrag_jax.data.tokens import tokenise
from qrag_jax.retrieval.multi_step import Path as Way
from qrag_jax.rollouts import beam_search
from qrag_jax.rollouts.beam_search import BeamSearch
from qrag_jax.rollouts.chunks import Actor, Draws, RolloutConfig, rollout
from qrag_jax.runtime.platform import CompilationCounter
from qrag_jax.runtime.retriever_config import Search
from tests import reference
from tests.devices import mesh_of
from tests.episodes_maker import towers
from tests.rollouts.play_setup import (
    KINDS,
    QUESTION_TOKENS,
    ROLLOUT,
    ROW_TOKENS,
    STATE_TOKENS,
    block_shapes,
    loaded,
    params,
    planned,
    sample,
    towers_of,
)

GREEDY = planned()
PLAN = block_shapes(STATE_TOKENS)
# More chunks than steps, fewer, just as many; more than one size of padded columns.
SAMPLES = tuple(sample(seed, chunks) for seed, chunks in enumerate((6, 2, 9, 1, 3, 20, 12, 7, 8)))


@functools.cache
def programs(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make` as it is, but what it compiles is shared by the planners of all tests."""
    built: dict[str, Any] = {}
    return lambda mesh, *how: built.setdefault(repr(how), make(mesh, *how))


@pytest.fixture(autouse=True)
def shared_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam_search, "make_best_chunks", programs(beam_search.make_best_chunks))


def searcher(rollout: RolloutConfig, config: Search, size: int = 32, seed: int = 0) -> BeamSearch:
    return BeamSearch(mesh_of(), towers_of(seed), rollout, config, batch_size=size)


def ways(
    rollout: RolloutConfig,
    config: Search = GREEDY,
    samples: tuple[Sample, ...] = SAMPLES,
    size: int = 32,
    seed: int = 0,
) -> list[Way]:
    played = list(searcher(rollout, config, size, seed).play(samples))
    assert tuple(shown for shown, _ in played) == samples
    return [way for _, way in played]


@functools.cache
def batch_of(samples: tuple[Sample, ...]) -> EpisodeBatch:
    """With three rows that fill it up."""
    most = {"max_question_tokens": QUESTION_TOKENS, "max_chunk_tokens": ROW_TOKENS - 2}
    with tempfile.TemporaryDirectory() as folder:
        store = tokenise(samples, loaded().tokenizer, cache=Path(folder), **most)
    shape = EpisodeShape.holding([store])
    (batch,) = evaluation_batches(store, shape, len(samples) + 3, range(len(samples)))
    return batch


class Oracle:
    """Q of every action in every state, worked out one row at a time in float64."""

    def __init__(self, rollout: RolloutConfig) -> None:
        self.rollout, self._player = rollout, reference.Player(loaded().encoder, STATE_TOKENS)
        embed = self._player.embed
        once = functools.cache(lambda tower, row: embed(params(), tower, row))
        self._player.embed = lambda _, tower, row: once(tower, tuple(row))  # type: ignore[method-assign]

    def q(self, document: Sample, taken: tuple[int, ...]) -> np.ndarray:
        """`[C]`, with STOP `[C + 1]`; -inf where taken."""
        config, batch, b = self.rollout, batch_of(SAMPLES), SAMPLES.index(document)
        where = reference.chunk_positions(config.positions, taken, len(document.chunks))
        rows = [reference.chunk_row(batch, b, i, config) for i in range(len(where))]
        if config.stop_action:
            rows, where = [*rows, reference.join([[]])], [*where, 0]
        state = reference.state_row(batch, b, taken, config)
        q = self._player.twin(params(), state, rows, where).sum(-1)
        return np.where(np.isin(np.arange(len(q)), taken), -np.inf, q)

    def log_policy(self, q: np.ndarray, free: list[int], config: Search) -> dict[int, float]:
        """Of the best max(k, W) chunks and of STOP: log softmax(q / α)."""
        chunks = len(q) - self.rollout.stop_action
        best = [a for a in free if a < chunks][: max(config.beam, config.top_k_actions)]
        best += [a for a in free if a == chunks]
        total = sum(math.exp((q[a] - q.max()) / config.alpha) for a in best)
        return {a: (q[a] - q.max()) / config.alpha - math.log(total) for a in best}

    def search(self, document: Sample, config: Search) -> Way:
        """Every way on from every path is tried; of equal sets of chunks the best stays."""
        beam = [Way()]
        for step in range(self.rollout.max_steps):
            found = [way for way in beam if way.ended]
            for way in (way for way in beam if not way.ended):
                q = self.q(document, way.taken)
                free = [int(a) for a in np.argsort(-q, kind="stable") if q[a] > -np.inf]
                above = [a for a in free if q[a] > config.threshold]
                log_policy = self.log_policy(q, free, config)
                if not above:
                    found.append(dataclasses.replace(way, ended=True))
                for action in above:
                    score = float(q[action])
                    if config.beam_score == "sum":
                        score = way.score + config.gamma**step * score
                    if config.beam_score == "policy":
                        score = way.score + log_policy.get(action, -math.inf)
                    if action == len(document.chunks):
                        found.append(dataclasses.replace(way, score=score, ended=True))
                    else:
                        more = (*way.taken, action), (*way.q, float(q[action]))
                        found.append(Way(*more, score))
            found.sort(key=lambda way: -way.score)
            beam, seen = [], set()
            for way in found:
                key = frozenset(way.taken), way.ended
                if key not in seen and len(beam) < config.beam:
                    beam.append(way)
                    seen.add(key)
        return beam[0]


@functools.cache
def oracle(kind: str) -> Oracle:
    return Oracle(KINDS[kind])


def check(found: list[Way], expected: list[Way]) -> None:
    for way, other in zip(found, expected, strict=True):
        assert way.taken == other.taken
        np.testing.assert_allclose(way.q, other.q, atol=2e-5)
        np.testing.assert_allclose(way.score, other.score, atol=5e-5)


# STOP and other positions are compared with the obvious search.
GREEDY_SETTINGS = [
    {"positions": "none", "never_terminate": False, "sort_by_index": True},
    {"positions": "random_published"},
]


def rollout_of(
    config: RolloutConfig, samples: tuple[Sample, ...], seed: int
) -> list[tuple[list, list]]:
    """Chunks that the training rollout takes of each sample, greedily; their Q."""
    play, params = jax.jit(rollout, static_argnums=0), towers(loaded().encoder, seed)
    actor = Actor(loaded().encoder, PLAN, config)
    played = play(actor, (params,), batch_of(samples), Draws.greedy())
    actions, valid, q = map(np.asarray, (played.actions, played.valid, played.q))
    assert not valid[len(samples) :].any()
    rows = zip(actions[: len(samples)], valid, q, strict=False)
    return [(a[happened].tolist(), b[happened].tolist()) for a, happened, b in rows]


@pytest.mark.parametrize("fields", GREEDY_SETTINGS, ids=lambda fields: fields["positions"])
def test_a_greedy_search_is_the_rollout(fields: dict[str, Any]) -> None:
    """Documents have one fact or two, and are shorter than T, as long, or longer."""
    config = dataclasses.replace(ROLLOUT, **fields, top_k_actions=1)
    seed = 5
    one_fact = [sample(seed, chunks, facts=1) for seed, chunks in enumerate((2, 3, 6, 4, 5), 40)]
    samples = (*SAMPLES, *one_fact)
    found = ways(config, samples=samples, seed=seed)
    for way, (taken, values) in zip(found, rollout_of(config, samples, seed), strict=True):
        assert list(way.taken) == taken
        np.testing.assert_allclose(way.q, values, atol=2e-5)
    # Some episodes end before T and some do not, or the settings would not be tested.
    whole = [min(ROLLOUT.max_steps, len(document.chunks)) for document in samples]
    ended = sum(len(way.taken) < most for way, most in zip(found, whole, strict=True))
    assert ended == 0 if config.never_terminate else 0 < ended < len(samples)


COMBINED = [("absolute", 5, "last"), ("sorted", 2, "sum"), ("stop", 4, "policy")]


@pytest.mark.parametrize(("kind", "beam", "score"), COMBINED)
def test_beams_are_those_of_the_obvious_search(
    kind: str, beam: int, score: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A temperature as wide as the values apart, or the likeliest path is the greedy one.
    config = planned(beam=beam, beam_score=score, gamma=0.9, alpha=0.1, top_k_actions=6)
    expected = [oracle(kind).search(document, config) for document in SAMPLES]
    check(ways(KINDS[kind], config), expected)
    greedy = [oracle(kind).search(document, planned(beam_score=score)) for document in SAMPLES]
    assert [way.taken for way in expected] != [way.taken for way in greedy]
    if score == "policy":  # one at a time, and in parts of other sizes
        for size, at_once in ((1, beam_search.CHUNKS_AT_ONCE), (4, 32)):
            monkeypatch.setattr(beam_search, "CHUNKS_AT_ONCE", at_once)
            check(ways(KINDS[kind], config, size=size), expected)


def test_stops_before_an_action_that_is_not_worth_it() -> None:
    # Between the Q-values that occur, so that some episodes stop early and some do not.
    middle = float(np.median([q for way in ways(ROLLOUT) for q in way.q]))
    config = planned(beam=3, beam_score="sum", stop_threshold=middle - 1e-3)
    found = ways(ROLLOUT, config)
    check(found, [oracle("none").search(document, config) for document in SAMPLES])
    assert any(way.ended for way in found)
    assert all(q > config.threshold for way in found for q in way.q)
    assert any(len(way.taken) == ROLLOUT.max_steps for way in found)
    assert {way.taken for way in ways(ROLLOUT, planned(stop_threshold=math.inf))} == {()}


def test_nothing_recompiles_and_texts_are_embedded_once() -> None:
    playing = searcher(KINDS["sorted"], planned(beam=2), 2)
    list(playing.play([sample(seed, 10) for seed in range(3)]))
    counter, before = CompilationCounter(), len(playing.table)
    samples = [sample(seed, chunks) for seed, chunks in enumerate((10, 12, 16, 9), 50)]
    list(playing.play(samples))
    assert counter.count == 0
    after = len(playing.table)
    list(playing.play(samples))
    assert before < after == len(playing.table)
