"""Retrievers over a question's own documents, each against what it is by definition."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index
from qrag_jax.retrieval.hybrid import FusionConfig
from qrag_jax.retrieval.own_documents import (
    RETRIEVERS,
    Interleaved,
    KeptVectors,
    Lexical,
    Wanted,
    WordIndexes,
    own_retriever,
)
from qrag_jax.retrieval.scorers import EmbeddingScorer


class Doc(NamedTuple):
    id: str
    text: str
    is_supporting: bool = False


# The query's word stands in them 5, 4, 3, 2, 1 and 0 times, all of 6 words: BM25 ranks a b c d e.
WORDY = tuple(
    Doc(name, " ".join(["whale"] * count + ["ship"] * (6 - count)), name in "be")
    for name, count in zip("abcdef", (5, 4, 3, 2, 1, 0))
)
QUERY = "Whales?"


class Scores:
    """Scores that are written down, by text; counts how often it was asked."""

    def __init__(self, scores: Mapping[str, float]) -> None:
        self._scores, self.calls = scores, 0

    def scores(
        self, queries: Sequence[str], passages: Sequence[Sequence[str]]
    ) -> list[np.ndarray | None]:
        self.calls += 1
        return [
            None if query == "lost" else np.array([self._scores[text] for text in texts])
            for query, texts in zip(queries, passages, strict=True)
        ]


def scorer_of(order: str) -> Scores:
    """Ranks the documents as their names stand in `order`."""
    return Scores({each.text: -float(order.index(each.id)) for each in WORDY})


def names(reply: tuple[Doc, ...] | Failure) -> str:
    assert not isinstance(reply, Failure)
    return "".join(each.id for each in reply)


def test_golden_knows() -> None:
    wanted = [Wanted("anything", 1, WORDY), Wanted("", 5, WORDY[:1]), Wanted("", 5, ())]
    assert [names(each) for each in own_retriever("golden").find(wanted)] == ["be", "", ""]


@pytest.mark.parametrize("name", ["bm25", "lexical"])
def test_bm25(name: str) -> None:
    retriever = own_retriever(name)
    wanted = [
        Wanted(QUERY, 3, WORDY),
        Wanted(QUERY, 9, WORDY),
        Wanted(QUERY, 2, WORDY[3:]),
        Wanted("stars", 2, WORDY),
        Wanted("", 2, WORDY),
        Wanted(QUERY, 2, (Doc("x", "!"),)),
        Wanted(QUERY, 2, ()),
    ]
    found = [names(each) for each in retriever.find(wanted)]
    assert found == ["abc", "abcde", "de", "", "", "", ""]


def test_bm25_scores_within_the_question() -> None:
    """A word's weight is that in the question's documents: the rarer word counts for more."""
    documents = (Doc("a", "red blue"), Doc("b", "red green"), Doc("c", "red blue"))
    found = own_retriever("bm25").find([Wanted("red green", 1, documents)])
    assert names(found[0]) == "b"


def test_semantic_is_the_scorers_order() -> None:
    scorer = scorer_of("fedcba")
    wanted = [Wanted("q", 2, WORDY), Wanted("r", 9, WORDY[:3]), Wanted("s", 2, ())]
    found = [names(each) for each in own_retriever("semantic", scorer).find(wanted)]
    assert found == ["fe", "cba", ""]
    assert scorer.calls == 1, "the pairs of all searches are one batch"


@pytest.mark.parametrize(
    ("k", "given"),
    # By hand after RLVR's rule: ⌊k/2⌋+1 semantic ones (f e d …), then as many by BM25 (a b c …).
    [(1, "f"), (2, "fe"), (3, "fea"), (4, "feda"), (5, "fedab"), (6, "fedcab")],
)
def test_interleaved_by_hand(k: int, given: str) -> None:
    retriever = own_retriever("interleaved", scorer_of("fedcba"))
    assert names(retriever.find([Wanted(QUERY, k, WORDY)])[0]) == given


def test_interleaved_has_no_doubles() -> None:
    """Both agree on a: the place becomes free for what BM25 has next."""
    retriever = own_retriever("interleaved", scorer_of("abfedc"))
    assert names(retriever.find([Wanted(QUERY, 3, WORDY)])[0]) == "ab"
    retriever = own_retriever("interleaved", scorer_of("afedcb"))
    assert names(retriever.find([Wanted(QUERY, 3, WORDY)])[0]) == "afb"


def test_hybrid_is_reciprocal_rank_fusion() -> None:
    """Against the formula; the last document has nothing from BM25, which does not find it."""
    order = "fcaebd"
    ranks = {each.id: 1 / (60 + 1 + order.index(each.id)) for each in WORDY}
    for rank, name in enumerate("abcde", 1):
        ranks[name] += 1 / (60 + rank)
    slow = "".join(sorted(ranks, key=lambda name: -ranks[name]))
    retriever = own_retriever("hybrid", scorer_of(order))
    for k in (1, 2, 3, 6):
        assert names(retriever.find([Wanted(QUERY, k, WORDY)])[0]) == slow[:k]


def test_hybrid_uses_both_lists_at_two() -> None:
    """The first of each list; RLVR's rule takes two of the scorer's, none of BM25's."""
    wanted = [Wanted(QUERY, 2, (WORDY[5], Doc("g", "boat"), Doc("h", "mast"), WORDY[0]))]
    scorer = Scores({WORDY[5].text: 4.0, "boat": 3.0, "mast": 2.0, WORDY[0].text: 1.0})
    assert names(own_retriever("hybrid", scorer).find(wanted)[0]) == "af"
    assert names(own_retriever("interleaved", scorer).find(wanted)[0]) == "fg"
    weights = FusionConfig(weights=(0.01, 1.0))
    assert names(own_retriever("hybrid", scorer, fusion=weights).find(wanted)[0]) == "fg"


