"""Intervals of the bootstrap, votes and passes of several draws, and the best return there is."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.evaluators.evaluation import best_return
from qrag_jax.feedback.facts import ground_truth
from qrag_jax.metrics.answers import normalise
from qrag_jax.metrics.bootstrap import crossed_interval, mean_interval
from qrag_jax.metrics.rows import OF_PARTS, Prediction
from qrag_jax.metrics.summaries import (
    by_question,
    episode_gains,
    episode_summary,
    episode_table,
    question_columns,
    voted,
)


def test_one_value_and_equal_values_give_no_width() -> None:
    assert mean_interval([0.7]) == (0.7, 0.7, 0.7)
    assert mean_interval([0.1] * 1001) == (0.1, 0.1, 0.1)
    assert crossed_interval(np.full((3, 4), 0.25)) == (0.25, 0.25, 0.25)
    values = np.random.default_rng(0).random((1, 50))  # one training: that over questions
    assert crossed_interval(values) == mean_interval(values[0])


@pytest.mark.parametrize(("of_trainings", "of_questions"), [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)])
def test_the_width_is_that_of_both_sources(of_trainings: float, of_questions: float) -> None:
    """Var = σ²_trainings / rows + σ²_questions / columns, where rows and columns add up."""
    draws = np.random.default_rng(1)
    trainings = draws.normal(0, of_trainings, (40, 1))
    questions = draws.normal(0, of_questions, (1, 200))
    mean, low, high = crossed_interval(trainings + questions)
    error = math.sqrt(trainings.var() / 40 + questions.var() / 200)
    assert mean == pytest.approx(float((trainings + questions).mean()))
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.08)


TALLY = {
    **dict.fromkeys(("turns", "searches", "malformed", "unknown_tool", "repeated"), 1),
    **dict.fromkeys(("completed", "truncated"), False),
}


def episode(name: str, draw: int, said: str | None, hops: int = 2, **tally: Any) -> Prediction:
    """An episode whose right answer is "Right"; None: it failed."""
    em = float(said is not None and normalise(said) == "right")
    parts = dict.fromkeys(OF_PARTS, 0.5) | {"em": em, "f1": em}
    text, end = said or "", (None, "timeout") if said is None else (em, "done")
    reward, status = end
    scored = {"parts": {} if said is None else parts, "facts": {"tally": TALLY | tally}}
    question = (name, f"What is {name}?", ["Right"], hops)
    return Prediction(*question, draw, text, reward, [], {"status": status, **scored})


def slow_vote(answers: list[str]) -> str:
    forms = [normalise(each) for each in answers]
    counts = Counter(form for form in forms if form)
    best = [form for form in forms if form and counts[form] == max(counts.values())]
    return answers[forms.index(best[0])] if best else ""


def test_votes_as_the_slow_version() -> None:
    said = ("Right", "the right!", "wrong", "Wrong.", "other", "", "the")
    for answers in itertools.product(said, repeat=4):
        assert voted(list(answers)) == slow_vote(list(answers)), answers
    assert voted([]) == ""
    assert voted(["", "a", "b", "The B", "A"]) == "b"


def test_votes_and_passes_of_questions_as_counted_by_hand() -> None:
    rng, words = np.random.default_rng(0), ["right", "The right", "wrong", "other", ""]
    said = {f"q{n}": [words[i] for i in rng.integers(0, 5, 5)] for n in range(20)}
    rows = [episode(q, d, a) for q, own in said.items() for d, a in enumerate(own)]
    found = episode_summary(rows)["all"]
    for k in (1, 2, 4, 5):
        votes = [normalise(slow_vote(own[:k])) == "right" for own in said.values()]
        assert found[f"vote_em@{k}"]["mean"] == pytest.approx(np.mean(votes))
        # pass@k: the share of all subsets of k draws with a right answer in them.
        passes = [
            np.mean([any(normalise(a) == "right" for a in s) for s in itertools.combinations(o, k)])
            for o in said.values()
        ]
        assert found[f"pass@{k}"]["mean"] == pytest.approx(np.mean(passes))
    assert found["pass@1"]["mean"] == pytest.approx(found["em"]["mean"])
    assert "pass@3" not in found


def test_rows_by_hops_and_weights() -> None:
    rows = [
        episode("a", 0, "right", 2, completed=True, malformed=0, unknown_tool=0),
        episode("a", 1, "wrong", 2, malformed=0),
        episode("b", 0, "right", 4, truncated=True),
        *(episode("b", 1, None, 4), episode("c", 0, None, 2), episode("c", 1, None, 2)),
    ]
    found = episode_summary(rows)
    assert list(found) == ["all", "2 hops", "4 hops"]
    whole = found["all"]
    assert (whole["questions"], whole["episodes"], whole["failed"]) == (3, 6, 3)
    assert (whole["failed_share"], whole["hops"]) == (0.5, pytest.approx(8 / 3))
    means = {"em": 0.75, "weighted_em": (0.5 * 1 + 1.0 * 2) / 2, "completed": 0.25}
    means |= {"malformed": (0.5 + 1.0) / 2, "truncated": 0.5}
    assert {name: whole[name]["mean"] for name in means} == means
    assert found["4 hops"]["em"]["mean"] == 1
    assert "vote_em@2" not in found["4 hops"]
    assert question_columns(by_question(rows)).keys() == {"a", "b"}
    lines = episode_table({"last": found}, {"gain": episode_gains(rows, rows)})
    names = [line.split("  ")[0] or line.strip().split("  ")[0] for line in lines]
    assert names[1:5] == ["last", "2 hops", "4 hops", "gain"]
    assert len(names) == 5 + 3  # votes by EM and F1, and passes


@pytest.mark.parametrize("facts", [1, 2, 4])
@pytest.mark.parametrize("settings", [{}, {"per_fact_reward": 0.2}, {"step_cost": 0.1}])
def test_the_best_return_is_that_of_all_plays(facts: int, settings: dict[str, float]) -> None:
    """Of three steps, or as many as facts, in five chunks: no order of chunks has more return."""
    orders = np.array([*itertools.permutations(range(5), max(facts, 3))])
    support = np.tile(np.arange(5) < facts, (len(orders), 1))
    fields: dict[str, Any] = {"pqn.gamma": 0.9, "env.max_steps": 3}
    for penalized in (True, False):
        rewards = ground_truth(
            jnp.array(support),
            jnp.array(orders),
            jnp.ones(orders.shape, bool),
            **{"penalize_extra_steps": penalized, "per_fact_reward": 0.0, "step_cost": 0.0}
            | settings,
        )
        played = max((np.asarray(rewards) * 0.9 ** np.arange(orders.shape[1])).sum(1))
        own = settings | {"penalize_extra_steps": penalized}
        of_run = fields | {f"reward.{name}": value for name, value in own.items()}
        assert best_return(facts, of_run) == pytest.approx(played)
    stops = fields | {"env.stop_action": True, "reward.step_cost": 1}
    # It stops, and pays for no other step.
    assert best_return(1, stops) == pytest.approx(1, abs=1e-4)
    assert best_return(1, {}) == 1


def test_gains_are_over_questions_of_both() -> None:
    one = [episode("a", 0, "right"), episode("b", 0, "right"), episode("c", 0, None)]
    other = [episode("a", 0, "wrong"), episode("b", 0, "right"), episode("c", 0, "right")]
    assert episode_gains(one, other)["em"]["mean"] == 0.5
    assert episode_gains(one, [episode("a", 0, None)]) == {}
    lost = episode_summary([episode("a", 0, None)])["all"]
    assert ("em" in lost, lost["failed"]) == (False, 1)
