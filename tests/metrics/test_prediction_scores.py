"""Scores of predictions: votes and passes beside slow, obvious versions, hops, failures."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from qrag_jax.metrics import prediction_scores
from qrag_jax.metrics.answers import normalise
from qrag_jax.metrics.prediction_scores import (
    by_question,
    columns_of,
    gains,
    numbers_of_draws,
    summarised,
    voted,
)
from qrag_jax.metrics.predictions import ScoredEpisode

TALLY = {
    **dict.fromkeys(("turns", "searches", "malformed", "unknown_tool", "repeated"), 1),
    **dict.fromkeys(("completed", "truncated"), False),
}


def episode(name: str, draw: int, said: str | None, hops: int = 2, **tally: Any) -> ScoredEpisode:
    """An episode whose right answer is "Right"; None: it failed."""
    em = float(said is not None and normalise(said) == "right")
    parts = dict.fromkeys(prediction_scores.OF_PARTS, 0.5) | {"em": em, "f1": em}
    return ScoredEpisode(
        line=draw + 1,
        offset=0,
        id=name,
        question=f"What is {name}?",
        answers=("Right",),
        hops=hops,
        draw=draw,
        prediction=said or "",
        reward=None if said is None else em,
        status="timeout" if said is None else "done",
        parts={} if said is None else parts,
        tally=TALLY | tally,
    )


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
    assert [numbers_of_draws(n) for n in (1, 4, 5)] == [[1], [1, 2, 4], [1, 2, 4, 5]]


def test_votes_and_passes_of_questions_as_counted_by_hand() -> None:
    rng, words = np.random.default_rng(0), ["right", "The right", "wrong", "other", ""]
    said = {f"q{n}": [words[i] for i in rng.integers(0, 5, 5)] for n in range(20)}
    rows = [episode(q, d, a) for q, own in said.items() for d, a in enumerate(own)]
    found = summarised(rows)["all"]
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
        episode("b", 1, None, 4),
        episode("c", 0, None, 2),
        episode("c", 1, None, 2),
    ]
    found = summarised(rows)
    assert list(found) == ["all", "2 hops", "4 hops"]
    whole = found["all"]
    assert whole["em"]["mean"] == 0.75
    assert whole["weighted_em"]["mean"] == (0.5 * 1 + 1.0 * 2) / 2
    assert (whole["questions"], whole["episodes"], whole["failed"]) == (3, 6, 3)
    assert whole["failed_share"] == 0.5
    assert whole["hops"] == pytest.approx(8 / 3)
    assert whole["completed"]["mean"] == 0.25
    assert whole["malformed"]["mean"] == (0.5 + 1.0) / 2
    assert whole["truncated"]["mean"] == 0.5
    assert found["4 hops"]["em"]["mean"] == 1
    assert "vote_em@2" not in found["4 hops"]
    assert columns_of(by_question(rows)).keys() == {"a", "b"}
    lines = prediction_scores.table(prediction_scores.score_lines(found))
    assert [line.split("  ")[0] for line in lines[1:2]] == ["all"]
    assert lines[2].startswith("  2 hops")


def test_gains_are_over_questions_of_both() -> None:
    one = [episode("a", 0, "right"), episode("b", 0, "right"), episode("c", 0, None)]
    other = [episode("a", 0, "wrong"), episode("b", 0, "right"), episode("c", 0, "right")]
    assert gains(one, other)["em"]["mean"] == 0.5
    assert gains(one, [episode("a", 0, None)]) == {}


def test_all_failed() -> None:
    found = summarised([episode("a", 0, None)])["all"]
    assert "em" not in found
    assert found["failed"] == 1
    cells = prediction_scores.score_lines({"all": found})[0]
    assert cells[1] == "-"
