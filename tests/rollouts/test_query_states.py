"""Questions of query writers on a corpus: keys and ids of gold pages, and what a corpus lacks."""

from __future__ import annotations

import pytest

from qrag_jax.data.sample import Page, QueryQuestion
from qrag_jax.environments.query_writing.state import BY_PASSAGE, BY_TITLE, QueryState, key_of
from qrag_jax.environments.tools.episode import Look
from qrag_jax.errors import InputError
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.rollouts.corpus_library import CorpusLibrary
from qrag_jax.rollouts.query_states import Lacking, states_on

LAKE, ADA, MORE = Page("The Lake", "Deep."), Page("Ada Berg", "Sails."), Page("Ada Bérg", "Old.")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> StoredCorpus:
    """Two passages are of one page, one has no title."""
    passages = [
        Passage("l", "Deep.", "The Lake"),
        Passage("a1", "Sails!", "Ada Berg"),
        Passage("a2", "Old.", "Ada Bérg"),
        Passage("n", "Nothing."),
        Passage("m", "Marks.", "!?"),
    ]
    return write_corpus(tmp_path_factory.mktemp("states") / "corpus", passages)


def asked(name: str, *gold: Page) -> QueryQuestion:
    return QueryQuestion(name, f"{name}?", ("yes",), gold, passages=gold)


def test_by_title_all_passages_of_a_page_are_gold(corpus: StoredCorpus) -> None:
    found = states_on([asked("q", ADA, LAKE, MORE), asked("t", Page("the lake"))], corpus, BY_TITLE)
    assert found.lacking == []
    assert found.summary == ""
    assert found.states == [
        QueryState(
            "q",
            "q?",
            ("yes",),
            hops=2,
            gold_ids=("a1", "a2", "l"),
            pages=("ada berg", "the lake"),
        ),
        QueryState("t", "t?", ("yes",), hops=1, gold_ids=("l",), pages=("the lake",)),
    ]


def test_by_passage_each_is_a_page(corpus: StoredCorpus) -> None:
    bare = Page("", "nothing")
    named = Page("Whatever", id="a2")
    found = states_on([asked("q", MORE, ADA, bare), asked("i", named)], corpus, BY_PASSAGE)
    assert [(each.pages, each.gold_ids, each.hops) for each in found.states] == [
        (("a2", "a1", "n"), ("a2", "a1", "n"), 3),
        (("a2",), ("a2",), 1),
    ]


@pytest.mark.parametrize("by", [BY_TITLE, BY_PASSAGE])
def test_keys_are_those_of_what_is_found(by: str, corpus: StoredCorpus) -> None:
    """The search is the one that gives the gold passages."""
    (state,) = states_on([asked("q", LAKE, ADA)], corpus, by).states
    (found,) = CorpusLibrary(corpus, None).look([(state, Look("x", 3))])
    assert isinstance(found, tuple)
    assert {key_of(each, by) for each in found} == set(state.pages)
    assert all(each.is_supporting for each in found)


def test_questions_that_lack_a_page_are_left_out_and_counted(corpus: StoredCorpus) -> None:
    rome, marks = Page("Rome", "Large."), Page("!?", "Marks.")
    given = [asked("a", LAKE), asked("b", LAKE, rome), asked("c", marks), asked("d", ADA)]
    found = states_on(given, corpus, BY_TITLE, 0.5)
    # A title of marks alone is a title, too.
    assert [each.id for each in found.states] == ["a", "c", "d"]
    assert found.lacking == [Lacking("b", "Rome")]
    assert found.summary == (
        "1 of 4 questions left out, of which the corpus lacks a gold page; the first is 'Rome' of b"
    )
    by_passage = states_on(given, corpus, BY_PASSAGE, 0.5)
    assert by_passage.lacking == [Lacking("b", "Rome")]
    with pytest.raises(InputError) as error:
        states_on(given, corpus, BY_TITLE, 0.2)
    assert str(error.value) == (
        "the corpus lacks a gold page of 1 of 4 questions (the first is 'Rome' of question b); "
        "give the corpus that they are about in config.search.index, or raise "
        "config.search.max_missing_share, 0.2."
    )
    with pytest.raises(InputError) as error:
        states_on(given[1:2], corpus, BY_TITLE, 1.0)
    assert str(error.value).endswith("are about in config.search.index.")


def test_what_pages_cannot_be_keyed_by(corpus: StoredCorpus) -> None:
    with pytest.raises(InputError, match=r"'The Lake' of question q .*gold_by to 'title'\.$"):
        states_on([asked("q", Page("The Lake"))], corpus, BY_PASSAGE)
    with pytest.raises(InputError, match=r"question q has no title; .*gold_by to 'passage'\.$"):
        states_on([asked("q", Page("", "Nothing."))], corpus, BY_TITLE)
    with pytest.raises(InputError, match="there is no question to search for"):
        states_on([], corpus, BY_TITLE)
