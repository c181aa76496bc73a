from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index, Words
from qrag_jax.retrieval.boolean_query import (
    And,
    Leaf,
    Node,
    Not,
    Or,
)
from qrag_jax.retrieval.boolean_search import BooleanIndex
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.protocol import NONE, Passage, Queries
from qrag_jax.retrieval.single_step import SingleStepSearch
from qrag_jax.serving.searcher import Ask, SingleStep
from tests.retrieval.boolean_trees import as_text, random_tree
from tests.retrieval.conformance import OF_ALL, Engine, run_with
from tests.retrieval.small_corpus import stored

PLAIN: dict[str, Any] = {"stemmer": "", "stop_words": "", "word": r"\w+"}
STEMS = BM25Config()
SPOKEN = ("run", "running", "runs", "the", "of", "cat", "cats", "catalogue", "well", "x")
Slow = tuple[list[list[str]], Words, set[str]]  # passages as forms, how they are read, all forms

test_boolean = run_with(
    Engine(lambda corpus, _: BooleanIndex.build(corpus), BooleanIndex.open), OF_ALL
)


def numbers_of(index: BooleanIndex, query: str, k: int = 100) -> list[int]:
    """The hits in order."""
    found = index.search(Queries([query]), k).numbers[0]
    return found[found != NONE].tolist()


def slow_places(leaf: Leaf, slow: Slow) -> list[set[str] | None]:
    """For each place the words of which one must stand there; None: any. Both ends are sets."""
    _, words, forms = slow
    places: list[set[str] | None] = []
    for part in leaf.text.replace("-", " ").replace(",", " ").split():
        form = part.lower().rstrip("*")
        if part.endswith("*") and words.forms(form):
            alike = {words.word(each) for each in forms if each.startswith(form)}
            places.append({each for each in alike if each is not None})
        elif words.forms(form):
            word = words.word(form)
            places.append(None if word is None else {word})
    while places and places[0] is None:
        places.pop(0)
    while places and places[-1] is None:
        places.pop()
    return places


def slow_match(node: Node, passage: list[str], slow: Slow) -> bool | None:
    """Whether a passage matches, by the definitions; None: all words of the node are left out."""
    if isinstance(node, Not):
        inner = slow_match(node.node, passage, slow)
        return None if inner is None else not inner
    if isinstance(node, And | Or):
        each = [slow_match(part, passage, slow) for part in node.nodes]
        told = [value for value in each if value is not None]
        if not told:
            return None
        return all(told) if isinstance(node, And) else any(told)
    places = slow_places(node, slow)
    if not places:
        return None
    have = [slow[1].word(form) for form in passage]
    return any(
        all(place is None or have[start + i] in place for i, place in enumerate(places))
        for start in range(len(have) - len(places) + 1)
    )


def slow_sought(node: Node, negated: bool = False) -> Iterator[Leaf]:
    if isinstance(node, Not):
        yield from slow_sought(node.node, not negated)
    elif isinstance(node, And | Or):
        for part in node.nodes:
            yield from slow_sought(part, negated)
    elif not negated:
        yield node


def slow_numbers(node: Node, slow: Slow) -> list[int]:
    if not any(slow_places(leaf, slow) for leaf in slow_sought(node)):
        return []
    return [i for i, passage in enumerate(slow[0]) if slow_match(node, passage, slow)]


def read_slowly(texts: Sequence[str], config: BM25Config) -> Slow:
    words = Words(config)
    passages = [words.forms(text) for text in texts]
    return passages, words, {form for passage in passages for form in passage}


@pytest.mark.parametrize("config", [BM25Config(**PLAIN), STEMS], ids=["plain", "stems"])
def test_random_trees_find_what_the_definitions_say(config: BM25Config, tmp_path: Path) -> None:
    """And in the order of BM25 alone; what it does not score comes behind, by number."""
    words = (*SPOKEN, "dog", "unknown", "run*", "cat*", "runn*", "zzz*", "x*", "well-cat", "Cats,")
    sizes: list[int] = []
    for seed in range(6):
        draw = random.Random(seed)
        texts = [" ".join((".", *draw.choices(SPOKEN, k=draw.randrange(9)))) for _ in range(40)]
        index = BooleanIndex.build(stored(tmp_path / f"{seed}", ["dog", *texts]), config)
        ranking = BM25Index.build(index.corpus, config)
        slow = read_slowly(["dog", *texts], config)
        trees = [random_tree(draw, words, i % 5) for i in range(150)]
        trees = [tree for tree in trees if next(slow_sought(tree), None) is not None]
        hits = index.search(Queries([as_text(tree) for tree in trees]), 50)
        for tree, numbers, scores in zip(trees, hits.numbers, hits.scores, strict=True):
            wanted = slow_numbers(tree, slow)
            sizes.append(len(wanted))
            leaves = list(slow_sought(tree))
            if any("*" in leaf.text for leaf in leaves):
                assert sorted(numbers[numbers != NONE].tolist()) == wanted, as_text(tree)
                continue
            alone = ranking.search(Queries([" ".join(leaf.text for leaf in leaves)]), 50)
            scored = dict(zip(alone.numbers[0].tolist(), alone.scores[0].tolist(), strict=True))
            order = sorted(wanted, key=lambda number: (-scored.get(number, 0.0), number))
            assert numbers[numbers != NONE].tolist() == order, as_text(tree)
            got = scores[: len(order)].tolist()
            assert got == [scored.get(number, 0.0) for number in order]
    # Some find nothing, some everything, most something.
    assert 30 < sum(0 < size < 41 for size in sizes) < len(sizes)
    assert {0, 41} <= set(sizes)


