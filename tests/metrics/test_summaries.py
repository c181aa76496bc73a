"""Intervals and summaries of logs: failures against scores, votes and passes, hops, rewards."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from qrag_jax.metrics.answers import normalise
from qrag_jax.metrics.bootstrap import crossed_interval, mean_interval
from qrag_jax.metrics.row_log import OF_PARTS, AgentRow, AnswerRow, Hop, Miss, Prediction, Searched
from qrag_jax.metrics.summaries import (
    agent_summary,
    answer_scores,
    episode_gains,
    episode_summary,
    hop_gains,
    hop_summary,
    judged,
    pass_at,
    reward_row,
    voted,
)
from tests.evaluators.shown_pages import TALLY


def test_intervals_of_equal_values_have_no_width() -> None:
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
    _, low, high = crossed_interval(trainings + questions)
    error = math.sqrt(trainings.var() / 40 + questions.var() / 200)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.08)


# ---------------------------------------------------------------- answers and agents


def test_scores_of_answers_and_failures_by_group() -> None:
    rows = [
        AnswerRow(name, "?", [], "", "", em, f1, "squad", [], 0, 0, "", "stop", hops, kind)
        for name, em, f1, hops, kind in (
            *(("a", 1.0, 1.0, 2, "bridge"), ("b", 0.0, 0.5, 2, "comparison")),
            *(("c", 0.0, 0.25, 1, "bridge"), ("d", 0.0, 0.0, 2, "bridge")),
        )
    ]
    misses = [
        Miss("x", "timeout", "no.", 1, 2, "bridge"),
        Miss("y", "timeout", "no.", 1, 3, ""),
        Miss("z", "cut_off", "no.", 1, 2, "bridge"),
    ]
    scores = answer_scores(rows, misses)
    counts = {n: (g["answered"], g["broken"], g["failed"]) for n, g in scores.items()}
    assert counts == {
        "all": (4, 1, 2),
        "1 hop": (1, 0, 0),
        "2 hops": (3, 1, 1),
        "3 hops": (0, 0, 1),
        "no type": (0, 0, 1),
        "bridge": (3, 1, 1),
        "comparison": (1, 0, 0),
    }
    assert tuple(scores["all"]["em"].values()) == mean_interval([1.0, 0.0, 0.0, 0.0, 0.0])
    assert tuple(scores["2 hops"]["f1"].values()) == mean_interval([1.0, 0.5, 0.0, 0.0])
    # The judge scores what it judged; where there is no answer, it need not be asked.
    verdicts = answer_scores(rows, [], {"a": True, "c": False, "other": True})
    assert (verdicts["all"]["judge"]["mean"], verdicts["all"]["judged"]) == (0.5, 2)
    assert answer_scores(rows, misses, {"a": True})["all"]["judge"]["mean"] == 0.5


def test_what_the_model_broke_is_wrong_and_what_the_server_broke_is_left_out() -> None:
    right = AgentRow("q1", "Wo?", ("Köln",), "Köln", "", 1.0, 1.0, 0.5, ({"query": "Wo?"},))
    failed = dataclasses.replace(right, answer="", broken="timeout", em=0.0, f1=0.0, recall=None)
    malformed = dataclasses.replace(failed, broken="malformed_call", recall=0.0, searches=())
    found = agent_summary([right, failed, *[malformed] * 3])
    assert (found["questions"], found["broken"], found["failed"]) == (5, 3, 1)
    assert (found["broken_share"], found["failed_share"]) == (0.6, 0.2)
    assert found["em"]["mean"] == found["f1"]["mean"] == found["hops"]["mean"] == 0.25
    assert found["recall"]["mean"] == 0.125


# ---------------------------------------------------------------- several draws of a question


def episode(name: str, draw: int, said: str | None, hops: int = 2, **tally: Any) -> Prediction:
    """An episode whose right answer is "Right"; None: it failed."""
    em = float(said is not None and normalise(said) == "right")
    parts = dict.fromkeys(OF_PARTS, 0.5) | {"em": em, "f1": em}
    reward, status = (None, "timeout") if said is None else (em, "done")
    scored = {"parts": {} if said is None else parts, "facts": {"tally": TALLY | tally}}
    question = (name, f"What is {name}?", ["Right"], hops)
    return Prediction(*question, draw, said or "", reward, [], {"status": status, **scored})


def slow_vote(answers: list[str]) -> str:
    forms = [normalise(each) for each in answers]
    counts = Counter(form for form in forms if form)
    best = [form for form in forms if form and counts[form] == max(counts.values())]
    return answers[forms.index(best[0])] if best else ""


def test_votes_and_passes_as_the_slow_version() -> None:
    for answers in itertools.product(("Right", "the right!", "wrong", "other", ""), repeat=4):
        assert voted(list(answers)) == slow_vote(list(answers)), answers
    for k in range(1, 6):  # the share of all draws with a right one
        draws = list(itertools.combinations([True, True, False, False, False], k))
        assert pass_at(k, 2, 5) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_at(3, 0, 3) == 0.0
    rng, words = np.random.default_rng(0), ["right", "The right", "wrong", "other", ""]
    said = {f"q{n}": [words[i] for i in rng.integers(0, 5, 5)] for n in range(20)}
    rows = [episode(q, d, a) for q, own in said.items() for d, a in enumerate(own)]
    found = episode_summary(rows)["all"]
    hits = [sum(normalise(a) == "right" for a in own) for own in said.values()]
    for k in (1, 2, 4, 5):
        votes = [normalise(slow_vote(own[:k])) == "right" for own in said.values()]
        assert found[f"vote_em@{k}"]["mean"] == pytest.approx(np.mean(votes))
        passes = np.mean([pass_at(k, right, 5) for right in hits])
        assert found[f"pass@{k}"]["mean"] == pytest.approx(passes)
    assert found["pass@1"]["mean"] == pytest.approx(found["em"]["mean"])


def test_episodes_by_hops_and_weights() -> None:
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
    means = {"em": 0.75, "completed": 0.25}
    means |= dict.fromkeys(("weighted_em", "weighted_f1"), (0.5 * 1 + 1.0 * 2) / 2)
    means |= {"malformed": (0.5 + 1.0) / 2, "truncated": 0.5}
    assert {name: whole[name]["mean"] for name in means} == means
    assert found["4 hops"]["em"]["mean"] == 1
    # Gains are over questions of both.
    one = [episode("a", 0, "right"), episode("b", 0, "right"), episode("c", 0, None)]
    other = [episode("a", 0, "wrong"), episode("b", 0, "right"), episode("c", 0, "right")]
    assert episode_gains(one, other)["em"]["mean"] == 0.5
    assert episode_gains(one, [episode("a", 0, None)]) == {}


# ---------------------------------------------------------------- hops and rewards


def searched(name: str, *recalls: float) -> Searched:
    hops = tuple(
        Hop("a", "searched", ("p1",), {"recall": r, "all_gold": float(r == 1), "size": 1.0}, 20, 4)
        for r in recalls
    )
    return Searched(name, f"{name}?", ("x",), ("g1", "g2"), hops)


def test_scores_and_gains_hop_by_hop() -> None:
    rows = [searched("a", 0.5, 1.0), searched("b", 0.0, 0.5)]
    found = hop_summary(rows)
    assert found["hop1/recall"]["mean"] == 0.25
    assert found["hop2/all_gold"]["mean"] == 0.5
    assert (found["read_tokens"], found["sampled_tokens"]) == (40, 8)
    gains = hop_gains(rows, [searched("a", 0.0, 0.5), searched("b", 0.0, 0.0)])
    assert gains["hop2/recall"] == {"mean": 0.5, "low": 0.5, "high": 0.5}
    assert "hop2/size" in found
    assert "hop2/size" not in gains  # which is no score
    # What failed is left out and counted.
    first, second = rows[1].hops
    hops = (dataclasses.replace(first, outcome="timeout"), second)
    lost = dataclasses.replace(rows[1], hops=hops)
    found = hop_summary([rows[0], lost])
    assert (found["failed"], found["failed_share"], found["hop2/recall"]["mean"]) == (1, 0.5, 1.0)
    assert hop_gains(rows, [rows[0], lost])["hop1/recall"]["mean"] == 0
    assert hop_gains([lost], [rows[0]]) == {}


def test_mean_and_deviation_of_rewards() -> None:
    question = ("q1", "Wo?")
    rewards = np.random.default_rng(0).random(8).round(3).tolist()
    row = reward_row(question, rewards)
    assert (row.mean, row.std) == pytest.approx((np.mean(rewards), np.std(rewards)))
    assert (row.rewards, row.scored, row.broken, row.kept) == (rewards, 8, [], True)
    assert not judged(row, 1.0).kept
    assert judged(judged(row, 1.0), 0.0) == row
    # An episode without a reward is not 0.
    row = reward_row(question, [0.5, "timeout", 0.5, "too_long"])
    assert (row.mean, row.std, row.kept) == (0.5, 0.0, False)
    assert (row.rewards, row.broken) == ([0.5, None, 0.5, None], ["timeout", "too_long"])
    nothing = reward_row(question, ["timeout", "timeout"])
    assert (nothing.mean, nothing.std, nothing.kept) == (None, None, False)
    # Equal rewards do not vary; np.std of these is above 0 by rounding.
    for value, count in itertools.product((0.1, 1 / 3, 2 / 3, 0.7), range(2, 12)):
        row = reward_row(question, [value] * count)
        assert (row.std, row.kept) == (0.0, False)
    assert not reward_row(question, [0.3, 0.1 + 0.2]).kept
