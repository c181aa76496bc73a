"""Bridge questions: their parts, splits without a common word, and room for better searches."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from qrag_jax.data.generators.bridge_world import BridgeQuestion, bridge_question
from qrag_jax.data.generators.invented_puzzle import Entity
from qrag_jax.data.generators.synthetic import SyntheticConfig, puzzle_at, sample_at
from qrag_jax.errors import InputError
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index
from qrag_jax.retrieval.protocol import Passage, Queries
from tests.retrieval.array_index import ListedCorpus

WORLD = SyntheticConfig(hops=(2,), comparison=0.0)
COUNT = 100
ALL: dict[str, Any] = {"seed": 0, "split": "dev", "index": 0}


@pytest.fixture(scope="module")
def questions() -> list[BridgeQuestion]:
    return [bridge_question(0, "dev", i) for i in range(COUNT)]


def test_a_question_is_that_of_the_synthetic_data(questions: list[BridgeQuestion]) -> None:
    for i, question in enumerate(questions):
        sample = sample_at(WORLD, "dev", i)
        own = dataclasses.replace(sample, id=f"bridge-dev-0-{i}", source="bridge")
        assert question.sample == own
        supporting = tuple(i for i, p in enumerate(question.passages) if p.is_supporting)
        assert supporting == sample.support
        assert [p.id for p in question.passages] == [str(number) for number in range(10)]
    assert len({question.id for question in questions}) == COUNT
    assert questions[7] == bridge_question(0, "dev", 7)
    assert questions[7].question != bridge_question(1, "dev", 7).question
    assert len(bridge_question(0, "dev", 7, passages=5).passages) == 5


def test_the_parts_lead_from_the_question_to_the_answer(questions: list[BridgeQuestion]) -> None:
    for question in questions:
        first, second = question.supporting
        assert question.entity in question.question
        assert question.bridge not in question.question
        assert (first.title, second.title) == (question.entity, question.bridge)
        assert first.said[0] == question.bridge
        assert second.said[1] == question.answer
        assert question.bridge in first.text
        assert question.answer in second.text
        without_name = _words(question.question.replace(question.entity, ""))
        for relation in question.relations:
            assert relation
            assert set(_words(relation)) <= set(without_name)
        assert {question.entity, question.bridge} <= {*first.names, *second.names}
        assert all(name in first.text + second.text for name in (*first.names, *second.names))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def test_what_a_passage_says_and_names_stands_in_its_text(questions: list[BridgeQuestion]) -> None:
    for question in questions:
        for passage in question.passages:
            assert passage.names[0] == passage.title
            assert len(set(passage.names)) == len(passage.names) >= 1
            for name in (*passage.names, *passage.said):
                assert name in passage.text
    rivals = [p for q in questions for p in q.passages if not p.is_supporting and p.said[1]]
    assert len(rivals) > 2 * COUNT  # wrong passages that say something for the last relation


def test_no_invented_word_is_in_both_splits() -> None:
    words: dict[str, set[str]] = {"train": set(), "dev": set()}
    for split, found in words.items():
        for i in range(300):
            told: list[Any] = [p for p in puzzle_at(WORLD, split, i).passages]  # type: ignore[arg-type]
            entities = [o for p in told for o in (p.entity, *p.facts.values())]
            found.update(w for e in entities if isinstance(e, Entity) for w in e.words)
    assert all(len(found) > 3000 for found in words.values())
    assert not words["train"] & words["dev"]


@pytest.mark.parametrize(
    "config", [BM25Config(), BM25Config(k1=0.9, b=0.4, stemmer="", stop_words="")]
)
def test_only_the_bridge_finds_the_second_passage(
    config: BM25Config, questions: list[BridgeQuestion]
) -> None:
    found = []
    for question in questions:
        corpus = ListedCorpus([Passage(p.id, p.text, p.title) for p in question.passages])
        queries = (question.question, question.entity, question.bridge)
        hits = BM25Index.build(corpus, config).search(Queries(queries), 1)
        by_question, by_entity, by_bridge = hits.numbers[:, 0]
        first, second = question.chain
        found.append(
            (by_question == first, by_entity == first, by_question == second, by_bridge == second)
        )
    first_by_question, first_by_entity, second_by_question, second_by_bridge = np.mean(found, 0)
    assert first_by_question >= 0.7
    assert first_by_entity >= 0.85
    assert second_by_question <= 0.1
    assert second_by_bridge >= 0.85


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"split": "test"}, "split is 'test'"),
        ({"index": -1}, "index is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"passages": 3}, "give at least 4"),
    ],
)
def test_what_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        bridge_question(**(ALL | given))
