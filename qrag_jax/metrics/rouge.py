"""ROUGE-L of an answer, by the package rouge-score."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from qrag_jax.errors import InputError

CHARACTERS = 128  # of each text; longer answers are cut there (HARR, arXiv 2602.03645)


def rouge_l(prediction: str, golds: Sequence[str]) -> float:
    """F-measure in [0, 1] of the longest common subsequence of stemmed words; the best gold counts.

    Words are runs of ASCII letters and digits: a text in another script has none, and scores 0.

    Raises:
        ValueError: there is no gold answer.
        InputError: the package rouge-score is missing.
    """
    if not golds:
        raise ValueError("an answer is scored against at least one gold answer")
    said = prediction[:CHARACTERS]
    return max(scorer().score(gold[:CHARACTERS], said)["rougeL"].fmeasure for gold in golds)


@functools.cache
def scorer() -> Any:
    """The package's own scorer; it loads a stemmer once.

    Raises:
        InputError: the package is missing.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise InputError(
            "the reward rouge_l needs the package rouge-score: run pip install 'qrag_jax[rouge]', "
            "or use the reward f1"
        ) from None
    return RougeScorer(["rougeL"], use_stemmer=True)
