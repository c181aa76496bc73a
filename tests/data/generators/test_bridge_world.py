"""Bridge and talkative questions: their parts, splits without a common word, what searches find."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from qrag_jax.data.generators.bridge_world import BridgeQuestion, bridge_question
from qrag_jax.data.generators.dropped_words import content_words, words_of
from qrag_jax.data.generators.invented_world import KINDS
from qrag_jax.data.generators.synthetic import SyntheticConfig, sample_at
from qrag_jax.data.generators.talkative import (
    BLOCK,
    CLAUSES,
    TalkativeQuestion,
    talkative_question,
)
from qrag_jax.errors import InputError
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index
from qrag_jax.retrieval.protocol import Passage, Queries
from tests.environments.query_writing.trying import Listed

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
    assert questions[7] == bridge_question(0, "dev", 7)
    assert questions[7].question != bridge_question(1, "dev", 7).question
    assert len(bridge_question(0, "dev", 7, passages=5).passages) == 5
    for given in ({"split": "test"}, {"index": -1}, {"seed": -1}):
        with pytest.raises(InputError, match=next(iter(given))):
            bridge_question(**(ALL | given))


def test_the_parts_lead_from_the_question_to_the_answer(questions: list[BridgeQuestion]) -> None:
    for question in questions:
        first, second = question.supporting
        assert question.entity in question.question
        assert question.bridge not in question.question
        assert (first.title, second.title) == (question.entity, question.bridge)
        assert (first.said[0], second.said[1]) == (question.bridge, question.answer)
        asked = set(re.findall(r"\w+", question.question.replace(question.entity, "").lower()))
        assert all({*relation.lower().split()} <= asked for relation in question.relations)
        for passage in question.passages:  # what it says and names stands in its text
            assert passage.names[0] == passage.title
            assert all(name in passage.text for name in (*passage.names, *passage.said))
    rivals = [p for q in questions for p in q.passages if not p.is_supporting and p.said[1]]
    assert len(rivals) > 2 * COUNT  # wrong passages that say something for the last relation


def test_only_the_bridge_finds_the_second_passage(questions: list[BridgeQuestion]) -> None:
    found = []
    for question in questions:
        corpus = Listed([Passage(p.id, p.text, p.title) for p in question.passages])
        queries = (question.question, question.entity, question.bridge)
        hits = BM25Index.build(corpus, BM25Config()).search(Queries(queries), 1)
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


@cache
def made(count: int = COUNT, clauses: int = 2) -> tuple[TalkativeQuestion, ...]:
    return tuple(talkative_question(0, "dev", index, clauses) for index in range(count))


def test_a_talkative_question_depends_on_its_arguments_only() -> None:
    assert talkative_question(0, "dev", 7) == made()[7]
    texts = {
        talkative_question(seed, split, index).question
        for seed in (0, 1)
        for split in ("train", "dev")
        for index in (7, 8)
    }
    assert len(texts) == 8
    for clauses in CLAUSES:  # other clauses around the same question
        other = talkative_question(0, "dev", 7, clauses)
        assert len(other.clauses) == clauses
        assert (other.plain, other.passages) == (made()[7].plain, made()[7].passages)
    for index, each in enumerate(made()):
        bridge = bridge_question(0, "dev", index)
        assert (each.passages, each.gold) == (bridge.passages, bridge.chain[0])
        assert (each.entity, each.answer) == (bridge.entity, bridge.bridge)
        assert each.answer not in each.question
        names = [document.name for document in each.documents]
        assert each.judged.grades == ((names[each.gold], 1),)
        assert (each.judged.text, each.judged.answers) == (each.question, (each.answer,))
    for given in ({"split": "test"}, {"index": -1}, {"clauses": 0}, {"clauses": 5}):
        with pytest.raises(InputError, match=next(iter(given))):
            talkative_question(**(ALL | given))


def test_clauses_are_about_persons_of_other_questions_and_do_not_answer() -> None:
    titles = [{passage.title for passage in each.passages} for each in made()]
    for index, each in enumerate(made()):
        first = index - index % BLOCK
        others = [place for place in range(first, first + BLOCK) if place != index]
        assert each.plain[1:] in each.question
        assert each.question.count("?") == 1
        for clause in each.clauses:
            assert clause.text in each.question
            assert any(clause.title in titles[place] for place in others)
            assert clause.title not in titles[index]
            assert clause.name in (clause.title, clause.title.split()[0])
            words = iter(words_of(clause.text))
            assert all(word in words for word in clause.words.split())  # in their order
            assert each.entity not in clause.text
        assert len({clause.text for clause in each.clauses}) == 2
    short = sum(clause.name != clause.title for each in made() for clause in each.clauses)
    assert abs(short / (2 * COUNT) - 0.5) < 0.15
    # No invented word is in both splits.
    train = [talkative_question(0, "train", index) for index in range(COUNT)]
    english = {word for kind in KINDS.values() for form in kind.forms for word in words_of(form)}
    names = {word for each in train for word in words_of(each.entity)} - english
    assert len(names) > COUNT
    assert not names & {word for each in made() for word in words_of(each.question)}


def ndcg_at_10(index: BM25Index, queries: list[str], gold: list[int]) -> float:
    """By its definition, for one relevant passage."""
    places = index.search(Queries(queries), 10).numbers
    found = [np.flatnonzero(row == wanted) for row, wanted in zip(places, gold, strict=True)]
    return float(np.mean([1 / math.log2(row[0] + 2) if len(row) else 0.0 for row in found]))


def test_there_is_room_for_better_queries() -> None:
    """The figures that the experiment rests on, on a smaller corpus."""
    questions = made(200)
    passages = [Passage(*each) for question in questions for each in question.documents]
    words = BM25Config(k1=0.9, b=0.4, stemmer="", stop_words="")
    index = BM25Index.build(Listed(passages), words)
    gold = [10 * number + question.gold for number, question in enumerate(questions)]
    queries = {
        "as asked": [each.question for each in questions],
        "no stop words": [" ".join(content_words(each.question)) for each in questions],
        "entity": [each.entity for each in questions],
        "entity and relation": [f"{each.entity} {each.relation}" for each in questions],
        "clause": [f"{each.clauses[0].name} {each.clauses[0].words}" for each in questions],
        "more": [each.question for each in made(200, 4)],
        "fewer": [each.question for each in made(200, 1)],
    }
    found = {name: ndcg_at_10(index, texts, gold) for name, texts in queries.items()}
    assert 0.35 <= found["as asked"] <= 0.55
    assert found["no stop words"] - found["as asked"] >= 0.06
    assert min(found["entity"], found["entity and relation"]) >= 0.93
    assert found["clause"] <= 0.03
    assert found["more"] + 0.1 < found["as asked"] < found["fewer"] - 0.1
