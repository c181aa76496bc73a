"""LeReT put together: what each stage of a finished run learned from, and what is kept."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.feedback.pairs import PairsConfig, StateKey, StatePairs, Try, pairs_of
from qrag_jax.rollouts.token_episodes import Episode
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.systems.config import load_config
from qrag_jax.systems.leret import Leret, LessonExperience
from qrag_jax.systems.leret_config import PREFERENCE, SCRIPT, SFT
from qrag_jax.systems.leret_tries import Iteration
from tests.entry_points import COURSES, metric_lines, saved_state
from tests.systems.corpora import tree
from tests.systems.small_runs import opened

SCRIPT_STEPS, SFT_STEPS, PAIR_STEPS, STEPS = 12, 2, 2, COURSES["leret"].steps
FIRST_SFT, FIRST_PAIRS = SCRIPT_STEPS, SCRIPT_STEPS + SFT_STEPS
PERIOD = SFT_STEPS + PAIR_STEPS
STOP = StopSignal()


@pytest.fixture(scope="module")
def system(
    trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Leret]:
    """That of a run that went through all stages."""
    workdir = tmp_path_factory.mktemp("leret") / "run"
    shutil.copytree(trained("leret"), workdir)
    with opened(load_config(workdir / "config.json"), workdir) as system:
        yield system


def batch_of(system: Leret, step: int) -> Any:
    """What a step of the run learned from; its tries are there, so no weights are needed."""
    return jax.device_get(LessonExperience(system).next(None, step, STOP))


def params_at(system: Leret, step: int) -> Any:
    """The weights with which a stage began."""
    template = jax.device_get(system.first_state().params)
    params = Checkpoints(system.workdir, read_only=True).restore_params_of(step, template)
    assert params is not None
    return params


def metrics_of(system: Leret) -> list[dict[str, float]]:
    """Those of each step."""
    return [line for line in metric_lines(system.workdir) if "train/loss" in line]


def first_of(blocks: Any) -> Any:
    """The blocks of the first minibatch."""
    return jax.tree.map(lambda leaf: leaf[0], blocks)


def test_demonstrations_come_first(system: Leret) -> None:
    blocks = first_of(batch_of(system, 0).blocks)
    shown = [
        system.inputs.speech.text(blocks.target[blocks.valid & (blocks.episode == each)])
        for each in {*blocks.episode[blocks.valid].tolist()}
    ]
    assert len(shown) == 2 * system.config.script.batch_size  # hops
    assert all(query.split() for query in shown)
    losses = [line["train/loss"] for line in metrics_of(system)]
    assert losses[SCRIPT_STEPS - 1] < losses[0] - 1


def test_a_later_stage_has_moments_of_its_own(system: Leret) -> None:
    stages, metrics = system.config.plan, metrics_of(system)
    assert [each.kind for each in stages] == [SCRIPT, SFT, PREFERENCE, SFT, PREFERENCE]
    for stage in stages[1:]:
        rate = metrics[stage.first]["train/learning_rate"]
        assert rate == pytest.approx(getattr(system.config, stage.kind).learning_rate)
    last = saved_state(system.workdir, STEPS)
    counts = [int(value) for name, value in last.items() if "opt_state" in name and not value.ndim]
    assert set(counts) == {PAIR_STEPS}
    assert int(last["step"]) == STEPS


# ---------------------------------------------------------------- what tries teach


def learned(system: Leret, iteration: int) -> tuple[list[StatePairs], Iteration]:
    """The pairs and targets of all states, from the tries of an iteration."""
    found = system.tries.iteration(iteration, None, STOP)
    by_state: dict[StateKey, list[Try]] = {}
    for each in found.tries:
        by_state.setdefault(each.at, []).append(each)
    config = PairsConfig(degenerate=("[1]",))
    return [pairs_of(tries, config) for tries in by_state.values()], found


def bare(system: Leret, found: Iteration, at: StateKey) -> tuple[int, ...]:
    """The tokens that ask for a query at a state, by the prompt without a style."""
    messages = system.inputs.agent.prompt.messages(found.states[at].asked_by(0))
    return tuple(map(int, system.inputs.speech.scaffold.opening(messages)))


def rows_of(blocks: Any) -> list[tuple[int, ...]]:
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
                    rest = blocks.tokens[number, at : at + length - shared].tolist()
                    rows.append((*prompt, *rest))
                    at += length - shared
    return rows


def test_the_best_queries_are_imitated_behind_the_bare_prompt(system: Leret) -> None:
    for iteration in (1, 2):
        states, found = learned(system, iteration)
        best = {  # row → tokens of its query
            (*bare(system, found, each.at), *query): len(query)
            for each in states
            if each.target is not None
            for query in [each.queries[each.target].sampled]
        }
        first = FIRST_SFT + (iteration - 1) * PERIOD
        for number in range(first, first + SFT_STEPS):
            blocks = first_of(batch_of(system, number).blocks)
            rows = rows_of(blocks)
            assert len(rows) == system.config.sft.batch_size
            assert {*rows} <= best.keys()
            assert int(blocks.learned.sum()) == sum(best[row] for row in rows)


def test_pairs_have_the_winner_first_and_one_prompt(system: Leret) -> None:
    states, found = learned(system, 1)
    every = set()
    for each in states:
        opening = bare(system, found, each.at)
        for pair in each.pairs:
            winner, loser = each.queries[pair.winner], each.queries[pair.loser]
            assert winner.reward is not None
            assert loser.reward is not None
            assert winner.reward > loser.reward
            every.add(((*opening, *winner.sampled), (*opening, *loser.sampled)))
    for number in range(FIRST_PAIRS, FIRST_PAIRS + PAIR_STEPS):
        rows = rows_of(batch_of(system, number).blocks)
        assert len(rows) == 2 * system.config.preference.batch_size
        assert set(zip(rows[::2], rows[1::2])) <= every


def test_the_reference_is_the_log_probability_of_each_query(system: Leret) -> None:
    folder = system.workdir / "tries" / "iteration-1"
    states, found = learned(system, 1)
    kept = json.loads((folder / "reference.json").read_text())["log_probs"]
    params, expected = params_at(system, FIRST_PAIRS), []
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
    lengths = jnp.array([len(opening) + len(query) for opening, query in rows])
    logits = system.inputs.model.model.logits(params, jnp.asarray(tokens), lengths)
    scores = np.asarray(jax.nn.log_softmax(logits))
    for row, (opening, query) in zip(scores, rows, strict=True):
        places = len(opening) - 1 + np.arange(len(query))
        expected.append(row[places, list(query)].sum())
    assert len(kept) == len(expected) >= 2
    np.testing.assert_allclose(kept, expected, atol=2e-3)
    # The policy has not moved yet, so all margins are 0, and the loss is that of h = 0.
    first, beta = metrics_of(system)[FIRST_PAIRS], system.config.preference.beta
    assert first["train/margin"] == pytest.approx(0, abs=1e-3)
    assert first["train/loss"] == pytest.approx((1 / (2 * beta)) ** 2, rel=1e-3)


# ---------------------------------------------------------------- what is lost or broken off


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("hop-1.jsonl", FIRST_SFT + 1),
        ("hop-2.jsonl", FIRST_PAIRS),
        ("reference.json", FIRST_PAIRS + 1),
    ],
)
def test_lost_files_are_named(system: Leret, tmp_path: Path, name: str, number: int) -> None:
    shutil.copytree(system.workdir, tmp_path, dirs_exist_ok=True)
    experience = LessonExperience(dataclasses.replace(system, workdir=tmp_path))
    (tmp_path / "tries" / "iteration-1" / name).unlink()
    with pytest.raises(InputError, match=name):
        experience.next(None, number, STOP)


@pytest.mark.parametrize("hop", [1, 2])
def test_tries_that_were_broken_off_go_on(system: Leret, tmp_path: Path, hop: int) -> None:
    maker, calls, parts = dataclasses.replace(system.tries, workdir=tmp_path), list[int](), 8
    stop_at = 2 if hop == 1 else parts + 1
    params = jax.device_put(params_at(system, FIRST_SFT), system.param_shardings)

    def stopped(starts: Sequence[Any]) -> list[Episode]:
        calls.append(len(starts))
        if len(calls) == stop_at:
            raise Stopped("SIGTERM")
        return system.play(params, starts, STOP)

    with pytest.raises(Stopped):
        maker.iteration(1, stopped, STOP)
    with pytest.raises(InputError, match=r"hop-\d\.jsonl"):  # without weights
        maker.iteration(1, None, STOP)
    maker.iteration(1, stopped, STOP)
    assert len(calls) == 1 + 2 * parts  # only the one that was broken off is repeated
    played, whole = tree(tmp_path / "tries"), tree(system.workdir / "tries")
    for name in ("iteration-1/hop-1.jsonl", "iteration-1/hop-2.jsonl"):
        assert played[name] == whole[name]
