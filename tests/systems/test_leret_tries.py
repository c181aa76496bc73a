"""The tries of LeReT: their draws, the states of the next hop, a play that is broken off."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from qrag_jax.environments.tools.episode import Look
from qrag_jax.errors import InputError
from qrag_jax.feedback.tries import StateKey
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.runtime.interrupt import Stopped
from qrag_jax.systems.leret_tries import TryMaker
from tests.systems.leret_run import (
    FIRST_SFT,
    STOP,
    Trained,
    tries_of,
    weights_of,
)

pytestmark = pytest.mark.long


def test_every_try_has_a_draw_of_its_own(trained: Trained) -> None:
    maker = trained.system.tries
    states = {StateKey(n, 1, 0): state for n, state in enumerate(maker.questions)}
    parts = maker._parts(states)
    assert [len(part) for part in parts] == [3 * 2 * 4] * 2
    assert [each.state.variant for each in parts[0][:8]] == [1] * 4 + [2] * 4
    keys = [
        tuple(start.key.tolist())
        for iteration in (1, 2)
        for hop in (1, 2)
        for part in parts
        for start in maker._starts(iteration, hop, part)
    ]
    assert len(set(keys)) == len(keys) == 2 * 2 * 48
    (other,) = maker._starts(1, 1, parts[1][5:6])
    assert tuple(other.key.tolist()) == keys[24 + 5]  # whatever else is in the part


def test_the_next_states_grow_from_tries(trained: Trained) -> None:
    system = trained.system
    found = system.tries.iteration(1, None, weights_of(trained, FIRST_SFT), STOP)
    assert [each.to_json() for each in found.tries] == [
        each.to_json() for each in tries_of(system, 1)
    ]
    assert len([at for at in found.states if at.hop == 1]) == 6
    later = [at for at in found.states if at.hop == 2]
    assert later
    by_key = {each.key: each for each in found.tries}
    for at in later:
        parent = by_key[found.grown_from[at]]
        state = found.states[at]
        assert (parent.question, parent.hop, state.hop) == (at.question, 1, 2)
        assert tuple(each.id for each in state.pool) == parent.pool
        assert [each.score for each in state.pool] == [score for _, score in parent.found]
    # Each try is what its query finds, whoever searches.
    each = next(each for each in found.tries if each.hop == 2 and each.searched)
    state = found.states[each.at]
    (searched,) = system.inputs.library.look([(state, Look(each.query, 4))])
    assert not isinstance(searched, Exception)
    assert tuple((one.id, one.score) for one in searched) == each.found  # type: ignore[union-attr]


def maker_in(trained: Trained, workdir: Path) -> TryMaker:
    return dataclasses.replace(trained.system.tries, workdir=workdir)


def player(trained: Trained, calls: list[int], stop_at: int = 0) -> Callable[..., Any]:
    """Plays by the weights of the first tries; is told to stop in call number `stop_at`."""
    system, state = trained.system, trained.states[FIRST_SFT]
    play = system.by_device(jax.device_put(state.params, system.param_shardings), STOP)

    def counted(starts: Sequence[Any]) -> list[TokenEpisode]:
        calls.append(len(starts))
        if len(calls) == stop_at:
            raise Stopped("SIGTERM")
        return play(starts)

    return counted


@pytest.mark.parametrize("stop_at", [2, 3])
def test_tries_that_were_broken_off_go_on(trained: Trained, tmp_path: Path, stop_at: int) -> None:
    maker, weights = maker_in(trained, tmp_path), weights_of(trained, FIRST_SFT)
    calls: list[int] = []
    with pytest.raises(Stopped):
        maker.iteration(1, player(trained, calls, stop_at), weights, STOP)
    found = maker.iteration(1, player(trained, calls), weights, STOP)
    assert len(calls) == 1 + 4  # parts of 3 questions; only the one that was broken off is repeated
    assert [each.to_json() for each in found.tries] == [
        each.to_json() for each in tries_of(trained.system, 1)
    ]
    kept = tmp_path / "tries" / "iteration-1" / "hop-2.jsonl"
    own = trained.system.workdir / "tries" / "iteration-1" / "hop-2.jsonl"
    assert kept.read_bytes() == own.read_bytes()


def test_other_iterations_and_weights_give_other_tries(trained: Trained, tmp_path: Path) -> None:
    maker, weights = maker_in(trained, tmp_path), weights_of(trained, FIRST_SFT)
    one = maker.iteration(1, player(trained, []), weights, STOP).tries
    two = maker.iteration(2, player(trained, []), weights, STOP).tries
    assert [each.sampled for each in one] != [each.sampled for each in two]
    with pytest.raises(InputError, match="was begun with another weights; bring that back, or del"):
        maker.iteration(1, player(trained, []), "other", STOP)


def test_tries_of_other_settings_are_refused(trained: Trained, tmp_path: Path) -> None:
    shutil.copytree(trained.system.workdir / "tries", tmp_path / "tries")
    maker, weights = maker_in(trained, tmp_path), weights_of(trained, FIRST_SFT)
    for name in ("model", "corpus", "search", "prompts"):
        other = dataclasses.replace(maker, record={**maker.record, name: "another"})
        with pytest.raises(InputError, match=f"with another {name}; bring that back, or bring"):
            other.iteration(1, None, weights, STOP)
    path = tmp_path / "tries" / "iteration-1" / "hop-1.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(InputError, match=r"hop-1.jsonl has other tries than were asked for; bring"):
        maker.iteration(1, None, weights, STOP)
    path.write_text("".join(lines[:25]))
    with pytest.raises(InputError, match="bring the file back, or begin a new --workdir"):
        maker.iteration(1, None, weights, STOP)
    path.unlink()
    with pytest.raises(InputError, match=r"hop-1.jsonl is missing; bring the file back"):
        maker.iteration(1, None, weights, STOP)
