"""Searches of original queries: done once, done again where they fail, and waited for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.environments.tools.episode import Document
from qrag_jax.feedback.rewrite_reward import RewriteReward, RewriteRewardConfig
from qrag_jax.llm.outcomes import Failure
from qrag_jax.rollouts import patient_play
from qrag_jax.rollouts.patient_play import Patience
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.systems.deepretrieval_episodes import Found, OriginalQueries

DEAD = Failure("server", "PubMed: status 500")
REWARD = RewriteReward(RewriteRewardConfig(measure="rr", k=3))
ONE, TWO, THREE = (RewriteTask.judged(f"{n}", f"query {n}", {f"d{n}": 1}) for n in (1, 2, 3))


class Search:
    """Finds `d2`, then `d1`; the first searches for some queries fail."""

    def __init__(self, **fails: int) -> None:
        self.fails = fails  # by the last letter of the query
        self.calls: list[tuple[list[str], int]] = []

    def __call__(self, tasks: Sequence[RewriteTask], k: int) -> list[Found]:
        self.calls.append(([each.question for each in tasks], k))
        return [self._one(each.question) for each in tasks]

    def _one(self, query: str) -> Found:
        name = f"q{query[-1]}"
        self.fails[name] = self.fails.get(name, 0) - 1
        if self.fails[name] >= 0:
            return DEAD
        return tuple(Document(each, "", "", False) for each in ("d2", "d1"))


def patience(lines: list[str], share: float = 0.0, stop: StopSignal | None = None) -> Patience:
    return Patience(share, stop or StopSignal(), lines.append, broken=Failure)


def test_measures_are_kept() -> None:
    search = Search()
    originals = OriginalQueries(search, REWARD, 2)
    assert originals.measures([ONE, TWO, ONE], patience([])) == [0.5, 1.0, 0.5]
    assert originals.measures([TWO, THREE], patience([])) == [1.0, 0.0]
    assert originals.measures([TWO, THREE], patience([])) == [1.0, 0.0]
    assert search.calls == [(["query 1", "query 2"], 3), (["query 3"], 3)]


def test_tasks_of_one_id_are_measured_apart() -> None:
    other = RewriteTask.judged("1", "query 1", {"d2": 1})
    originals = OriginalQueries(Search(), REWARD, 1)
    assert originals.measures([ONE, other], patience([])) == [0.5, 1.0]


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
    monkeypatch.setattr(patient_play, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(patient_play, "_LOOK_EVERY", 0.001)
    search, lines = Search(q1=5, q2=3), list[str]()
    found = OriginalQueries(search, REWARD, 2).found([ONE, TWO, THREE], 7, patience(lines))
    assert [[each.id for each in one] for one in found] == [["d2", "d1"]] * 3  # type: ignore[union-attr]
    assert len(lines) == 2
    assert "paused: 2 of 3 episodes broke (server 2; for example: PubMed: status 500)" in lines[0]
    assert "paused: 1 of 3" in lines[1]
    assert {k for _, k in search.calls} == {7}


def test_a_run_can_be_stopped_while_it_waits() -> None:
    stop = StopSignal()
    stop.requested = True
    with pytest.raises(Stopped):
        OriginalQueries(Search(q1=99), REWARD, 1).measures([ONE], patience([], 0.0, stop))
