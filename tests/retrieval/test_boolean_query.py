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
    ("text", "told"),
    [
        ("", "the query is empty at character 1"),
        (" \n", "the query is empty at character 1"),
        ("a AND", "AND at character 3 has no operand behind it"),
        ("a OR AND b", "OR at character 3 has no operand behind it"),
        ("(a OR) b", "OR at character 4 has no operand behind it"),
        ("NOT", "NOT at character 1 has no operand behind it"),
        ("a NOT AND b", "NOT at character 3 has no operand behind it"),
        ("AND a", "AND at character 1 has no operand before it"),
        ("a (OR b)", "OR at character 4 has no operand before it"),
        ("a AND (b OR c", "the parenthesis at character 7 is not closed"),
        ("a (", "the parenthesis at character 3 is not closed"),
        ("((a)", "the parenthesis at character 1 is not closed"),
        ("a) b", "the parenthesis at character 2 closes none"),
        (") a", "the parenthesis at character 1 closes none"),
        ("a ( )", "the parentheses at character 3 hold nothing"),
        ('a "b c', "the quotation mark at character 3 is not closed"),
        ('a ""', "the quotation marks at character 3 hold nothing"),
        ("a \u201c \u201d", "the quotation marks at character 3 hold nothing"),
        ("a[tiab", "the bracket at character 2 is not closed"),
        ("a[[b]]", "the bracket at character 2 is not closed"),
        ("a]", "the bracket at character 2 closes none"),
        ("a[ ]", "the brackets at character 2 hold nothing"),
        ("[tiab] a", "the field [tiab] at character 1 has no word or phrase directly before"),
        ("(a OR b)[tiab]", "the field [tiab] at character 9 has no word"),
        ("(a AND b[x][y])", "the field [y] at character 12 has no word"),
        ("a AND[x] b", "AND at character 3 has no operand behind it"),
        ("wom*n", "the asterisk at character 4 does not stand behind the beginning of a word"),
        ("a *itis", "the asterisk at character 3 does not"),
        ("a**", "the asterisk at character 3 does not"),
        ('a "b * c"', "the asterisk at character 6 does not"),
        ("NOT a", "the query has only words under NOT, from character 1 on"),
        ("NOT (a OR b)", "the query has only words under NOT"),
        ("NOT a AND NOT b", "the query has only words under NOT"),
        ("NOT NOT NOT a", "the query has only words under NOT"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(text: str, told: str) -> None:
    with pytest.raises(BooleanError) as error:
        parse_boolean(text)
    assert str(error.value).startswith(told)
    assert str(error.value).endswith(".")
    assert isinstance(error.value, ValueError)


def test_a_query_may_be_long_but_not_deep() -> None:
    for opening, closing, each in (("(", ")", 1), ("NOT NOT ", "", 2), ("(b OR NOT ", ")", 2)):
        times = DEEPEST // each
        deep = opening * times + "a" + closing * times
        parse_boolean(deep)
        with pytest.raises(BooleanError, match=f"more than {DEEPEST} NOTs and parentheses"):
            parse_boolean(f"b ({deep})")
    for text in ("(" * 50_000, "NOT " * 50_000):
        with pytest.raises(BooleanError, match="within each other"):
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
            with pytest.raises(BooleanError, match="words under"):
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
