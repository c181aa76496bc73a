"""Weak labels for questions whose supporting passages nobody knows: where the answer stands.

A chunk that has one of the answers in it, as whole words (`metrics.answer_places`), may be what the
question needs, or may name the answer by chance; the passages that lead to it are not labelled at
all. The reward `answer_in_chunk` is given once, for the first such chunk (Joshi et al., ACL 2017,
and DPR, arXiv 2004.04906, take passages for positive in the same way). Where a question asks for
several values, all are needed, each by the first chunk in which it stands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qrag_jax.data.sample import Sample
from qrag_jax.metrics.answer_places import answer_place, answer_places, worded

NEEDED = 1  # chunks with the answer that complete an episode, unless it has several values

NO_ANSWER = "have no answer"
WORDLESS = "are answered by yes or no, which stand in no passage"
NOWHERE = "have no chunk in which the answer stands"


def holding(sample: Sample) -> tuple[int, ...]:
    """Indices of the chunks in which one of the sample's answers stands.

    Of values that are all needed, the first chunk of each; () if one stands in none.
    """
    if not sample.needs_all:
        return tuple(answer_places(sample.chunks, worded(sample.answers)))
    first = [answer_place(sample.chunks, [value]) - 1 for value in sample.answers]
    return tuple(sorted(set(first))) if -1 not in first else ()


def labelled(samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, int]]:
    """The samples with the chunks of `holding` as their support, in place of what they had.

    Returns:
        all samples, in order: the support of those that cannot be labelled is empty; and how many
        these are, by reason.
    """
    result, without = [], dict.fromkeys((NO_ANSWER, WORDLESS, NOWHERE), 0)
    for sample in samples:
        places = holding(sample)
        if not places:
            words = worded(sample.answers)
            without[NOWHERE if words else WORDLESS if sample.answers else NO_ANSWER] += 1
        result.append(dataclasses.replace(sample, support=places))
    return result, {reason: count for reason, count in without.items() if count}
