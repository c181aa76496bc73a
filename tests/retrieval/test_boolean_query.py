from __future__ import annotations

import random

import pytest

from qrag_jax.retrieval.boolean_query import (
    DEEPEST,
    And,
    BooleanError,
    Node,
    Not,
    Or,
    Phrase,
    Word,
    parse_boolean,
    sought,
)
from tests.retrieval.boolean_trees import as_text, random_tree

A, B, C, D = (Word(letter) for letter in "abcd")


def beside(*nodes: Node) -> And:
    return And(nodes)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a", A),
        ("a b c", beside(A, B, C)),
        ("a AND b AND c", And((A, B, C))),
        ("a OR b OR c", Or((A, B, C))),
        # NOT over AND over OR
        ("a OR b AND c", Or((A, And((B, C))))),
        ("a AND b OR c", Or((And((A, B)), C))),
        ("a b OR c d", Or((beside(A, B), beside(C, D)))),
        ("a AND b c", And((A, beside(B, C)))),
        ("NOT a OR b", Or((Not(A), B))),
        ("NOT a AND b", And((Not(A), B))),
        ("NOT a b", beside(Not(A), B)),
        ("a AND NOT b", And((A, Not(B)))),
        ("a NOT b", beside(A, Not(B))),
        ("a OR NOT b", Or((A, Not(B)))),
        ("NOT NOT a", Not(Not(A))),
        ("a AND NOT (b OR c)", And((A, Not(Or((B, C)))))),
        # Parentheses
        ("((a))", A),
        ("(a OR b) AND c", And((Or((A, B)), C))),
        ("a(b)c", beside(A, B, C)),
        ("(a AND b) AND c", And((And((A, B)), C))),
        ("(a b) c", beside(beside(A, B), C)),
        # Only upper case is an operator, and only as a whole word
        ("a and b", beside(A, Word("and"), B)),
        ("a Or not", beside(A, Word("Or"), Word("not"))),
        ("ANDROID NOTES", beside(Word("ANDROID"), Word("NOTES"))),
        ('a "AND"', beside(A, Phrase("AND"))),
        # Phrases
        ('"a b"', Phrase("a b")),
        ("\u201ca  (b\u201d", Phrase("a (b")),
        ("\u201eAND\ta\u201c", Phrase("AND a")),
        ('a"b"c', beside(A, Phrase("b"), C)),
        ("it's", Word("it's")),
        # Fields
        ("a[tiab]", Word("a")),
        ('"a b" [MeSH  Terms:noexp] OR c', Or((Phrase("a b"), C))),
        ("NOT a[ti] b", beside(Not(Word("a")), B)),
        ('a["(]', Word("a")),
        # Beginnings of words
        ("cardio*", Word("cardio*")),
        ("cardio*,(a)", beside(Word("cardio*,"), A)),
        ('"heart fail*"[ti]', Phrase("heart fail*")),
        # Other marks are no operators
        ("-a, +b | c & d", beside(*map(Word, ("-a,", "+b", "|", "c", "&", "d")))),
        ("日本 OR é", Or((Word("日本"), Word("é")))),
    ],
)
def test_queries_and_their_trees(text: str, tree: Node) -> None:
    assert parse_boolean(text) == tree
    assert parse_boolean(f"\n {text}\u00a0 ") == tree
    assert parse_boolean(as_text(tree)) == tree


@pytest.mark.parametrize(
    ("text", "place"),
    [
        *(("", 1), (" \n", 3), ("a AND", 6), ("a OR AND b", 6), ("(a OR) b", 6), ("NOT", 4)),
        *(("a NOT AND b", 7), ("AND a", 1), ("a (OR b)", 4), ("a AND (b OR c", 14), ("a (", 4)),
        *(("((a)", 5), ("a) b", 2), (") a", 1), ("a ( )", 5), ('a "b c', 3), ('a ""', 3)),
        *(("a \u201c \u201d", 3), ("a[tiab", 2), ("a[[b]]", 2), ("a]", 2), ("a[ ]", 2)),
        *(("[tiab] a", 1), ("(a OR b)[tiab]", 9), ("(a AND b[x][y])", 12), ("a AND[x] b", 6)),
        *(("wom*n", 4), ("a *itis", 3), ("a**", 3), ('a "b * c"', 6)),
        *(("NOT a", 1), ("NOT (a OR b)", 1), ("NOT a AND NOT b", 1), ("NOT NOT NOT a", 1)),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, place: int) -> None:
    with pytest.raises(BooleanError, match=f"at character {place}: "):
        parse_boolean(text)


def test_a_query_may_be_long_but_not_deep() -> None:
    for opening, closing, each in (("(", ")", 1), ("NOT NOT ", "", 2), ("(b OR NOT ", ")", 2)):
        times = DEEPEST // each
        deep = opening * times + "a" + closing * times
        parse_boolean(deep)
        with pytest.raises(BooleanError, match=f"{DEEPEST}"):
            parse_boolean(f"b ({deep})")
    for text in ("(" * 50_000, "NOT " * 50_000):
        with pytest.raises(BooleanError, match=f"{DEEPEST}"):
            parse_boolean(text)
    many = parse_boolean("a AND " * 10_000 + "a")
    assert many == And((A,) * 10_001)


def test_trees_are_written_and_read_again() -> None:
    draw = random.Random(0)
    refused = 0
    for number in range(1500):
        words = ("a", "b", "AN", "and", "x-ray*", "é,")
        tree = random_tree(draw, words, number % 6)
        text = as_text(tree)
        if any(True for _ in sought(tree)):
            assert parse_boolean(text) == tree, text
        else:
            refused += 1
            with pytest.raises(BooleanError, match="NOT"):
                parse_boolean(text)
    assert 0 < refused < 400


def test_any_text_is_read_or_refused() -> None:
    draw = random.Random(1)
    pieces = ("a", "b*", " ", " ", "(", ")", " AND ", " OR ", " NOT ", '"', "\u201d", "[x]", "]")
    read = 0
    for _ in range(5000):
        text = "".join(draw.choices(pieces, k=draw.randrange(1, 9)))
        try:
            tree = parse_boolean(text)
        except BooleanError:
            continue
        read += 1
        assert parse_boolean(as_text(tree)) == tree, text
    assert read > 200


def test_what_is_looked_for_is_under_no_not() -> None:
    tree = parse_boolean('a AND NOT (b OR NOT (c "d a")) NOT NOT d')
    assert list(sought(tree)) == [A, C, Phrase("d a"), D]
    assert list(sought(tree, negated=True)) == [B]
