"""Questions with settings of their own, searched together as if each were alone."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.multi_step import Hit, MultiStepSearch, SingleStepSearch
from qrag_jax.retrieval.protocol import Queries
from qrag_jax.retrieval.vectors import FaissIndex
from qrag_jax.serving.searcher import Ask, MultiStep, Searcher, SingleStep
from tests.retrieval.test_multi_step import CORPUS, GREEDY, search_of, towers_of
from tests.retrieval.test_multi_step import QUESTIONS as ALL
from tests.serving.small_index import words_index

_LONG = towers_of(0).cut(ALL)
QUESTIONS = [question for place, question in enumerate(ALL) if place not in _LONG]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> BM25Index:
    folder = tmp_path_factory.mktemp("words")
    return BM25Index.open(folder / "bm25", words_index(folder))


@pytest.fixture(scope="module")
def words(index: BM25Index) -> SingleStep:
    return SingleStep(SingleStepSearch(index))


@pytest.fixture(scope="module")
def trained() -> MultiStepSearch:
    return search_of(CORPUS, GREEDY)


def hits_of(searcher: Searcher, ask: Ask) -> list[Hit]:
    (outcome,) = searcher.search([ask])
    assert isinstance(outcome, list), outcome
    return outcome


def test_each_question_has_its_own_settings(words: SingleStep, index: BM25Index) -> None:
    asks = [
        Ask("about cats"),
        Ask("about cats", count=9),
        Ask("about cats", where={"page": 1}),
        Ask("about dogs", count=1),
        Ask("about cats", threshold=0.5),
        Ask("about cats", where={"page": [0, 1]}, count=2),
    ]
    outcomes: Any = words.search(asks)
    assert [[outcome] for outcome in outcomes] == [words.search([ask]) for ask in asks]
    everything = index.search(Queries(["about cats"]), 10)
    ranked = [f"p{n}" for n in everything.numbers[0]]
    above = [n for n, s in zip(ranked, everything.scores[0], strict=True) if s > 0.5]
    assert 0 < len(above) < 3
    assert [[hit.id for hit in outcome] for outcome in outcomes] == [
        ranked[:3],
        ranked[:9],
        [name for name in ranked if int(name[1:]) % 3 == 1][:3],
        ["p1"],
        above,
        [name for name in ranked if int(name[1:]) % 3 != 2][:2],
    ]
    first = outcomes[3][0]
    text = "All about dogs\nand more of it."
    assert (first.step, first.title, first.text, first.metadata) == (1, "Dogs", text, {"page": 1})


REFUSED = [
    (Ask(" \n"), "question"),
    (Ask("cats \ud800"), "surrogate"),
    (Ask("cats", count=11), "topk is 11"),
    (Ask("cats", steps=2), "steps is 2"),
    (Ask("cats", beam=4), "beam is 4"),
    (Ask("cats", where={"pag": 1}), "'pag'"),
]
REFUSED_BY_RETRIEVERS = [
    (Ask("who", steps=4), "steps is 4"),
    (Ask("who", beam=65), "beam is 65"),
    (Ask("word " * 500), "longer"),
    (Ask("who", where={"odd": True}), "odd"),
]


@pytest.mark.parametrize("kind", ["words", "trained"])
def test_a_refused_question_spoils_no_other(kind: str, request: pytest.FixtureRequest) -> None:
    searcher: Searcher = request.getfixturevalue("words")
    cases, good = REFUSED, [Ask("cats"), Ask("dogs", count=2, where={"page": 1})]
    if kind == "trained":
        searcher = MultiStep(request.getfixturevalue("trained"))
        cases, good = REFUSED_BY_RETRIEVERS, [Ask(QUESTIONS[0]), Ask(QUESTIONS[0], steps=2)]
    expected: Any = searcher.search(good)
    for ask, told in cases:
        first, refused, last = searcher.search([good[0], ask, good[1]])
        assert isinstance(refused, InputError)
        assert told in str(refused)
        same(first, expected[0])  # type: ignore[arg-type]
        same(last, expected[1])  # type: ignore[arg-type]


def test_an_engine_s_own_refusal_is_no_fault_of_the_question(tmp_path: Path) -> None:
    """Without vectors an engine refuses every query: the server is set up wrongly."""
    corpus = words_index(tmp_path)
    index = FaissIndex(corpus, np.eye(len(corpus), 4, dtype=np.float32))
    with pytest.raises(ValueError, match="vectors"):
        SingleStep(SingleStepSearch(index)).search([Ask("cats")])


# ---------------------------------------------------------------------- a trained retriever


def same(found: list[Hit], expected: list[Hit]) -> None:
    assert [hit._replace(score=0) for hit in found] == [hit._replace(score=0) for hit in expected]
    scores = ([hit.score for hit in some] for some in (found, expected))
    np.testing.assert_allclose(*scores, atol=2e-5)


def test_questions_of_a_retriever_have_their_own_settings(trained: MultiStepSearch) -> None:
    question = QUESTIONS[0]
    searcher = MultiStep(trained)
    assert searcher.most_steps == GREEDY.max_steps == 3
    (plain,) = trained.search([question])
    same(hits_of(searcher, Ask(question)), plain)
    asks = [
        Ask(question, steps=2),
        Ask(question, count=1),
        Ask(question, threshold=math.inf),
        Ask(question, where={"even": True}),
        Ask(question, beam=3),
        Ask(question, count=7),
    ]
    found: Any = searcher.search(asks)
    for ask, hits in zip(asks, found, strict=True):
        same(hits, hits_of(searcher, ask))
    same(found[0], plain[:2])
    same(found[1], plain[:1])
    assert found[2] == []
    assert len(found[3]) == 3
    assert all(hit.metadata["even"] for hit in found[3])
    rules = dataclasses.replace(GREEDY, beam=dataclasses.replace(GREEDY.beam, beam=3))
    same(found[4], MultiStepSearch(trained.index, trained.towers, rules).search([question])[0])
    # Seven are three of each state, as far as needed.
    assert [hit.step for hit in found[5]] == [1, 1, 1, 2, 2, 2, 3]
    assert len({hit.id for hit in found[5]}) == 7
