"""The weak reward of answers: which chunks hold one, which questions cannot be rewarded."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from qrag_jax.data.sample import Sample
from qrag_jax.feedback.answer_labels import NEEDED, NO_ANSWER, NOWHERE, WORDLESS, holding, labelled
from qrag_jax.feedback.ground_truth import ground_truth

CHUNKS = ("Ada was born in Oslo.", "A party.", "OSLO, the capital", "Bergen is west.")
SAMPLE = Sample("a", "Where?", CHUNKS, (1,), ("the Oslo", "Kristiania"), "own")


def by_words(sample: Sample) -> list[int]:
    """Slow and obvious: the words of the answer stand in a row among those of the chunk."""

    def words(text: str) -> list[str]:
        found = re.findall(r"[a-z0-9]+", text.lower())
        return [word for word in found if word not in ("a", "an", "the")]

    places = []
    for place, chunk in enumerate(sample.chunks):
        said = words(chunk)
        for answer in map(words, sample.answers):
            starts = range(len(said) - len(answer) + 1)
            if answer and any(said[i : i + len(answer)] == answer for i in starts):
                places.append(place)
                break
    return places


@pytest.mark.parametrize(
    ("answers", "places"),
    [
        (("Oslo",), (0, 2)),
        (("the capital", "Bergen"), (2, 3)),
        (("art",), ()),
        (("born in Oslo",), (0,)),
        (("yes",), ()),
        ((), ()),
    ],
)
def test_chunks_that_hold_an_answer(answers: tuple[str, ...], places: tuple[int, ...]) -> None:
    sample = dataclasses.replace(SAMPLE, answers=answers)
    assert holding(sample) == places == tuple(by_words(sample))


def test_labels_replace_support_and_what_has_none_is_counted() -> None:
    samples = [
        SAMPLE,
        dataclasses.replace(SAMPLE, id="b", answers=("No",)),
        dataclasses.replace(SAMPLE, id="c", answers=("Rome",)),
        dataclasses.replace(SAMPLE, id="d", answers=()),
        dataclasses.replace(SAMPLE, id="e", answers=("no", "Bergen")),
    ]
    made, without = labelled(samples)
    assert [sample.support for sample in made] == [(0, 2), (), (), (), (3,)]
    assert [dataclasses.replace(each, support=(1,)) for each in made] == samples
    assert without == {NO_ANSWER: 1, WORDLESS: 1, NOWHERE: 1}


@pytest.mark.parametrize("penalize", [False, True])
def test_the_first_chunk_with_the_answer_is_rewarded_once(penalize: bool) -> None:
    rng = np.random.default_rng(1)
    episodes, chunks, steps = 200, 6, 4
    holds = rng.random((episodes, chunks)) < 0.3
    actions = np.array([rng.permutation(chunks)[:steps] for _ in range(episodes)], np.int32)
    valid = np.arange(steps) < rng.integers(0, steps + 1, episodes)[:, None]
    found = ground_truth(holds, actions, valid, penalize_extra_steps=penalize, needed=NEEDED)
    expected = np.zeros(actions.shape)
    for b in range(episodes):
        for t in range(steps):
            if valid[b, t] and holds[b, actions[b, t]]:
                expected[b, t] = 0.5 + 0.5 / (t + 1 + 1e-5) if penalize else 1.0
                break
    np.testing.assert_allclose(np.asarray(found), expected, atol=1e-6)
    assert (expected.sum(1) > 0).sum() > 50
    assert (holds.sum(1) > 1).sum() > 20
