"""Words and Boolean queries: BM25 by its formulas and on real collections, words of all scripts."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from qrag_jax.errors import InputError
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index
from qrag_jax.retrieval.boolean_search import (
    AND,
    DEEPEST,
    NOT,
    OR,
    BooleanIndex,
    Node,
    Operator,
    parse_boolean,
    sought,
)
from qrag_jax.retrieval.multi_step import SingleStepSearch
from qrag_jax.retrieval.protocol import NONE, Queries
from tests.retrieval.small_corpus import slow_bm25, stored

PLAIN: dict[str, Any] = {"stemmer": "", "stop_words": ""}


def test_scores_are_those_of_the_formula(tmp_path: Path) -> None:
    """A small random corpus with a word in every passage, rare ones, and passages of one word."""
    config = BM25Config(k1=0.9, b=0.4, **PLAIN)  # the defaults: tests/conformance/test_engines.py
    draw = random.Random(0)
    weights, known = [8, 7, 5, 3, 2, 1], ["aa", "bb", "cc", "dd", "ee", "ff"]
    words = [
        ["all", *draw.choices(known, weights, k=draw.choice((0, 1, 3, 30)))] for _ in range(25)
    ]
    index = BM25Index.build(stored(tmp_path, [" ".join(each) for each in words]), config)
    queries = ["all", "ff ee", "aa aa bb", "bb aa aa", "aa never bb", "", "all aa ff ff ff"]
    hits = index.search(Queries(queries), len(words))
    wanted = np.stack([slow_bm25(words, query.split(), config) for query in queries])
    wanted[wanted == 0] = -np.inf
    assert_allclose(np.sort(wanted)[:, ::-1], hits.scores, rtol=1e-5)
    of_found = np.take_along_axis(wanted, hits.numbers, axis=1)
    assert_allclose(np.where(hits.numbers == NONE, -np.inf, of_found), hits.scores, rtol=1e-5)


SCRIPTS = [
    *(("हिन्दी भाषा में लिखा", "भाषा हिन्दी"), ("ISPARTA İZMİR", "izmir")),
    *(("un cafe\u0301 noir", "caf\u00e9"), ("كِتَابٌ جَدِيدٌ", "كِتَابٌ"), ("猫", "猫")),
    *(("نمی\u200cخواهم بروم", "نمی\u200cخواهم"), ("我的北京大学在哪里", "北京")),
    *(("今日は東京タワーへ行く", "タワー"), ("대한민국의 수도는 서울이다", "수도")),
    *(("กรุงเทพมหานครเป็นเมืองหลวง", "เมือง"), ("Python3入門", "python3")),
    *(("Ｆｕｌｌ width ﬁne ﾃｽﾄ", "full fine テスト"), ("an exam\u00adple", "example")),
]


def test_words_of_all_scripts_are_found(tmp_path: Path) -> None:
    index = BM25Index.build(stored(tmp_path, ["other words", *(text for text, _ in SCRIPTS)]))
    boolean = BooleanIndex(index)
    for number, (_, query) in enumerate(SCRIPTS, 1):
        assert index.search(Queries([query]), 1).numbers.tolist() == [[number]], query
        assert number in boolean.search(Queries([query.split()[0] + "*"]), 9).numbers, query


def test_searching_words_asks_jax_for_no_device() -> None:
    """bm25s alone starts JAX's devices when it is imported."""
    code = """if True:
        from jax._src import xla_bridge
        from qrag_jax.retrieval import bm25
        print(bm25.Words(bm25.BM25Config())("the running dogs"))
        print(xla_bridge.backends_are_initialized())
        import jax
        print(jax.lax.top_k(jax.numpy.arange(5), 1)[1])
    """
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["['run', 'dog']", "False", "[4]"]


# ---------------------------------------------------------------------- Boolean queries