def test_documents_without_words_are_ranked_by_the_scorer() -> None:
    documents = (Doc("x", "!"), Doc("y", "?"))
    for name in ("hybrid", "interleaved"):
        retriever = own_retriever(name, Scores({"!": 1.0, "?": 2.0}))
        assert names(retriever.find([Wanted(QUERY, 2, documents)])[0]) == "yx"


@pytest.mark.parametrize("name", ["semantic", "hybrid", "interleaved"])
def test_a_scorer_that_fails_is_a_failure(name: str) -> None:
    scorer = Scores({each.text: math.nan if each.id == "a" else 1.0 for each in WORDY})
    wanted = [Wanted("lost", 2, WORDY[1:]), Wanted("q", 1, WORDY[1:]), Wanted("q", 1, WORDY)]
    lost, good, bad = own_retriever(name, scorer).find(wanted)
    assert isinstance(lost, Failure)
    assert "no scores of the 5 documents for 'lost'" in lost.message
    assert names(good) == "b"
    assert isinstance(bad, Failure), "a score that is not finite is none"
    assert own_retriever(name, scorer).find([]) == []


@pytest.mark.parametrize("name", RETRIEVERS)
def test_no_document_wanted_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="ask for 1"):
        own_retriever(name, scorer_of("abcdef")).find([Wanted(QUERY, 0, WORDY)])


def test_an_unknown_or_unfurnished_retriever_is_refused() -> None:
    with pytest.raises(InputError, match="'dense'"):
        own_retriever("dense")
    for name in ("semantic", "hybrid", "interleaved"):
        with pytest.raises(InputError, match=f"'{name}' needs something that scores documents"):
            own_retriever(name)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many documents each index had that was built."""
    counts: list[int] = []
    build: Callable[..., BM25Index] = BM25Index.build

    def counted(corpus: Sequence[object], config: BM25Config) -> BM25Index:
        counts.append(len(corpus))
        return build(corpus, config)

    monkeypatch.setattr(BM25Index, "build", counted)
    return counts


def test_indexes_are_built_once_and_kept(built: list[int]) -> None:
    words = WordIndexes(keep=2)
    lexical, mixed = Lexical(words), Interleaved(words, scorer_of("abcdef"))
    for _ in range(2):
        lexical.find([Wanted("whale", 1, WORDY), Wanted("ship", 1, WORDY)])
        mixed.find([Wanted("ship", 1, WORDY)])
    assert built == [6]
    lexical.find([Wanted("ship", 1, WORDY[:3]), Wanted("ship", 1, WORDY)])
    lexical.find([Wanted("ship", 1, WORDY[:4])])
    assert built == [6, 3, 4]
    assert len(words) == 2
    lexical.find([Wanted("ship", 1, WORDY)])
    assert built == [6, 3, 4], "the one used longest ago was given up"
    lexical.find([Wanted("ship", 1, WORDY[:3])])
    assert built == [6, 3, 4, 3]


def test_threads_may_share_a_retriever() -> None:
    retriever = Lexical(WordIndexes(keep=3))
    wanted = [Wanted(QUERY, 2, WORDY[start:]) for start in range(5)] * 20
    alone = [retriever.find([one])[0] for one in wanted]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda one: retriever.find([one])[0], wanted)) == alone


def test_vectors_of_documents_are_made_once() -> None:
    asked: list[list[str]] = []
    lock = threading.Lock()

    def embed(texts: Sequence[str]) -> np.ndarray:
        with lock:
            asked.append(list(texts))
        return np.array([[text.count("whale"), text.count("ship")] for text in texts], np.float32)

    kept = KeptVectors(embed, keep=6)
    retriever = own_retriever("semantic", EmbeddingScorer(embed, kept))
    for _ in range(2):
        assert names(retriever.find([Wanted("ship", 2, WORDY)])[0]) == "fe"
    assert asked == [[each.text for each in WORDY], ["ship"], ["ship"]]
    np.testing.assert_array_equal(kept(["whale", "whale"]), [[1, 0], [1, 0]])
    kept([WORDY[0].text])
    assert asked[3:] == [["whale"], [WORDY[0].text]], "the sixth text but one was given up"
