"""Boolean queries: read as trees, and what they find, by the definitions."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qrag_jax.errors import InputError
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index
from qrag_jax.retrieval.boolean_search import (
    AND,
    DEEPEST,
    NOT,
    OR,
    BooleanError,
    BooleanIndex,
    Leaf,
    Node,
    Operator,
    parse_boolean,
    sought,
)
from qrag_jax.retrieval.multi_step import SingleStepSearch
from qrag_jax.retrieval.protocol import NONE, Queries
from qrag_jax.serving.searcher import Ask, SingleStep
from tests.retrieval.small_corpus import stored


def And(*nodes: Node) -> Operator:
    return Operator(AND, nodes)


def Or(*nodes: Node) -> Operator:
    return Operator(OR, nodes)


def Not(node: Node) -> Operator:
    return Operator(NOT, (node,))


def trees(words: Sequence[str]) -> st.SearchStrategy[Node]:
    """Trees of these words, and of phrases of one to three of them."""
    phrases = st.lists(st.sampled_from(words), min_size=1, max_size=3).map(" ".join).map(Leaf)
    leaves = st.sampled_from(words).map(Leaf) | phrases

    def larger(nodes: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
        several = st.lists(nodes, min_size=2, max_size=3).map(tuple)
        return (
            nodes.map(Not)
            | several.map(partial(Operator, OR))
            | several.map(partial(Operator, AND))
        )

    return st.recursive(leaves, larger, max_leaves=8)


def as_text(node: Node) -> str:
    """A query that is read as this tree."""
    if isinstance(node, Leaf):
        return f'"{node.text}"[ti]'
    parts = [f"({as_text(each)})" for each in node.nodes]
    return f"NOT {parts[0]}" if node.kind == NOT else f" {node.kind} ".join(parts)


A, B, C, D = (Leaf(letter) for letter in "abcd")


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        *(("a", A), ("a b c", And(A, B, C)), ("a AND b AND c", And(A, B, C))),
        *(("a OR b OR c", Or(A, B, C)), ("a OR b AND c", Or(A, And(B, C)))),
        # NOT over AND over OR
        *(("a AND b OR c", Or(And(A, B), C)), ("a AND b c", And(A, And(B, C)))),
        ("a b OR c d", Or(And(A, B), And(C, D))),
        *(("NOT a OR b", Or(Not(A), B)), ("NOT a b", And(Not(A), B))),
        *(("a AND NOT b", And(A, Not(B))), ("a NOT b", And(A, Not(B)))),
        *(("a OR NOT b", Or(A, Not(B))), ("NOT NOT a", Not(Not(A)))),
        # Parentheses
        *(("((a))", A), ("(a OR b) AND c", And(Or(A, B), C)), ("a(b)c", And(A, B, C))),
        *(("(a AND b) AND c", And(And(A, B), C)), ("(a b) c", And(And(A, B), C))),
        # Only upper case is an operator, and only as a whole word
        *(("a and b", And(A, Leaf("and"), B)), ('a "AND"', And(A, Leaf("AND")))),
        ("ANDROID NOTES", And(Leaf("ANDROID"), Leaf("NOTES"))),
        # Phrases, fields, beginnings of words
        *(("\u201ca  (b\u201d", Leaf("a (b")), ("\u201eAND\ta\u201c", Leaf("AND a"))),
        *(('a"b"c', And(A, Leaf("b"), C)), ("it's", Leaf("it's")), ("a[tiab]", A)),
        ('"a b" [MeSH  Terms:noexp] OR c', Or(Leaf("a b"), C)),
        *(("NOT a[ti] b", And(Not(A), B)), ('a["(]', A), ("cardio*", Leaf("cardio*"))),
        ("cardio*,(a)", And(Leaf("cardio*,"), A)),
        ('"heart fail*"[ti]', Leaf("heart fail*")),
        # Other marks are no operators
        ("-a, +b | c & d", And(*map(Leaf, ("-a,", "+b", "|", "c", "&", "d")))),
        ("日本 OR é", Or(Leaf("日本"), Leaf("é"))),
    ],
)
def test_queries_and_their_trees(text: str, tree: Node) -> None:
    assert parse_boolean(text) == parse_boolean(f"\n {text}\u00a0 ") == tree
    assert parse_boolean(as_text(tree)) == tree


@pytest.mark.parametrize(
    "text",
    [
        *("", " \n", "a AND", "a OR AND b", "(a OR) b", "NOT", "a NOT AND b", "AND a", "a (OR b)"),
        *("a AND (b OR c", "a (", "((a)", "a) b", ") a", "a ( )", 'a "b c', 'a ""'),
        *("a \u201c \u201d", "a[tiab", "a[[b]]", "a]", "a[ ]", "[tiab] a", "(a OR b)[tiab]"),
        *("(a AND b[x][y])", "a AND[x] b", "wom*n", "a *itis", "a**", 'a "b * c"'),
        *("NOT a", "NOT (a OR b)", "NOT a AND NOT b", "NOT NOT NOT a"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(BooleanError):
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
    assert many == And(*[A] * 10_001)


PIECES = ("a", "b*", " ", "(", ")", " AND ", " OR ", " NOT ", '"', "\u201d", "[x]", "]")


@given(st.text() | st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        tree = parse_boolean(text)
    except BooleanError:
        return
    assert parse_boolean(as_text(tree)) == tree


SPOKEN = ("run", "cat", "dog", "sea", "of", "well")


def slow_match(node: Node, words: list[str]) -> bool:
    """Whether a passage of these words matches, by the definitions."""
    if isinstance(node, Operator):
        parts = [slow_match(part, words) for part in node.nodes]
        return {AND: all(parts), OR: any(parts), NOT: not parts[0]}[node.kind]
    phrase = node.text.split()
    return any(words[i : i + len(phrase)] == phrase for i in range(len(words)))


@pytest.fixture(scope="module")
def drawn(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[BooleanIndex, BM25Index, list[list[str]]]:
    """A random corpus."""
    draw = random.Random(0)
    passages = [draw.choices(SPOKEN, k=draw.randrange(1, 9)) for _ in range(40)]
    corpus = stored(tmp_path_factory.mktemp("c") / "c", [" ".join(words) for words in passages])
    config = BM25Config(stemmer="", stop_words="")
    return BooleanIndex.build(corpus, config), BM25Index.build(corpus, config), passages


@settings(deadline=None, max_examples=300)
@given(tree=trees((*SPOKEN, "unknown")))
def test_trees_find_what_the_definitions_say(
    tree: Node, drawn: tuple[BooleanIndex, BM25Index, list[list[str]]]
) -> None:
    """And in the order of BM25 alone; what it does not score comes behind, by number."""
    index, ranking, passages = drawn
    if not (leaves := list(sought(tree))):
        return
    hits = index.search(Queries([as_text(tree)]), 50)
    found = hits.numbers[0][hits.numbers[0] != NONE].tolist()
    alone = ranking.search(Queries([" ".join(leaf.text for leaf in leaves)]), 50)
    scored = dict(zip(alone.numbers[0].tolist(), alone.scores[0].tolist(), strict=True))
    wanted = [number for number, words in enumerate(passages) if slow_match(tree, words)]
    assert found == sorted(wanted, key=lambda number: (-scored.get(number, 0.0), number))
    assert hits.scores[0, : len(found)].tolist() == [scored.get(number, 0.0) for number in found]


def numbers_of(index: BooleanIndex, query: str) -> list[int]:
    """The hits in order."""
    found = index.search(Queries([query]), 100).numbers[0]
    return found[found != NONE].tolist()


def test_beginnings_are_those_of_words_before_they_are_stemmed(tmp_path: Path) -> None:
    """And words that are left out leave a gap within a phrase, but none at its ends."""
    texts = ["hypertension", "hypertensive", "hyper", "cardiac arrest", "cardiology", "general"]
    texts += ["bank of Norway", "the bank in Norway", "bank Norway", "bank sea Norway"]
    index = BooleanIndex.build(stored(tmp_path / "c", texts))
    for query, wanted in (
        ("hypertensi*", {0, 1}),
        ("hypertension", {0, 1}),  # they have one stem
        ("HYPER*", {0, 1, 2}),
        ("cardi* NOT arrest", {4}),
        ('"cardi* arr*"', {3}),
        ("generalizations*", set()),  # though its stem is that of another word
        ('"bank of Norway"', {6, 7, 9}),
        ('"bank norway"', {8}),
        ('"the bank of the"', {6, 7, 8, 9}),
        ("sea AND NOT the", {9}),
        ("the OR NOT bank", set()),
    ):
        assert set(numbers_of(index, query)) == wanted, query
    both = index.search(Queries(["cardiac OR cardiology", "cardi*"]), 2)
    np.testing.assert_array_equal(both.scores[0], both.scores[1])


def test_a_query_that_cannot_be_read_has_no_hits(tmp_path: Path) -> None:
    index = BooleanIndex.build(stored(tmp_path / "c", ["cat", "dog"]))
    hits = index.search(Queries(["cat AND", "(dog", "dog", "NOT cat"]), 1)
    assert hits.numbers.tolist() == [[NONE], [NONE], [1], [NONE]]
    search = SingleStepSearch(index)
    found = search.search(["cat AND", "cat"], 2)
    assert [[hit.id for hit in own] for own in found] == [[], ["p0"]]
    with pytest.raises(InputError):  # commands refuse it, a server this question alone
        search.check("(cat")
    refused, answered = SingleStep(search).search([Ask("(cat"), Ask("cat")])
    assert isinstance(refused, InputError)
    assert [hit.id for hit in answered] == ["p0"]


def test_an_index_that_was_not_finished_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk while BM25's files are replaced; then it is saved whole over what is there."""
    corpus, folder = stored(tmp_path / "c", ["cat", "dog"]), tmp_path / "i"
    index = BooleanIndex.build(corpus)
    index.save(folder)
    with monkeypatch.context() as patch:
        patch.setattr(BM25Index, "save", lambda self, folder: os.close(-1))
        with pytest.raises(OSError, match="Bad file"):
            index.save(folder)
    with pytest.raises(InputError, match=str(folder)):
        BooleanIndex.open(folder, corpus)
    index.save(folder)
    assert BooleanIndex.open(folder, corpus).search(Queries(["cat"]), 1).numbers.tolist() == [[0]]
