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
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.hybrid import FusedIndex, FusionConfig
from qrag_jax.retrieval.own_documents import (
    KeptVectors,
    Lexical,
    Wanted,
    WordIndexes,
    own_retriever,
)
from qrag_jax.retrieval.protocol import NONE, Queries
from qrag_jax.retrieval.scorers import EmbeddingScorer
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
        *(Wanted(QUERY, 3, WORDY), Wanted(QUERY, 9, WORDY), Wanted(QUERY, 2, WORDY[3:])),
        *(Wanted("stars", 2, WORDY), Wanted("", 2, WORDY), Wanted(QUERY, 2, (Doc("x", "!"),))),
        Wanted(QUERY, 2, ()),
        Wanted("red green", 1, (Doc("a", "red blue"), Doc("b", "red green"), Doc("c", "red blue"))),
    ]
    found = [names(each) for each in own_retriever(name).find(wanted)]
    assert found == ["abc", "abcde", "de", "", "", "", "", "b"]


def test_semantic_is_the_scorers_order_and_golden_knows() -> None:
    scorer = scorer_of("fedcba")
    wanted = [Wanted("q", 2, WORDY), Wanted("r", 9, WORDY[:3]), Wanted("s", 2, ())]
    found = [names(each) for each in own_retriever("semantic", scorer).find(wanted)]
    assert found == ["fe", "cba", ""]
    assert scorer.calls == 1, "the pairs of all searches are one batch"
    wanted = [Wanted("anything", 1, WORDY), Wanted("", 5, WORDY[:1]), Wanted("", 5, ())]
    assert [names(each) for each in own_retriever("golden").find(wanted)] == ["be", "", ""]


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
    retriever = own_retriever("interleaved", scorer_of(order))
    assert names(retriever.find([Wanted(QUERY, k, WORDY)])[0]) == found


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
    documents = (Doc("x", "!"), Doc("y", "?"))  # without words: the scorer ranks
    for name in ("hybrid", "interleaved"):
        retriever = own_retriever(name, Scores({"!": 1.0, "?": 2.0}))
        assert names(retriever.find([Wanted(QUERY, 2, documents)])[0]) == "yx"


@pytest.mark.parametrize("name", ["semantic", "hybrid", "interleaved"])
def test_a_scorer_that_fails_is_a_failure(name: str) -> None:
    scorer = Scores({each.text: math.nan if each.id == "a" else 1.0 for each in WORDY})
    wanted = [Wanted("lost", 2, WORDY[1:]), Wanted("q", 1, WORDY[1:]), Wanted("q", 1, WORDY)]
    lost, good, bad = own_retriever(name, scorer).find(wanted)
    assert isinstance(lost, Failure)
    assert names(good) == "b"
    assert isinstance(bad, Failure), "a score that is not finite is none"
    assert own_retriever(name, scorer).find([]) == []
    with pytest.raises(InputError, match=name):
        own_retriever(name)  # without something that scores
    with pytest.raises(InputError, match="1"):
        own_retriever(name, scorer).find([Wanted(QUERY, 0, WORDY)])


def test_threads_may_share_a_retriever() -> None:
    words = WordIndexes(keep=3)
    retriever = Lexical(words)
    wanted = [Wanted(QUERY, 2, WORDY[start:]) for start in range(5)] * 20
    alone = [retriever.find([one])[0] for one in wanted]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda one: retriever.find([one])[0], wanted)) == alone
    assert len(words) == 3  # indexes are kept, and no more than so many


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


@pytest.fixture
def corpus(tmp_path: Path) -> StoredCorpus:
    return stored(tmp_path / "corpus", [f"text {i}" for i in range(12)])


@pytest.mark.parametrize("weights", [(), (1.0, 0.25, 3.0)])
def test_sums_are_those_of_the_definition(weights: tuple[float, ...], corpus: StoredCorpus) -> None:
    """Three engines with random scores, some of them equal, some without any hit."""
    config = FusionConfig(weights=weights, constant=7.0, depth=5)
    draw = random.Random(0)
    for _ in range(40):
        sizes = [draw.choice((0, 1, 4, 9)) for _ in range(3)]
        tables = [
            {n: float(draw.randrange(-3, 4)) for n in draw.sample(range(12), s)} for s in sizes
        ]
        fused = FusedIndex([TableIndex(corpus, {"q": table}) for table in tables], config)
        sums = collections.Counter[int]()
        for weight, table in zip(weights or (1.0, 1.0, 1.0), tables, strict=True):
            ranking = sorted(table, key=lambda n: (-table[n], n))[:5]
            for rank, number in enumerate(ranking, start=1):
                sums[number] += weight / (7.0 + rank)
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


def test_three_engines_with_permuted_ranks_tie(corpus: StoredCorpus) -> None:
    """With this constant, the sum of the same three parts in another order is another float32."""
    ranks = [(9, 4, 1), (4, 1, 9), (1, 9, 4)]
    engines = [
        TableIndex(corpus, {"q": {n: -float(place) for place, n in enumerate(order)}})
        for order in ranks
    ]
    config = FusionConfig(constant=41.00000051005985)
    hits = FusedIndex(engines, config).search(Queries(["q"]), 4)
    assert hits.numbers.tolist() == [[1, 4, 9, NONE]]
    assert len(set(hits.scores[0, :3].tolist())) == 1


def test_engines_of_different_corpora_are_refused(corpus: StoredCorpus, tmp_path: Path) -> None:
    one, other = TableIndex(corpus, {}), TableIndex(stored(tmp_path / "other", ["another"]), {})
    FusedIndex([one, TableIndex(StoredCorpus(corpus.folder), {})])
    for engines, weights, word in (
        ([one, other], (), "engine 1"),
        ([one], (), "2 engines"),
        ([one, one], (1.0, 1.0, 1.0), "weights"),
    ):
        with pytest.raises(InputError, match=word):
            FusedIndex(engines, FusionConfig(weights=weights))
    for name, values in (("weights", {"weights": (1.0, 0.0)}), ("constant", {"constant": -1.0})):
        with pytest.raises(InputError, match=rf"config\.fusion\.{name}"):
            FusionConfig(**values)
