"""Rewards of rewritings: searches of the originals, and guards that end a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from qrag_jax.environments.episode import Document
from qrag_jax.environments.queries import RewriteTask
from qrag_jax.feedback import rewards
from qrag_jax.feedback.rewards import Patience
from qrag_jax.feedback.rewrite import GuardsConfig, RewriteReward, RewriteRewardConfig
from qrag_jax.llm.outcomes import Failure
from qrag_jax.rollouts.experience import Playing, QuestionOrder
from qrag_jax.runtime.interrupt import EndedEarly, StopSignal
from qrag_jax.systems.deepretrieval import Found, GuardedExperience, OriginalQueries


def experience(position: Any = None) -> GuardedExperience:
    playing = Playing(
        play=lambda params, numbers, step, stop: [*numbers],
        batch=lambda episodes, number: np.array(episodes),
        save=lambda episode: episode,
        restore=lambda saved: saved,
        params=lambda state: state,
        staleness=0,
        steps=100,
    )
    order, guards = QuestionOrder(12, 3, seed=1).at, GuardsConfig(max_words=10.0, patience=2)
    return GuardedExperience(order, playing, dict, guards, position=position)


LONG, SHORT = {"query_words": 11.0}, {"query_words": 4.0}


def test_a_guard_ends_a_training_after_its_patience() -> None:
    guarded = experience()
    for metrics in (LONG, SHORT, LONG):
        guarded.look(metrics)
        assert not guarded.ended
    guarded.look(LONG)
    with StopSignal() as stop, pytest.raises(EndedEarly, match=r"config\.guards\.max_words"):
        guarded.next(None, 0, stop)


def test_a_resumed_run_counts_on() -> None:
    played = experience()
    with StopSignal() as stop:
        first = played.next(None, 0, stop)
        played.look(LONG)
        position, pending = played.position()
        assert pending == []
        second = played.next(None, 1, stop)
        resumed = experience(position)
        np.testing.assert_array_equal(resumed.next(None, 1, stop), second)
    assert not np.array_equal(first, second)
    resumed.look(LONG)
    assert resumed.ended


DEAD = Failure("server", "PubMed: status 500")


REWARD = RewriteReward(RewriteRewardConfig(measure="rr", k=3))


ONE, TWO, THREE = (RewriteTask.judged(f"{n}", f"query {n}", {f"d{n}": 1}) for n in (1, 2, 3))


class Search:
    """Finds `d2`, then `d1`; the first searches for some queries fail."""

    def __init__(self, **fails: int) -> None:
        self.fails = fails  # by the last letter of the query
        self.calls: list[tuple[list[str], int]] = []

    def __call__(self, tasks: Sequence[RewriteTask], k: int, queries: Sequence[str]) -> list[Found]:
        self.calls.append(([*queries], k))
        return [self._one(query) for query in queries]

    def _one(self, query: str) -> Found:
        name = f"q{query[-1]}"
        self.fails[name] = self.fails.get(name, 0) - 1
        if self.fails[name] >= 0:
            return DEAD
        return tuple(Document(each, "", "", False) for each in ("d2", "d1"))


def patience(lines: list[str], share: float = 0.0, stop: StopSignal | None = None) -> Patience:
    return Patience(share, stop or StopSignal(), lines.append, "", Failure)


def test_measures_are_kept() -> None:
    search = Search()
    originals = OriginalQueries(search, REWARD, 2)
    assert originals.measures([ONE, TWO, ONE], patience([])) == [0.5, 1.0, 0.5]
    assert originals.measures([TWO, THREE], patience([])) == [1.0, 0.0]
    assert originals.measures([TWO, THREE], patience([])) == [1.0, 0.0]
    assert search.calls == [(["query 1", "query 2"], 3), (["query 3"], 3)]


def test_those_that_fail_are_searched_again_at_once() -> None:
    search, lines = Search(q1=2), list[str]()
    originals = OriginalQueries(search, REWARD, 3)
    assert originals.measures([ONE, TWO], patience(lines)) == [0.5, 1.0]
    assert search.calls == [
        (["query 1", "query 2"], 3),
        (["query 1"], 3),
        (["query 1"], 3),
    ]
    assert not lines


def test_few_failures_are_values_and_are_not_kept() -> None:
    search = Search(q1=2)
    originals = OriginalQueries(search, REWARD, 2)
    assert originals.measures([ONE, TWO, ONE], patience([], 0.5)) == [DEAD, 1.0, DEAD]
    assert originals.measures([ONE, TWO], patience([], 0.5)) == [0.5, 1.0]


def test_many_failures_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(rewards, "LOOK_EVERY", 0.001)
    search, lines = Search(q1=5, q2=3), list[str]()
    found = OriginalQueries(search, REWARD, 2).found([ONE, TWO, THREE], 7, patience(lines))
    assert [[each.id for each in one] for one in found] == [["d2", "d1"]] * 3  # type: ignore[union-attr]
    assert len(lines) == 2
    assert "2 of 3" in lines[0]
    assert "1 of 3" in lines[1]
    assert {k for _, k in search.calls} == {7}
