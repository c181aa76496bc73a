"""Retrievers over a question's own documents, and fusion, each against what it is by definition."""

from __future__ import annotations

import collections
import math
import random
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval import protocol
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.own_documents import (
    DocumentSearch,
    EmbeddingScorer,
    KeptVectors,
    OwnRetriever,
)
from qrag_jax.retrieval.protocol import DEPTH, NONE, FusedIndex, Queries
from tests.retrieval.small_corpus import TableIndex, stored


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

    def scores(self, queries: Sequence[str], passages: Sequence[Sequence[str]]) -> list[Any]:
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
    ranks = {each.id: 1 / (60 + 1 + order.index(each.id)) for each in WORDY}
    for rank, name in enumerate("abcde", 1):
        ranks[name] += 1 / (60 + rank)
    slow = "".join(sorted(ranks, key=lambda name: -ranks[name]))
    retriever = OwnRetriever("hybrid", scorer_of(order))
    for k in (1, 2, 3, 6):
        assert names(retriever.find([DocumentSearch(QUERY, k, WORDY)])[0]) == slow[:k]


def test_hybrid_uses_both_lists_at_two() -> None:
    """The first of each list; RLVR's rule takes two of the scorer's, none of BM25's."""
    wanted = [DocumentSearch(QUERY, 2, (WORDY[5], Doc("g", "boat"), Doc("h", "mast"), WORDY[0]))]
    scorer = Scores({WORDY[5].text: 4.0, "boat": 3.0, "mast": 2.0, WORDY[0].text: 1.0})
    assert names(OwnRetriever("hybrid", scorer).find(wanted)[0]) == "af"
    assert names(OwnRetriever("interleaved", scorer).find(wanted)[0]) == "fg"
    documents = (Doc("x", "!"), Doc("y", "?"))  # without words: the scorer ranks
    for name in ("hybrid", "interleaved"):
        retriever = OwnRetriever(name, Scores({"!": 1.0, "?": 2.0}))
        assert names(retriever.find([DocumentSearch(QUERY, 2, documents)])[0]) == "yx"


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
    with pytest.raises(InputError, match="1"):
        OwnRetriever(name, scorer).find([DocumentSearch(QUERY, 0, WORDY)])


def test_threads_may_share_a_retriever() -> None:
    retriever = OwnRetriever("bm25", keep=3)
    wanted = [DocumentSearch(QUERY, 2, WORDY[start:]) for start in range(5)] * 20
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
    retriever = OwnRetriever("semantic", EmbeddingScorer(embed, kept))
    for _ in range(2):
        assert names(retriever.find([DocumentSearch("ship", 2, WORDY)])[0]) == "fe"
    assert asked == [[each.text for each in WORDY], ["ship"], ["ship"]]
    np.testing.assert_array_equal(kept(["whale", "whale"]), [[1, 0], [1, 0]])
    kept([WORDY[0].text])
    assert asked[3:] == [["whale"], [WORDY[0].text]], "the sixth text but one was given up"


@pytest.fixture
def corpus(tmp_path: Path) -> StoredCorpus:
    return stored(tmp_path / "corpus", [f"text {i}" for i in range(12)])


def test_sums_are_those_of_the_definition(corpus: StoredCorpus) -> None:
    """Three engines with random scores, some of them equal, some without any hit."""
    draw = random.Random(0)
    for _ in range(40):
        sizes = [draw.choice((0, 1, 4, 9)) for _ in range(3)]
        tables = [
            {n: float(draw.randrange(-3, 4)) for n in draw.sample(range(12), s)} for s in sizes
        ]
        fused = FusedIndex([TableIndex(corpus, {"q": table}) for table in tables])
        sums = collections.Counter[int]()
        for table in tables:
            ranked = sorted(table, key=lambda n: (-table[n], n))[:DEPTH]
            for rank, number in enumerate(ranked, start=1):
                sums[number] += 1 / (60 + rank)
        order = sorted(sums, key=lambda n: (-round(sums[n], 7), n))
        for k in (1, 2, 5):
            hits = fused.search(Queries(["q"]), k)
            numbers = hits.numbers[0][hits.numbers[0] != NONE].tolist()
            assert numbers == order[:k]
            np.testing.assert_allclose(
                hits.scores[0, : len(numbers)], [sums[n] for n in numbers], rtol=1e-6
            )
    nothing = fused.search(Queries(["unknown"]), 2)
    assert nothing.numbers.tolist() == [[NONE, NONE]]


def test_three_engines_with_permuted_ranks_tie(
    corpus: StoredCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With this constant, the sum of the same three parts in another order is another float32."""
    monkeypatch.setattr(protocol, "_CONSTANT", 41.00000051005985)
    ranks = [(9, 4, 1), (4, 1, 9), (1, 9, 4)]
    engines = [
        TableIndex(corpus, {"q": {n: -float(place) for place, n in enumerate(order)}})
        for order in ranks
    ]
    hits = FusedIndex(engines).search(Queries(["q"]), 4)
    assert hits.numbers.tolist() == [[1, 4, 9, NONE]]
    assert len(set(hits.scores[0, :3].tolist())) == 1
