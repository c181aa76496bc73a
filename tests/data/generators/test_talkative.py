"""Talkative questions: their parts, splits without a common word, and what searches find."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest

from qrag_jax.data.generators.bridge_world import bridge_question
from qrag_jax.data.generators.dropped_words import content_words, words_of
from qrag_jax.data.generators.invented_names import Draw
from qrag_jax.data.generators.invented_world import KINDS
from qrag_jax.data.generators.synthetic import Split
from qrag_jax.data.generators.talkative import (
    BLOCK,
    CLAUSES,
    TalkativeQuestion,
    talkative_question,
)
from qrag_jax.errors import InputError
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index
from qrag_jax.retrieval.protocol import Passage, Queries
from tests.retrieval.array_index import ListedCorpus

COUNT = 100
ALL: dict[str, Any] = {"seed": 0, "split": "dev", "index": 0}
FIRST = (
    "It was dear Kialvish, who wears a green hat, that asked me to write to you. Between you and "
    "me, Pandrind Monix paints small portraits. To which company does Trarbiarn Mills belong?"
)
SECOND = (
    "On which river does Plasherbond lie? That is all I ask of you. At dinner I sat next to "
    "Shustand Holbul, who took a degree at Jillet College, in case that matters. Yesterday I "
    "shared a train with Stiavok Drialbiam, who keeps bees, and talked all the way."
)


@cache
def made(count: int = COUNT, clauses: int = 2) -> tuple[TalkativeQuestion, ...]:
    return tuple(talkative_question(0, "dev", index, clauses) for index in range(count))


def test_golden_questions() -> None:
    first, second = made()[:2]
    assert first.question == FIRST
    assert second.question == SECOND
    assert (first.id, first.plain, first.entity) == (
        "talkative-dev-0-0",
        "To which company does Trarbiarn Mills belong?",
        "Trarbiarn Mills",
    )
    assert (first.relation, first.answer) == ("company belong", "Stunern Works")
    assert [clause[1:] for clause in (*first.clauses, *second.clauses)] == [
        ("Kialvish", "wears green hat", "Kialvish Kialkosh"),
        ("Pandrind Monix", "paints small portraits", "Pandrind Monix"),
        ("Shustand Holbul", "took degree Jillet College", "Shustand Holbul"),
        ("Stiavok Drialbiam", "keeps bees", "Stiavok Drialbiam"),
    ]


def test_a_question_depends_on_its_arguments_only() -> None:
    assert talkative_question(0, "dev", 7) == made()[7]
    texts = {
        talkative_question(seed, split, index).question
        for seed in (0, 1)
        for split in ("train", "dev")
        for index in (7, 8)
    }
    assert len(texts) == 8
    assert len({each.id for each in made()}) == COUNT
    # Other clauses around the same question.
    for clauses in CLAUSES:
        other = made(COUNT, clauses)[7]
        assert len(other.clauses) == clauses
        assert (other.plain, other.gold, other.passages) == (
            made()[7].plain,
            made()[7].gold,
            made()[7].passages,
        )


def test_the_gold_passage_is_that_of_the_bridge_questions_entity() -> None:
    for index, each in enumerate(made()):
        bridge = bridge_question(0, "dev", index)
        assert each.passages == bridge.passages
        assert each.gold == bridge.chain[0]
        assert each.passages[each.gold] == bridge.supporting[0]
        assert each.passages[each.gold].title == each.entity == bridge.entity
        assert each.answer == bridge.bridge == each.passages[each.gold].said[0]
        assert each.answer in each.passages[each.gold].text
        assert each.answer not in each.question


def test_what_is_asked_stands_among_the_clauses() -> None:
    before = np.zeros(3)
    for each in made():
        assert each.entity in each.plain
        assert each.plain.endswith("?")
        assert each.plain[1:] in each.question
        assert each.question.count("?") == 1
        places = [each.question.index(clause.text) for clause in each.clauses]
        assert places == sorted(places)
        asked = each.question.index(each.plain[1:])
        before[sum(place < asked for place in places)] += 1
        asked_by = each.plain.replace(each.entity, "")
        assert content_words(asked_by) == each.relation.split()
    assert (before > COUNT / 6).all()


def test_a_clause_is_about_a_person_of_another_question_of_the_block() -> None:
    titles = [{passage.title: passage for passage in each.passages} for each in made()]
    short, told = 0, 0
    for index, each in enumerate(made()):
        first = index - index % BLOCK
        others = [place for place in range(first, first + BLOCK) if place != index]
        for clause in each.clauses:
            assert any(clause.title in titles[place] for place in others)
            assert clause.title not in titles[index]
            assert clause.name in (clause.title, clause.title.split()[0])
            assert clause.name in clause.text
            words = iter(words_of(clause.text))
            assert all(word in words for word in clause.words.split())  # in their order
            assert each.entity not in clause.text
            short += clause.name != clause.title
            place = next(place for place in others if clause.title in titles[place])
            passage = titles[place][clause.title]
            told += any(name in clause.text for name in passage.names[1:])
        assert len({clause.text for clause in each.clauses}) == 2
    assert abs(short / (2 * COUNT) - 0.5) < 0.15
    assert abs(told / (2 * COUNT) - 0.2) < 0.12


def test_wordings_vary() -> None:
    frames = set()
    for each in made():
        text = each.question
        for part in (each.plain[1:], *(clause.text for clause in each.clauses)):
            text = text.replace(part, "")
        frames.add(text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    assert len(frames) >= 6
    abouts = {clause.text.split(clause.name)[0] for each in made() for clause in each.clauses}
    assert len(abouts) >= 20


def test_no_invented_word_is_in_both_splits() -> None:
    english = {word for kind in KINDS.values() for form in kind.forms for word in words_of(form)}
    invented: dict[str, set[str]] = {}
    shown: dict[str, set[str]] = {}
    splits: tuple[Split, ...] = ("train", "dev")
    for split in splits:
        questions = [talkative_question(0, split, index) for index in range(300)]
        names = [each.entity for each in questions]
        names += [clause.title for each in questions for clause in each.clauses]
        invented[split] = {word for name in names for word in words_of(name)} - english
        shown[split] = {word for each in questions for word in words_of(each.question)}
        assert len(invented[split]) > 1000
        assert len(invented[split] & shown[split]) > 700
    assert not invented["train"] & shown["dev"]
    assert not invented["dev"] & shown["train"]


def test_documents_and_judgement_belong_together() -> None:
    question = made()[3]
    names = [document.name for document in question.documents]
    assert len(set(names)) == len(question.passages) == 10
    for document, passage in zip(question.documents, question.passages, strict=True):
        assert (document.title, document.text) == (passage.title, passage.text)
    judged = question.judged
    assert (judged.id, judged.text, judged.answers) == (
        "talkative-dev-0-3",
        question.question,
        (question.answer,),
    )
    assert judged.grades == ((names[question.gold], 1),)
    other = talkative_question(0, "train", 3).documents
    assert not {*names} & {document.name for document in other}


def ndcg_at_10(index: BM25Index, queries: list[str], gold: list[int]) -> float:
    """By its definition, for one relevant passage."""
    places = index.search(Queries(queries), 10).numbers
    found = [np.flatnonzero(row == wanted) for row, wanted in zip(places, gold, strict=True)]
    return float(np.mean([1 / math.log2(row[0] + 2) if len(row) else 0.0 for row in found]))


def test_there_is_room_for_better_queries() -> None:
    """The figures that the experiment rests on, on a smaller corpus."""
    questions = made(300)
    passages = [Passage(*each) for question in questions for each in question.documents]
    words = BM25Config(k1=0.9, b=0.4, stemmer="", stop_words="")
    index = BM25Index.build(ListedCorpus(passages), words)
    gold = [10 * number + question.gold for number, question in enumerate(questions)]

    def some(question: TalkativeQuestion, number: int) -> str:
        listed = words_of(question.question)
        kept = Draw(0, 99, number).shuffled(range(len(listed)))[: round(0.6 * len(listed))]
        return " ".join(listed[place] for place in sorted(kept))

    queries = {
        "as asked": [each.question for each in questions],
        "no stop words": [" ".join(content_words(each.question)) for each in questions],
        "some words": [some(each, number) for number, each in enumerate(questions)],
        "entity": [each.entity for each in questions],
        "entity and relation": [f"{each.entity} {each.relation}" for each in questions],
        "clause": [f"{each.clauses[0].name} {each.clauses[0].words}" for each in questions],
    }
    found = {name: ndcg_at_10(index, texts, gold) for name, texts in queries.items()}
    assert 0.35 <= found["as asked"] <= 0.5
    assert 0.45 <= found["no stop words"] <= 0.65
    assert 0.3 <= found["some words"] <= 0.5
    assert found["entity"] >= 0.93
    assert found["entity and relation"] >= 0.93
    assert found["clause"] <= 0.03
    assert found["no stop words"] - found["as asked"] >= 0.06
    more = [each.question for each in made(300, 4)]
    fewer = [each.question for each in made(300, 1)]
    assert ndcg_at_10(index, more, gold) + 0.1 < found["as asked"]
    assert found["as asked"] + 0.1 < ndcg_at_10(index, fewer, gold)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"split": "test"}, "split is 'test'"),
        ({"index": -1}, "index is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"clauses": 0}, "clauses is 0"),
        ({"clauses": 5}, "clauses is 5"),
    ],
)
def test_what_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        talkative_question(**(ALL | given))
