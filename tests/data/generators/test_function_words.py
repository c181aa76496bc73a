from __future__ import annotations

from qrag_jax.data.generators.function_words import content_words, words_of
from qrag_jax.data.generators.invented_world import KINDS, RELATIONS


def test_words_stand_without_the_marks_around_them() -> None:
    text = "“Don't”, she said (again): well-known X, 3.5 % — o'er…"
    assert words_of(text) == ["Don't", "she", "said", "again", "well-known", "X", "3", "5", "o'er"]
    assert words_of(" ?! ") == []


def test_function_words_are_left_out_in_whatever_case() -> None:
    assert content_words("Which company IS the owner of The Sea?") == ["company", "owner", "Sea"]
    assert content_words("To be or not to be") == []


def test_every_relation_and_aside_of_the_world_keeps_a_word() -> None:
    for relation in RELATIONS:
        for question in relation.questions:
            assert content_words(question.format(x="")), question
    for kind in KINDS.values():
        assert all(map(content_words, kind.asides))