def test_every_operator_has_an_effect(tmp_path: Path) -> None:
    texts = ["cat dog", "dog cat bird", "cat", "dog", "bird", "cat bird dog"]
    index = BooleanIndex.build(stored(tmp_path / "c", texts))
    for query, wanted in (
        ("cat dog", {0, 1, 5}),
        ("cat AND dog", {0, 1, 5}),
        ("cat OR dog", {0, 1, 2, 3, 5}),
        ("cat AND dog AND NOT bird", {0}),
        ("cat NOT bird", {0, 2}),
        ('"cat dog"', {0}),
        ('"dog cat" OR "bird dog"', {1, 5}),
        ('cat AND dog AND NOT "cat dog"', {1, 5}),
        ("bird AND (cat OR dog)", {1, 5}),
        ("bird OR cat AND dog", {0, 1, 4, 5}),
        ("cat AND NOT (dog OR bird)", {2}),
        ("cat AND NOT NOT dog", {0, 1, 5}),
        ("cat OR NOT dog", {0, 1, 2, 4, 5}),
        ("cat AND unknown", set()),
        ("cat OR unknown", {0, 1, 2, 5}),
        ("cat NOT unknown", {0, 1, 2, 5}),
    ):
        assert set(numbers_of(index, query)) == wanted, query
    # The same letters in lower case are stop words.
    assert set(numbers_of(index, "cat and not dog")) == {0, 1, 5}


def test_what_matches_is_ranked_by_what_is_looked_for(tmp_path: Path) -> None:
    texts = ["dog", "bird", "cat cow", "cat cat", "dog cat", "cow"]
    index = BooleanIndex.build(stored(tmp_path / "c", texts), BM25Config(b=0.0))
    assert numbers_of(index, "cat OR NOT dog") == [3, 2, 4, 1, 5]
    hits = index.search(Queries(["cat OR NOT dog", "cat OR NOT bird"]), 6)
    assert hits.scores[0, 3:5].tolist() == [0.0, 0.0]  # no hits of BM25's
    assert np.isneginf(hits.scores[0, 5:]).all()
    assert hits.numbers[1].tolist() == [3, 2, 4, 0, 5, NONE]
    assert numbers_of(index, "cat OR NOT dog", 4) == [3, 2, 4, 1]


def test_phrases_do_not_go_from_one_passage_to_the_next(tmp_path: Path) -> None:
    texts = ["a b", "c a", "b c", "a a b b", "b", "a"]
    index = BooleanIndex.build(stored(tmp_path / "c", texts), BM25Config(**PLAIN))
    assert set(numbers_of(index, '"a b"')) == {0, 3}
    assert numbers_of(index, '"b a"') == []
    assert numbers_of(index, '"a a b"') == [3]
    assert numbers_of(index, '"b b b"') == []
    assert numbers_of(index, '"unknown b"') == []
    assert set(numbers_of(index, '"b"')) == {0, 2, 3, 4}


def test_titles_are_searched_and_followed_by_the_text(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, [Passage("1", "of Oslo", "The bank"), Passage("2", "bank")])
    assert numbers_of(BooleanIndex.build(corpus), '"bank of Oslo"') == [0]


