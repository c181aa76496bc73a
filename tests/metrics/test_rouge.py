"""ROUGE-L: values by hand, and what happens without the package."""

from __future__ import annotations

import sys

import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics import answers

PAIRS: list[tuple[str, list[str], float]] = [
    ("the cat sat", ["the cat sat"], 1),
    ("The cat, sat!", ["the cat sat"], 1),
    ("the cat", ["the cat sat"], 2 * (2 / 2) * (2 / 3) / (2 / 2 + 2 / 3)),
    ("sat the cat", ["the cat sat"], 2 / 3),  # a subsequence keeps the order
    ("running cats", ["run cat"], 1),  # stems
    ("dog", ["cat", "the dog", "dog"], 1),  # the best gold answer
    ("dog", ["cat"], 0),
    ("", ["cat"], 0),
    ("cat", [""], 0),
    ("東京", ["東京"], 0),  # words are ASCII letters and digits
    ("x " * 64 + "cat", ["x " * 64 + "dog"], 1),  # cut at 128 characters
]


@pytest.mark.parametrize(("prediction", "golds", "score"), PAIRS)
def test_by_hand(prediction: str, golds: list[str], score: float) -> None:
    pytest.importorskip("rouge_score", reason="the package rouge-score is not installed")
    assert answers.rouge_l(prediction, golds) == pytest.approx(score)


def test_a_gold_answer_is_needed() -> None:
    with pytest.raises(ValueError, match="least one gold"):
        answers.rouge_l("cat", [])


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    answers.rouge_scorer.cache_clear()
    with pytest.raises(InputError, match=r"'qrag_jax\[rouge\]'"):
        answers.rouge_l("cat", ["cat"])
