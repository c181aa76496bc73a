"""Retrievers over a question's own documents, and fusion, each against what it is by definition."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.own_documents import (
    DocumentSearch,
    EmbeddingScorer,
    OwnRetriever,
)


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

    def __call__(self, queries: Sequence[str], passages: Sequence[Sequence[str]]) -> list[Any]:
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


@pytest.mark.parametrize("name", ["bm25", "lexical"])
def test_words_rank_within_the_question(name: str) -> None:
    """Nothing is found where no word is; the rarer word of the question's documents counts for
    more."""
    wanted = [
        *(
            DocumentSearch(QUERY, 3, WORDY),
            DocumentSearch(QUERY, 9, WORDY),
            DocumentSearch(QUERY, 2, WORDY[3:]),
        ),
        *(
            DocumentSearch("stars", 2, WORDY),
            DocumentSearch("", 2, WORDY),
            DocumentSearch(QUERY, 2, (Doc("x", "!"),)),
        ),
        DocumentSearch(QUERY, 2, ()),
        DocumentSearch(
            "red green", 1, (Doc("a", "red blue"), Doc("b", "red green"), Doc("c", "red blue"))
        ),
    ]
    found = [names(each) for each in OwnRetriever(name).find(wanted)]
    assert found == ["abc", "abcde", "de", "", "", "", "", "b"]


def test_semantic_is_the_scorers_order_and_golden_knows() -> None:
    scorer = scorer_of("fedcba")
    wanted = [
        DocumentSearch("q", 2, WORDY),
        DocumentSearch("r", 9, WORDY[:3]),
        DocumentSearch("s", 2, ()),
    ]
    found = [names(each) for each in OwnRetriever("semantic", scorer).find(wanted)]
    assert found == ["fe", "cba", ""]
    assert scorer.calls == 1, "the pairs of all searches are one batch"
    wanted = [
        DocumentSearch("anything", 1, WORDY),
        DocumentSearch("", 5, WORDY[:1]),
        DocumentSearch("", 5, ()),
    ]
    assert [names(each) for each in OwnRetriever("golden").find(wanted)] == ["be", "", ""]


@pytest.mark.parametrize(
    ("order", "k", "found"),
    # By hand after RLVR's rule: ⌊k/2⌋+1 semantic ones (f e d …), then as many by BM25 (a b c …);
    # where both agree, the place becomes free for what BM25 has next.
    [
        *(("fedcba", 1, "f"), ("fedcba", 2, "fe"), ("fedcba", 3, "fea"), ("fedcba", 4, "feda")),
        *(("fedcba", 6, "fedcab"), ("abfedc", 3, "ab"), ("afedcb", 3, "afb")),
    ],
)
def test_interleaved_by_hand(order: str, k: int, found: str) -> None:
    retriever = OwnRetriever("interleaved", scorer_of(order))
    assert names(retriever.find([DocumentSearch(QUERY, k, WORDY)])[0]) == found


def test_hybrid_is_reciprocal_rank_fusion() -> None:
    """Against the formula; the last document has nothing from BM25, which does not find it."""
    order = "fcaebd"
    ranks = {name: 1 / (61 + order.index(name)) for name in order}
    for rank, name in enumerate("abcde", 1):
        ranks[name] += 1 / (60 + rank)
    slow = "".join(sorted(ranks, key=lambda name: -ranks[name]))
    retriever = OwnRetriever("hybrid", scorer_of(order))
    for k in (1, 3, 6):
        assert names(retriever.find([DocumentSearch(QUERY, k, WORDY)])[0]) == slow[:k]


@pytest.mark.parametrize("name", ["semantic", "hybrid", "interleaved"])
def test_a_scorer_that_fails_is_a_failure(name: str) -> None:
    scorer = Scores({each.text: math.nan if each.id == "a" else 1.0 for each in WORDY})
    wanted = [
        DocumentSearch("lost", 2, WORDY[1:]),
        DocumentSearch("q", 1, WORDY[1:]),
        DocumentSearch("q", 1, WORDY),
    ]
    lost, good, bad = OwnRetriever(name, scorer).find(wanted)
    assert isinstance(lost, Failure)
    assert names(good) == "b"
    assert isinstance(bad, Failure), "a score that is not finite is none"
    assert OwnRetriever(name, scorer).find([]) == []
    with pytest.raises(InputError, match=name):
        OwnRetriever(name)  # without something that scores


def test_vectors_of_documents_are_made_once() -> None:
    asked: list[list[str]] = []
    lock = threading.Lock()

    def embed(texts: Sequence[str]) -> np.ndarray:
        with lock:
            asked.append(list(texts))
        return np.array([[text.count("whale"), text.count("ship")] for text in texts], np.float32)

    scorer = EmbeddingScorer(embed, embed, keep=6)
    retriever = OwnRetriever("semantic", scorer)
    for _ in range(2):
        assert names(retriever.find([DocumentSearch("ship", 2, WORDY)])[0]) == "fe"
    assert asked == [[each.text for each in WORDY], ["ship"], ["ship"]]
    (scores,) = scorer(["whale"], [["whale", "whale"]])
    assert scores is not None
    np.testing.assert_array_equal(scores, [1, 1])
    scorer(["whale"], [[WORDY[0].text]])
    assert asked[3::2] == [["whale"], [WORDY[0].text]], "the sixth text but one was given up"