def test_stop_words_are_left_out_but_leave_a_gap(tmp_path: Path) -> None:
    texts = ["bank of Norway", "the bank in Norway", "bank Norway", "bank sea Norway", "x-ray"]
    index = BooleanIndex.build(stored(tmp_path / "c", texts))
    for query, wanted in (
        ('"bank of Norway"', {0, 1, 3}),
        ('"bank norway"', {2}),
        ('"the bank of the"', {0, 1, 2, 3}),  # at its ends it leaves none
        ('"the bank in Norway"', {0, 1, 3}),
        ('"of the"', set()),
        ("the AND sea", {3}),
        ("the OR sea", {3}),
        ("sea AND NOT the", {3}),
        ("sea OR NOT (the OR of)", {3}),
        ("the", set()),
        ("the NOT bank", set()),
        ("the OR NOT bank", set()),
        ("x", set()),  # too short a word for the index
        ("? AND sea", {3}),
        ("x-ray", {4}),
        ("", set()),
    ):
        assert set(numbers_of(index, query)) == wanted, query
    everything = BM25Config(stop_words="")
    index = BooleanIndex.build(index.corpus, everything)
    assert numbers_of(index, '"bank of Norway"') == [0]
    assert numbers_of(index, "the") == [1]


def test_a_word_of_several_words_is_a_phrase(tmp_path: Path) -> None:
    texts = ["well known", "known well", "a well-known one"]
    index = BooleanIndex.build(stored(tmp_path / "c", texts))
    assert set(numbers_of(index, "well-known")) == {0, 2}
    assert set(numbers_of(index, "well known")) == {0, 1, 2}


def test_beginnings_are_those_of_words_before_they_are_stemmed(tmp_path: Path) -> None:
    texts = ["hypertension", "hypertensive", "hyper", "cardiac arrest", "cardiology", "thesis"]
    texts.append("general")
    index = BooleanIndex.build(stored(tmp_path / "c", texts))
    assert Words(STEMS)("hypertension") == ["hypertens"]
    for query, wanted in (
        ("hypertensi*", {0, 1}),
        ("hypertension", {0, 1}),  # they have one stem
        ("HYPER*", {0, 1, 2}),
        ("cardi* NOT arrest", {4}),
        ('"cardi* arr*"', {3}),
        ('"cardi* ology"', set()),
        ("the*", {5}),
        ("cardiologyy*", set()),
        ("cardiology*,", {4}),
        ("zebra*", set()),
        ("generalizations*", set()),  # though its stem is that of another word
        ("hyper NOT hypertension*", {2}),
    ):
        assert set(numbers_of(index, query)) == wanted, query
    both = index.search(Queries(["cardiac OR cardiology", "cardi*"]), 2)
    np.testing.assert_array_equal(both.scores[0], both.scores[1])


def test_fields_have_no_effect(tmp_path: Path) -> None:
    index = BooleanIndex.build(stored(tmp_path / "c", ["heart failure", "failure", "heart"]))
    given = '"heart failure"[MeSH Terms] OR (failure[ti] NOT heart[tiab])'
    assert numbers_of(index, given) == [0, 1]
    assert numbers_of(index, '"heart failure" OR (failure NOT heart)') == [0, 1]


def test_a_filter_leaves_scores_and_ties_as_they_are(tmp_path: Path) -> None:
    corpus = stored(tmp_path / "c", ["cat", "cat dog", "cat", "dog", "cat"], year=[1, 1, 2, 2, 2])
    index = BooleanIndex.build(corpus)
    query = Queries(["cat NOT dog", "cat OR NOT dog"])
    whole = index.search(query, 5)
    some = index.search(query, 3, {"year": 2})
    assert some.numbers.tolist() == [[2, 4, NONE], [2, 4, NONE]]
    np.testing.assert_array_equal(some.scores[0, :2], whole.scores[0, [1, 2]])
    with pytest.raises(InputError, match="month"):
        index.search(query, 2, {"month": 3})


def test_a_query_that_cannot_be_read_has_no_hits(tmp_path: Path) -> None:
    index = BooleanIndex.build(stored(tmp_path / "c", ["cat", "dog"]))
    hits = index.search(Queries(["cat AND", "(dog", "dog", "NOT cat"]), 1)
    assert hits.numbers.tolist() == [[NONE], [NONE], [1], [NONE]]
    search = SingleStepSearch(index)
    found = search.search(["cat AND", "cat"], 2)
    assert [[hit.id for hit in own] for own in found] == [[], ["p0"]]
    search.check("cat OR dog")
    with pytest.raises(InputError):  # commands refuse it, a server this question alone
        search.check("(cat")
    refused, answered = SingleStep(search).search([Ask("(cat"), Ask("cat")])
    assert isinstance(refused, InputError)
    assert isinstance(answered, list)
    assert [hit.id for hit in answered] == ["p0"]


def test_a_bag_of_words_matches_passages_with_all_of_them(tmp_path: Path) -> None:
    """BM25 alone also gives those with one of them."""
    index = BooleanIndex.build(stored(tmp_path / "c", ["cat dog", "cat", "dog"]))
    assert numbers_of(index, "cat dog") == [0]
    alone = BM25Index.build(index.corpus).search(Queries(["cat dog"]), 3)
    assert set(alone.numbers[0].tolist()) == {0, 1, 2}