def trees(words: Sequence[str]) -> st.SearchStrategy[Node]:
    """Trees of these words, and of phrases of one to three of them."""
    phrases = st.lists(st.sampled_from(words), min_size=1, max_size=3).map(" ".join)
    leaves = st.sampled_from(words) | phrases

    def larger(nodes: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
        several = st.lists(nodes, min_size=2, max_size=3).map(tuple)
        return (
            nodes.map(lambda node: Operator(NOT, (node,)))
            | several.map(partial(Operator, OR))
            | several.map(partial(Operator, AND))
        )

    return st.recursive(leaves, larger, max_leaves=8)


def as_text(node: Node) -> str:
    """A query that is read as this tree."""
    if isinstance(node, str):
        return f'"{node}"[ti]'
    parts = [f"({as_text(each)})" for each in node.nodes]
    return f"NOT {parts[0]}" if node.kind == NOT else f" {node.kind} ".join(parts)


# Queries, and what means the same. Neighbours are joined by AND; NOT binds closer than AND, and AND
# than OR; only upper case is an operator, and only as a whole word; phrases stand in any quotes,
# fields have no effect, and other marks are no operators.
SAME = """
a b c ≡ a AND b AND c
a OR b AND c ≡ a OR (b AND c)
a AND b OR c ≡ (a AND b) OR c
a AND b c ≡ a AND (b AND c)
a b OR c d ≡ (a AND b) OR (c AND d)
NOT a b ≡ (NOT a) AND b
a OR NOT b ≡ a OR (NOT b)
NOT NOT a ≡ NOT (NOT a)
((a)) ≡ a
a(b)c ≡ a AND b AND c
a and b ≡ a AND "and" AND b
ANDROID NOTES ≡ "ANDROID" AND "NOTES"
„AND  (a“ ≡ "AND (a"
a"b"c ≡ a AND b AND c
"a b" [MeSH  Terms:noexp] OR c ≡ "a b" OR c
NOT a[ti] b ≡ (NOT a) AND b
a["(] ≡ a
-a, | c ≡ "-a," AND "|" AND c
"""
UNREADABLE = [
    *("", "a AND", "a OR AND b", "AND a", "a AND (b OR c", "a) b", "a ( )", 'a "b c', 'a ""'),
    *("a[tiab", "a[[b]]", "[tiab] a", "(a OR b)[tiab]", "a AND[x] b", "wom*n", "NOT a AND NOT b"),
]


def test_queries_and_their_trees() -> None:
    for line in SAME.strip().splitlines():
        text, same = line.split(" ≡ ")
        assert parse_boolean(text) == parse_boolean(f"\n {text}\u00a0 ") == parse_boolean(same), (
            text
        )
    assert parse_boolean("a OR b") != parse_boolean("a AND b") != parse_boolean("b AND a")
    for text in UNREADABLE:
        with pytest.raises(InputError):
            parse_boolean(text)
    # A query may be long but not deep.
    assert parse_boolean("a AND " * 10_000 + "a") == Operator(AND, ("a",) * 10_001)
    parse_boolean("(" * DEEPEST + "a" + ")" * DEEPEST)
    for text in ("(" * DEEPEST + "(a)" + ")" * DEEPEST, "NOT " * 50_000):
        with pytest.raises(InputError, match=f"{DEEPEST}"):
            parse_boolean(text)


SPOKEN = ("run", "cat", "dog", "sea", "of", "well")


def slow_match(node: Node, words: list[str]) -> bool:
    """Whether a passage of these words matches, by the definitions."""
    if isinstance(node, Operator):
        parts = [slow_match(part, words) for part in node.nodes]
        return {AND: all(parts), OR: any(parts), NOT: not parts[0]}[node.kind]
    phrase = node.split()
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
    ranking = BM25Index.build(corpus, config)
    kept = corpus.folder.parent / "boolean"
    for other in (BM25Index.build(corpus), ranking):  # words that are read otherwise are not kept
        BooleanIndex(other, kept)
    return BooleanIndex(ranking, kept), ranking, passages


@settings(deadline=None, max_examples=150)
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
    alone = ranking.search(Queries([" ".join(leaves)]), 50)
    scored = dict(zip(alone.numbers[0].tolist(), alone.scores[0].tolist(), strict=True))
    wanted = [number for number, words in enumerate(passages) if slow_match(tree, words)]
    assert found == sorted(wanted, key=lambda number: (-scored.get(number, 0.0), number))
    assert hits.scores[0, : len(found)].tolist() == [scored.get(number, 0.0) for number in found]


def test_beginnings_are_those_of_words_before_they_are_stemmed(tmp_path: Path) -> None:
    """And words that are left out leave a gap within a phrase, but none at its ends."""
    texts = ["hypertension", "hypertensive", "hyper", "cardiac arrest", "cardiology", "general"]
    texts += ["bank of Norway", "the bank in Norway", "bank Norway", "bank sea Norway"]
    index = BooleanIndex(BM25Index.build(stored(tmp_path / "c", texts)))
    for query, wanted in (
        ("hypertensi*", {0, 1}),
        ("hypertension", {0, 1}),  # they have one stem
        ("cardi* NOT arrest", {4}),
        ('"cardi* arr*"', {3}),
        ("generalizations*", set()),  # though its stem is that of another word
        ('"bank of Norway"', {6, 7, 9}),
        ('"bank norway"', {8}),
        ('"the bank of the"', {6, 7, 8, 9}),
        ("sea AND NOT the", {9}),
    ):
        assert {*index.search(Queries([query]), 100).numbers[0]} == wanted | {NONE}, query
    both = index.search(Queries(["cardiac OR cardiology", "cardi*"]), 2)
    np.testing.assert_array_equal(both.scores[0], both.scores[1])


def test_a_query_that_cannot_be_read_has_no_hits(tmp_path: Path) -> None:
    index = BooleanIndex(BM25Index.build(stored(tmp_path / "c", ["cat", "dog"])))
    hits = index.search(Queries(["cat AND", "(dog", "dog", "NOT cat"]), 1)
    assert hits.numbers.tolist() == [[NONE], [NONE], [1], [NONE]]
    with pytest.raises(InputError):  # commands refuse it
        SingleStepSearch(index).check("(cat")
