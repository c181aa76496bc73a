"""Names spelled anew: the same in each text, and only what has been invented."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from qrag_jax.data.generators.bridge_world import bridge_question
from qrag_jax.data.generators.invented_names import Draw, invented_syllables, invented_word
from qrag_jax.data.generators.renamed import Renaming

WORLD = [bridge_question(0, "train", number) for number in range(60)]
CAPITAL = re.compile(r"\b[A-Z][a-z]+\b")


def renaming(number: int = 0) -> Renaming:
    return Renaming(Draw(0, 5, number))


@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize("syllables", [2, 3])
def test_invented_words_are_told_by_their_spelling(split: int, syllables: int) -> None:
    draw = Draw(3, 0, syllables)
    words = [invented_word(draw, split, syllables) for _ in range(300)]
    assert {invented_syllables(word) for word in words} == {syllables}
    assert {invented_syllables(f"{word}q") for word in words} == {0}
    assert {*map(invented_syllables, ("Who", "Which", "Group", "She", "The", ""))} == {0}


def test_a_word_has_one_new_spelling_in_all_texts() -> None:
    draw, given = Draw(1, 0, 0), renaming()
    one, other = (invented_word(draw, 0, 2) for _ in range(2))
    first = given.of(f"Where does {one} {other} live?")
    new, newer = first.split()[2:4]
    assert first == f"Where does {new} {newer} live?"
    assert given.of(f"{other}, {one}.") == f"{newer}, {new}."
    assert len({one, other, new, newer}) == 4
    assert invented_syllables(new) == invented_syllables(newer) == 2


def words_of_the_wording() -> set[str]:
    """Capitalised words that many questions share; there are too many names for that."""
    counts: Counter[str] = Counter()
    for number in range(400):
        question = bridge_question(7, "train", number)
        texts = [question.question, *(each.text for each in question.passages)]
        counts.update({word for text in texts for word in CAPITAL.findall(text)})
    return {word for word, count in counts.items() if count >= 5}


# Few questions begin with the words that are named here.
WORDING = words_of_the_wording() | {"Into", "Near", "Under", "By", "From"}


def test_only_invented_words_change() -> None:
    given = renaming()
    assert given.of("") == ""
    for text in ("Which river is longer, the River", "She keeps bees on Lake", "style: Lantern"):
        assert given.of(text) == text
    for question in WORLD:
        for text in (question.question, *(each.text for each in question.passages)):
            before, after = text.split(), given.of(text).split()
            for old, new in zip(before, after, strict=True):
                stays = all(each in WORDING for each in CAPITAL.findall(old))
                assert (old == new) == stays, (old, new)


def test_new_names_of_a_whole_demonstration_differ_from_each_other() -> None:
    for number, question in enumerate(WORLD):
        given = renaming(number)
        old = {w for each in question.passages for w in CAPITAL.findall(each.text)} - WORDING
        new = [given.of(word) for word in sorted(old)]
        assert len({*new}) == len(new)
        assert not {*new} & WORDING


def test_each_renaming_has_other_names_and_is_the_same_again() -> None:
    text = WORLD[0].question
    assert renaming(1).of(text) == renaming(1).of(text) != renaming(2).of(text)


def test_new_names_are_of_the_training_split_alone() -> None:
    """So names of dev stay unseen: no word of one split is one of the other."""
    draw, given = Draw(9, 0, 0), renaming(3)
    old = {invented_word(draw, 0, 2) for _ in range(400)}
    new = {given.of(word) for word in old}
    dev = {invented_word(draw, 1, 2) for _ in range(20_000)}
    assert not new & dev
    # So that this can fail: the words of both splits are few enough to meet.
    train = {invented_word(draw, 0, 2) for _ in range(20_000)}
    assert new & train
