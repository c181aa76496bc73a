"""Tasks of rewriting."""

from __future__ import annotations

from typing import Any

import pytest

from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.errors import InputError


def test_only_relevant_documents_are_graded() -> None:
    task = RewriteTask.judged(
        "q", "capital?", {"a": 2, "x": 0, "b": 1, "y": -1}, answers=("Oslo",), until="2020-02-29"
    )
    assert task.grades == (("a", 2), ("b", 1))
    assert task.gold == task.gold_ids == ("a", "b")
    assert task == RewriteTask(
        "q",
        "capital?",
        ("Oslo",),
        gold_ids=("a", "b"),
        grades=(("a", 2), ("b", 1)),
        until="2020-02-29",
    )
    assert RewriteTask.judged("q", "capital?", {}).gold == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grades": (("a", 1), ("a", 2)), "gold_ids": ("a", "a")}, "two grades"),
        ({"grades": (("a", 0),), "gold_ids": ("a",)}, "grades the document"),
        ({"grades": (("a", 1),)}, "gold_ids"),
        ({"grades": (("a", 1), ("b", 1)), "gold_ids": ("b", "a")}, "gold_ids other than"),
        ({"gold_ids": ("a",)}, "gold_ids other than"),
        ({"until": "2020-02-30"}, "'2020-02-30'"),
        ({"until": "20200229"}, "day as YYYY-MM-DD"),
        ({"until": "2020"}, "day as YYYY-MM-DD"),
        ({"until": "2020-W09-6"}, "day as YYYY-MM-DD"),
    ],
)
def test_a_task_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        RewriteTask("q7", "capital?", (), **fields)
    assert "'q7'" in str(caught.value)
