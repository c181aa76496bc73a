"""What guards do to a training: counts, steps back, and an end that can be resumed from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qrag_jax.feedback.rewrite_guards import GuardsConfig
from qrag_jax.rollouts.agent_experience import Playing, QuestionOrder
from qrag_jax.runtime.interrupt import EndedEarly, StopSignal
from qrag_jax.systems.deepretrieval_episodes import GuardedExperience, RewriteGuard


def guard_of(**fields: Any) -> RewriteGuard:
    return RewriteGuard(GuardsConfig(**{"max_words": 10.0, "patience": 2, **fields}))


def experience(guard: RewriteGuard, position: Any = None) -> GuardedExperience:
    playing = Playing(
        play=lambda params, numbers, step, stop: [*numbers],
        batch=lambda episodes: np.array(episodes),
        save=lambda episode: episode,
        restore=lambda saved: saved,
        params=lambda state: state,
        staleness=0,
        steps=100,
    )
    order = QuestionOrder(12, 3, seed=1)
    return GuardedExperience(order, playing, dict, guard, position=position)


LONG, SHORT = {"query_words": 11.0}, {"query_words": 4.0}


def test_a_guard_ends_a_training_after_its_patience() -> None:
    guard = guard_of()
    for metrics in (LONG, SHORT, LONG):
        guard.look(metrics)
        assert not guard.ended
    guard.look(LONG)
    assert "is 11 words and was above config.guards.max_words, 10" in guard.ended
    assert guard.ended.endswith("raise the limit and give the same command.")
    with StopSignal() as stop, pytest.raises(EndedEarly, match="guards"):
        experience(guard).next(None, 0, stop)


def test_telling_only_tells(capsys: pytest.CaptureFixture[str]) -> None:
    guard = guard_of(action="tell")
    for _ in range(4):
        guard.look(LONG)
    assert not guard.ended
    assert capsys.readouterr().out.count("guard: the length of queries") == 2


def test_a_resumed_run_counts_on() -> None:
    guard = guard_of()
    played = experience(guard)
    with StopSignal() as stop:
        first = played.next(None, 0, stop)
        guard.look(LONG)
        position, pending = played.position()
        assert pending == []
        second = played.next(None, 1, stop)
        resumed = guard_of()
        again = experience(resumed, position)
        np.testing.assert_array_equal(again.next(None, 1, stop), second)
    assert not np.array_equal(first, second)
    resumed.look(LONG)
    assert resumed.ended
