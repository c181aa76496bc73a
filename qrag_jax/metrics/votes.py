"""Votes among the answers of several episodes of one question."""

from __future__ import annotations

from collections.abc import Sequence

from qrag_jax.metrics.answers import normalise


def voted(answers: Sequence[str]) -> str:
    """The answer that most episodes give, by normal forms; of equally many, the one given first.

    An episode whose answer has no token in its normal form has no vote.

    Returns:
        The answer as the first of its episodes wrote it; "" if no episode has a vote.
    """
    counts: dict[str, int] = {}  # by normal form, in the order of first sight
    texts: dict[str, str] = {}
    for answer in answers:
        if form := normalise(answer):
            counts[form] = counts.get(form, 0) + 1
            texts.setdefault(form, answer)
    if not counts:
        return ""
    return texts[max(counts, key=lambda form: counts[form])]  # the first of equal ones


def numbers_of_draws(most: int) -> list[int]:
    """The k of vote@k and pass@k: 1, 2, 4, … and the number of draws itself."""
    powers = [1 << place for place in range(most.bit_length())]
    return sorted({*powers, most} - {0})
