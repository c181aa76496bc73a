"""What the model broke scores 0, and what the infrastructure broke is left out, everywhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qrag_jax.environments.query_writing.state import EMPTY, SEARCHED
from qrag_jax.environments.rag.episode import BROKEN_CAUSES, Broken, Ended, Finished
from qrag_jax.evaluators.agents import means, score_rows
from qrag_jax.evaluators.query_scores import hop_scores
from qrag_jax.evaluators.training_scores import TrainingScores
from qrag_jax.feedback.completion import EpisodeRewards
from qrag_jax.feedback.language_model import OWN_CAUSES, Unscored
from qrag_jax.feedback.rag import Gold
from qrag_jax.metrics.answers import INFRASTRUCTURE
from qrag_jax.rollouts.agents import Episode
from qrag_jax.runtime.interrupt import StopSignal
from tests.evaluators.test_query_scores import row
from tests.retrieval_logs import played_rows

GOLD = Gold("q", "Where?", ("Oslo",), frozenset({"p"}))


def test_every_cause_has_its_side() -> None:
    of_model = {*BROKEN_CAUSES, *OWN_CAUSES} - INFRASTRUCTURE
    assert of_model == {
        *("empty", "too_long", "filtered", "tool_call"),
        *("unfinished_thinking", "cut_off", "no_text"),
        *("no_retrieval", "malformed_call", "own_code"),
    }
    assert {*BROKEN_CAUSES, *OWN_CAUSES} >= INFRASTRUCTURE


def test_agents() -> None:
    ends: list[Ended] = [
        Finished("Oslo", ()),
        *[Broken("malformed_call", "no call.")] * 3,
        *[Broken("timeout", "no reply.")] * 2,
    ]
    found = means(score_rows([GOLD] * 6, [Episode(ended, (), 1) for ended in ends]))
    assert (found["em"], found["f1"], found["broken_share"]) == (0.25, 0.25, 0.5)
    assert found["failed_share"] == pytest.approx(1 / 3)


def test_answers_that_reward() -> None:
    rewards = [
        EpisodeRewards((0.0, 1.0), 2),
        Unscored("cut_off", "too long."),
        Unscored("timeout", "no reply."),
        Unscored("raised", "the user's code."),
    ]
    rows = played_rows(4, 0)
    asked: Any = SimpleNamespace(begin=lambda *_: None, wait=lambda *_: rewards)
    shown = [SimpleNamespace(chunks=())] * 4
    episodes: Any = SimpleNamespace(rows=lambda _: (rows, rows), shown=shown, batch_size=4)
    scores = TrainingScores(episodes, "return", 0.5, 2, stop_action=False)
    found = scores.evaluate(None, 0, asked, StopSignal())
    assert (found.score, [*found.each]) == (0.25, [0.5, 0.0])
    assert (found.scores["broken_share"], found.scores["unscored_share"]) == (0.25, 0.5)


def test_hops() -> None:
    def after(*outcomes: str) -> list[Any]:
        return [row(outcome, float(outcome == SEARCHED), 0.5) for outcome in outcomes]

    hops = [after(SEARCHED, SEARCHED, "timeout"), after(SEARCHED, EMPTY, SEARCHED)]
    found = hop_scores(hops)
    assert (found["hop1/recall"], found["hop2/recall"]) == (1.0, 0.5)
    assert found["failed_share"] == pytest.approx(1 / 6)
