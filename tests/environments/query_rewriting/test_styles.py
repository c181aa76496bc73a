"""Scripted rewritings: what each style says, its share, and that it says no word of its own."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import pytest

from qrag_jax.data.generators.dropped_words import FUNCTION_WORDS, words_of
from qrag_jax.data.generators.invented_names import Draw
from qrag_jax.data.generators.talkative import TalkativeQuestion, talkative_question
from qrag_jax.environments.query_rewriting.styles import (
    COPY,
    ENTITY,
    NO_STOP_WORDS,
    SOME_WORDS,
    STYLES,
    WRONG_CLAUSE,
    RewriteStylesConfig,
    draw_rewriting,
    draw_style,
    rewritten,
)
from qrag_jax.errors import InputError

DRAWS, STREAM = 4000, 99
GOLDEN = {
    COPY: (
        "Yesterday I shared a train with uncle Miarbo, who walks with a cane, and talked all the "
        "way. All of us at the club are fond of Plundesh Verrid, who was taught by Selbon Piakot. "
        "And so to the question that I have for you: who runs the Blunel Gallery?"
    ),
    NO_STOP_WORDS: (
        "Yesterday shared train uncle Miarbo walks cane talked way club fond Plundesh Verrid "
        "taught Selbon Piakot question runs Blunel Gallery"
    ),
    SOME_WORDS: (
        "Yesterday train Miarbo who walks a cane and talked the us at club are of Plundesh Verrid "
        "taught by Selbon Piakot And so to the I have for runs the"
    ),
    ENTITY: "Blunel Gallery runs",
    WRONG_CLAUSE: "Plundesh Verrid taught Selbon Piakot",
}


@cache
def question(index: int = 0) -> TalkativeQuestion:
    return talkative_question(0, "train", index)


def written(style: str, index: int, number: int = 0) -> str:
    return rewritten(style, question(index), Draw(0, STREAM, number))


def test_golden_rewritings() -> None:
    assert {style: written(style, 0) for style in STYLES} == GOLDEN


def test_styles_say_only_words_of_the_question_in_one_line() -> None:
    for index in range(40):
        shown = set(words_of(question(index).question))
        for style in STYLES:
            said = written(style, index)
            assert set(words_of(said)) <= shown, style
            assert said
            assert "\n" not in said


def test_words_keep_their_order() -> None:
    for index in range(40):
        for style in (COPY, NO_STOP_WORDS, SOME_WORDS):
            words = iter(words_of(question(index).question))
            assert all(word in words for word in words_of(written(style, index)))


def test_what_each_style_leaves_out() -> None:
    for index in range(40):
        each = question(index)
        words = words_of(each.question)
        assert written(COPY, index) == each.question
        stopped = words_of(written(NO_STOP_WORDS, index))
        assert Counter(words) - Counter(stopped) == Counter(
            word for word in words if word.lower() in FUNCTION_WORDS
        )
        assert len(words_of(written(SOME_WORDS, index))) == round(0.6 * len(words))
        assert written(ENTITY, index) == f"{each.entity} {each.relation}"
        others = {f"{clause.name} {clause.words}" for clause in each.clauses}
        assert {written(WRONG_CLAUSE, index, number) for number in range(20)} == others
        assert all(each.entity not in other for other in others)


def test_each_word_is_kept_as_often_as_any_other() -> None:
    words = words_of(question().question)
    kept = Counter(word for n in range(500) for word in words_of(written(SOME_WORDS, 0, n)))
    share = round(0.6 * len(words)) / len(words)
    sigma = math.sqrt(500 * share * (1 - share))
    for word, count in Counter(words).items():
        assert abs(kept[word] - 500 * count * share) < 4 * sigma * count, word


def test_shares_are_met() -> None:
    config = RewriteStylesConfig(0.1, 0.15, 0.2, 0.25, 0.3)
    counts = Counter(draw_style(config, 0, index) for index in range(DRAWS))
    for name, share in config.shares.items():
        sigma = math.sqrt(DRAWS * share * (1 - share))
        assert abs(counts[name] - DRAWS * share) < 4 * sigma, name
    only = RewriteStylesConfig(0, 0, 0, 1, 0)
    assert {draw_style(only, 3, index) for index in range(50)} == {ENTITY}


def test_a_demonstration_depends_on_seed_and_index_only() -> None:
    config = RewriteStylesConfig()

    def several(seed: int) -> list[tuple[str, str]]:
        return [draw_rewriting(config, seed, index, question()) for index in range(50)]

    assert several(0) == several(0) != several(1)
    assert [each[0] for each in several(0)] == [draw_style(config, 0, n) for n in range(50)]


def test_what_is_chosen_within_a_style_does_not_depend_on_its_draw() -> None:
    """The number that chose the last style was high; the clause is chosen by another one."""
    config = RewriteStylesConfig(0.5, 0, 0, 0, 0.5)
    drawn = [draw_rewriting(config, 0, index, question()) for index in range(1000)]
    counts = Counter(each.query for each in drawn if each.style == WRONG_CLAUSE)
    total = counts.total()
    assert len(counts) == 2
    assert all(abs(count - total / 2) < 4 * math.sqrt(total / 4) for count in counts.values())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"entity": 0.5},
            "config.styles.copy, no_stop_words, some_words, entity and wrong_clause sum to 1.3; "
            "change them so that they sum to 1.",
        ),
        ({"copy": -0.2, "entity": 0.6}, "config.styles.copy is -0.2; it must be at least 0.0."),
        ({"copy": math.nan}, "config.styles.copy is nan; it must be at least 0.0."),
    ],
)
def test_shares_that_are_refused(given: dict[str, float], told: str) -> None:
    with pytest.raises(InputError) as caught:
        RewriteStylesConfig(**given)
    assert str(caught.value) == told


def test_an_unknown_style() -> None:
    with pytest.raises(ValueError, match="'best'"):
        rewritten("best", question(), Draw(0, STREAM, 0))
