"""What LeReT learns from its tries: best queries, pairs, a reference; and where it stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.feedback.pairs import PairsConfig, StateKey, Try, pairs_of
from qrag_jax.systems.leret import Leret
from qrag_jax.systems.leret_tries import Iteration
from tests.systems.leret_run import (
    FIRST_PAIRS,
    FIRST_SFT,
    PAIR_STEPS,
    PERIOD,
    SFT_STEPS,
    STOP,
    Trained,
    again,
)


def learned(leret_trained: Trained, iteration: int) -> tuple[list[Any], Iteration]:
    """The pairs and targets of all states, made anew."""
    system = leret_trained.system
    found = system.tries.iteration(iteration, None, STOP)
    by_state: dict[StateKey, list[Try]] = {}
    for each in found.tries:
        by_state.setdefault(each.at, []).append(each)
    config = PairsConfig(degenerate=("[1]",))
    return [pairs_of(own, config) for own in by_state.values()], found


def bare(system: Leret, found: Iteration, at: StateKey) -> np.ndarray:
    messages = system.inputs.agent.prompt.messages(found.states[at].asked_by(0))
    return system.inputs.speech.scaffold.opening(messages)


def first_of(blocks: Any) -> Any:
    """The blocks of the first minibatch."""
    return jax.tree.map(lambda leaf: leaf[0], blocks)


def rows_of(blocks: Any) -> list[list[int]]:
    """The tokens of the rows of all blocks, shared ones included."""
    rows = []
    members = blocks.lengths.shape[1] // blocks.shared.shape[1]
    for number in range(len(blocks.tokens)):
        at = 0
        for group, shared in enumerate(blocks.shared[number]):
            prompt = blocks.tokens[number, at : at + shared].tolist()
            at += shared
            for length in blocks.lengths[number, group * members : (group + 1) * members]:
                if length:
                    own = blocks.tokens[number, at : at + length - shared].tolist()
                    rows.append(prompt + own)
                    at += length - shared
    return rows


@pytest.mark.parametrize("iteration", [1, 2])
def test_the_best_queries_are_imitated_behind_the_bare_prompt(
    leret_trained: Trained, iteration: int
) -> None:
    states, found = learned(leret_trained, iteration)
    best = [
        [*bare(leret_trained.system, found, each.at), *each.queries[each.target].sampled]
        for each in states
        if each.target is not None
    ]
    assert best
    first = FIRST_SFT + (iteration - 1) * PERIOD
    shown = [
        row
        for n in range(SFT_STEPS)
        for row in rows_of(first_of(leret_trained.batches[first + n].blocks))
    ]
    assert len(shown) == 4 * SFT_STEPS
    assert all(row in best for row in shown)
    ids = first_of(leret_trained.batches[first].blocks)
    assert int(ids.learned.sum()) == sum(
        len(row) - _prompt_length(row, best, leret_trained, states, found) for row in rows_of(ids)
    )


def _prompt_length(row: Any, best: Any, leret_trained: Trained, states: Any, found: Any) -> int:
    place = best.index(row)
    at = [each.at for each in states if each.target is not None][place]
    return len(bare(leret_trained.system, found, at))


def test_pairs_have_the_winner_first_and_one_prompt(leret_trained: Trained) -> None:
    states, found = learned(leret_trained, 1)
    every = {
        (
            (*opening, *each.queries[pair.winner].sampled),
            (*opening, *each.queries[pair.loser].sampled),
        )
        for each in states
        if each.pairs
        for opening in [bare(leret_trained.system, found, each.at)]
        for pair in each.pairs
    }
    rewards = {each.at: each for each in states}
    assert all(
        each.queries[pair.winner].reward > each.queries[pair.loser].reward
        for each in rewards.values()
        for pair in each.pairs
    )
    for number in range(FIRST_PAIRS, FIRST_PAIRS + PAIR_STEPS):
        rows = [tuple(row) for row in rows_of(leret_trained.batches[number].blocks)]
        assert len(rows) == 2 * 4
        assert set(zip(rows[::2], rows[1::2])) <= every


def test_the_reference_is_the_log_probability_of_each_query(leret_trained: Trained) -> None:
    system, folder = leret_trained.system, leret_trained.system.workdir / "tries" / "iteration-1"
    states, found = learned(leret_trained, 1)
    kept = json.loads((folder / "reference.json").read_text())["log_probs"]
    params, expected = leret_trained.states[FIRST_PAIRS].params, []
    trunk = system.inputs.model.model
    rows = [
        (bare(system, found, each.at), each.queries[place].sampled)
        for each in states
        for pair in each.pairs
        for place in pair[:2]
    ]
    width = max(len(opening) + len(query) for opening, query in rows)
    tokens = np.zeros((len(rows), width), np.int32)
    for row, (opening, query) in zip(tokens, rows, strict=True):
        row[: len(opening) + len(query)] = [*opening, *query]
    lengths = np.array([len(opening) + len(query) for opening, query in rows], np.int32)
    logits = np.asarray(trunk.logits(params, jnp.asarray(tokens), jnp.asarray(lengths)))
    for row, (opening, query) in zip(logits, rows, strict=True):
        wanted = row[len(opening) - 1 : len(opening) + len(query) - 1].astype(np.float64)
        wanted -= np.log(np.exp(wanted).sum(axis=1, keepdims=True))
        expected.append(wanted[np.arange(len(query)), list(query)].sum())
    assert len(kept) == len(expected) >= 2
    np.testing.assert_allclose(kept, expected, atol=2e-3)
    # The policy has not moved yet, so all margins are 0, and the loss is that of h = 0.
    assert leret_trained.metrics[FIRST_PAIRS]["margin"] == pytest.approx(0, abs=1e-3)
    beta = system.config.preference.beta
    assert leret_trained.metrics[FIRST_PAIRS]["loss"] == pytest.approx(
        (1 / (2 * beta)) ** 2, rel=1e-3
    )


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("hop-1.jsonl", FIRST_SFT + 1),
        ("hop-2.jsonl", FIRST_PAIRS),
        ("reference.json", FIRST_PAIRS + 1),
    ],
)
def test_lost_files_are_named(
    leret_trained: Trained, tmp_path: Path, name: str, number: int
) -> None:
    _, experience = again(leret_trained, tmp_path)
    (tmp_path / "tries" / "iteration-1" / name).unlink()
    with pytest.raises(InputError, match=name):
        experience.next(leret_trained.states[number], number, STOP)
