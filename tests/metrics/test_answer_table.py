from __future__ import annotations

import dataclasses

from qrag_jax.metrics.answer_log import AnswerRow, Miss
from qrag_jax.metrics.answer_table import answer_scores, causes_text, table
from qrag_jax.metrics.bootstrap import mean_interval
from tests.metrics.test_answer_log import MISS, ROW


def answered(*scores: tuple[str, float, float, int, str]) -> list[AnswerRow]:
    return [
        dataclasses.replace(ROW, id=name, em=em, f1=f1, hops=hops, type=kind)
        for name, em, f1, hops, kind in scores
    ]


ROWS = answered(
    ("a", 1.0, 1.0, 2, "bridge"),
    ("b", 0.0, 0.5, 2, "comparison"),
    ("c", 0.0, 0.25, 1, "bridge"),
    ("d", 0.0, 0.0, 2, "bridge"),
)
MISSES = [MISS, Miss("y", "timeout", "no.", 1, 3, ""), Miss("z", "cut_off", "no.", 1, 2, "bridge")]


def test_scores_by_group_with_failures_beside() -> None:
    scores = answer_scores(ROWS, MISSES)
    assert list(scores) == ["all", "1 hop", "2 hops", "3 hops", "no type", "bridge", "comparison"]
    counts = {
        name: tuple(group[count] for count in ("answered", "broken", "failed"))
        for name, group in scores.items()
    }
    assert counts == {
        "all": (4, 1, 2),
        "1 hop": (1, 0, 0),
        "2 hops": (3, 1, 1),
        "3 hops": (0, 0, 1),
        "no type": (0, 0, 1),
        "bridge": (3, 1, 1),
        "comparison": (1, 0, 0),
    }
    assert (scores["all"]["broken_share"], scores["all"]["failed_share"]) == (1 / 7, 2 / 7)
    assert tuple(scores["all"]["em"].values()) == mean_interval([1.0, 0.0, 0.0, 0.0, 0.0])
    assert tuple(scores["2 hops"]["f1"].values()) == mean_interval([1.0, 0.5, 0.0, 0.0])
    assert "em" not in scores["3 hops"]
    assert "judged" not in scores["all"]


def test_one_group_alone_is_not_told_twice() -> None:
    assert list(answer_scores(ROWS[3:], [])) == ["all"]
    assert list(answer_scores(ROWS[:2], [])) == ["all", "bridge", "comparison"]
    assert list(answer_scores([], [MISS])) == ["all"]


def test_the_judge_scores_what_it_judged() -> None:
    scores = answer_scores(ROWS, [], {"a": True, "c": False, "other": True})
    assert scores["all"]["judge"]["mean"] == 0.5
    assert {name: group["judged"] for name, group in scores.items()} == {
        "all": 2,
        "1 hop": 1,
        "2 hops": 1,
        "bridge": 2,
        "comparison": 0,
    }
    # Where there is no answer, the judge need not be asked.
    assert answer_scores(ROWS, MISSES, {"a": True})["all"]["judge"]["mean"] == 0.5
    assert table(scores)[-1].split()[-4:] == ["-", "1", "0", "0"]


def test_a_group_without_scores_has_no_interval() -> None:
    assert table(answer_scores([], MISSES[:1]))[1].split() == ["all", "-", "-", "0", "0", "1"]


def test_causes_are_counted() -> None:
    assert causes_text(MISSES) == "timeout 2, cut_off 1"
    assert causes_text([]) == ""
