"""Scripted demonstrations: their shares, what they may know, and how good the expert is."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from qrag_jax.data.generators.bridge_world import BridgeQuestion, bridge_question
from qrag_jax.environments.tools.demonstrations import (
    EXPERT,
    Choices,
    Demonstration,
    DemonstrationsConfig,
    draw_choices,
)
from qrag_jax.environments.tools.documents import bridge_task
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.tool_calls import FORMATS, HERMES, ToolCall, read_calls
from qrag_jax.retrieval.own_documents import Wanted, own_retriever

QUESTIONS, EPISODES = 100, 2000
Search = Callable[[str], list[str]]


class Played(NamedTuple):
    """An episode: its queries, the ids of what each found, and the arguments of `complete`."""

    queries: list[str]
    found: list[list[str]]
    end: dict[str, Any]


@pytest.fixture(scope="module")
def questions() -> list[BridgeQuestion]:
    return [bridge_question(0, "train", i) for i in range(QUESTIONS)]


@pytest.fixture(scope="module")
def searches(questions: list[BridgeQuestion]) -> list[Search]:
    """For each question, the search that gives the id of its best document."""

    retriever = own_retriever("bm25")

    def search_in(question: BridgeQuestion) -> Search:
        documents = bridge_task(question).documents

        def search(query: str) -> list[str]:
            (found,) = retriever.find([Wanted(query, 1, documents)])
            assert not isinstance(found, Failure)
            return [document.id for document in found]

        return search

    return [search_in(question) for question in questions]


def played(demonstration: Demonstration, search: Search) -> Played:
    texts = {
        document.id: document.text for document in bridge_task(demonstration.question).documents
    }
    queries: list[str] = []
    found: list[list[str]] = []
    while True:
        shown = [
            "\n\n".join(f"Document ID: {name}\n{texts[name]}" for name in ids) or "Nothing found."
            for ids in found
        ]
        (call,) = read_calls(demonstration.say(shown), HERMES)
        assert isinstance(call, ToolCall)
        if call.name == "complete":
            return Played(queries, found, dict(call.arguments))
        assert call.name == "retrieve_documents"
        queries.append(call.arguments["query"])
        found.append(search(queries[-1]))


def test_a_task_has_the_passages_with_their_titles(questions: list[BridgeQuestion]) -> None:
    for question in questions[:20]:
        task = bridge_task(question)
        assert (task.id, task.question) == (question.id, question.question)
        assert (task.answers, task.hops) == ((question.answer,), 2)
        assert set(task.gold) == {passage.id for passage in question.supporting}
        for document, passage in zip(task.documents, question.passages, strict=True):
            assert (document.id, document.title) == (passage.id, passage.title)
            assert document.text == f"# {passage.title}\n{passage.text}"


def test_shares_are_met(questions: list[BridgeQuestion], searches: list[Search]) -> None:
    config = DemonstrationsConfig()
    done: Counter[str] = Counter()
    for episode in range(EPISODES):
        choices = draw_choices(config, 0, episode)
        question = questions[episode % QUESTIONS]
        queries, found, end = played(
            Demonstration(question, choices), searches[episode % QUESTIONS]
        )
        done[_first(queries[0], question)] += 1
        done[_then(queries)] += 1
        done.update([choices.answer, choices.cite])
        passages = [question.passages[int(name)] for ids in found for name in ids]
        if passages:  # the answer was read off what was shown last
            last = passages[-1]
            if last.said[1]:
                right = end["final_answer"] == last.said[1]
                assert right == (choices.answer == "answer_right")
            assert right_or_name(end["final_answer"], last)
        shown = list(dict.fromkeys(p.id for p in passages))
        supporting = [p.id for p in dict.fromkeys(passages) if p.is_supporting]
        cited = {"cite_right": supporting, "cite_all": shown, "cite_none": []}
        assert end["cited_doc_ids"] == cited[choices.cite]
        assert end["reasoning"]
    for shares in config.decisions.values():
        assert sum(done[name] for name in shares) == EPISODES
        for name, share in shares.items():
            sigma = math.sqrt(EPISODES * share * (1 - share))
            assert abs(done[name] - EPISODES * share) < 4 * sigma, name


def right_or_name(answer: str, passage: Any) -> bool:
    return answer in (*passage.names, passage.said[1])


def _first(query: str, question: BridgeQuestion) -> str:
    known = {
        question.entity: "search_entity",
        question.question: "search_question",
        " ".join(question.relations): "search_relations",
    }
    return known[query]


def _then(queries: list[str]) -> str:
    if len(queries) == 1:
        return "then_answer"
    assert len(queries) == 2
    return "then_again" if queries[0] == queries[1] else "then_bridge"


def test_the_expert_is_right_where_the_passages_are_found(
    questions: list[BridgeQuestion], searches: list[Search]
) -> None:
    found_both = 0
    for i, (question, search) in enumerate(zip(questions, searches)):
        expert = Demonstration(question, draw_choices(EXPERT, 0, i))
        queries, found, end = played(expert, search)
        first, second = (passage.id for passage in question.supporting)
        assert queries[0] == question.entity
        if found[0] == [first]:
            assert queries[1] == f"{question.bridge} {question.relations[1]}"
            if found[1] == [second]:
                found_both += 1
                assert end["final_answer"] == question.answer
                assert sorted(end["cited_doc_ids"]) == sorted([first, second])
    assert found_both >= 0.7 * QUESTIONS


def test_a_demonstration_knows_only_what_was_shown(
    questions: list[BridgeQuestion], searches: list[Search]
) -> None:
    for i, (question, search) in enumerate(zip(questions, searches)):
        choices = draw_choices(DemonstrationsConfig(), 1, i)
        queries, found, end = played(Demonstration(question, choices), search)
        texts = [question.question, *(question.passages[int(n)].text for ids in found for n in ids)]
        assert end["final_answer"] in "\n".join(texts)
        if choices.then == "then_bridge":
            assert queries[1].removesuffix(f" {question.relations[1]}") in "\n".join(texts[:2])


def test_choices_depend_on_seed_and_index_only() -> None:
    config = DemonstrationsConfig()
    several = [draw_choices(config, 0, i) for i in range(50)]
    assert several == [draw_choices(config, 0, i) for i in range(50)]
    assert several != [draw_choices(config, 1, i) for i in range(50)]
    assert {draw_choices(EXPERT, 5, i)[:-1] for i in range(50)} == {
        ("search_entity", "then_bridge", "answer_right", "cite_right")
    }
    luck = [draw_choices(config, 0, i).luck for i in range(EPISODES)]
    assert 0 <= min(luck) < 0.01
    assert 0.99 < max(luck) < 1
    assert abs(np.mean(luck) - 0.5) < 4 * math.sqrt(1 / 12 / EPISODES)


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_found_and_every_form(form: str, questions: list[BridgeQuestion]) -> None:
    question = questions[0]
    choices = Choices("search_relations", "then_bridge", "answer_other", "cite_all", 0.5)
    demonstration = Demonstration(question, choices, form)
    first, second, third = (
        read_calls(demonstration.say(["Nothing found."] * turn), form)[0] for turn in range(3)
    )
    assert first == second
    assert isinstance(third, ToolCall)
    assert third.name == "complete"
    assert third.arguments["final_answer"] == question.entity


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"search_entity": 0.5}, "search_entity, search_question and search_relations sum to 0.9;"),
        ({"answer_other": 0.4}, "answer_right and answer_other sum to 1.1;"),
        ({"cite_none": math.nan}, "cite_none is nan"),
        ({"then_bridge": -0.2, "then_again": 0.8}, "then_bridge is -0.2; it must be at least 0"),
    ],
)
def test_shares_that_are_refused(given: dict[str, float], told: str) -> None:
    with pytest.raises(InputError) as caught:
        dataclasses.replace(DemonstrationsConfig(), **given)
    assert told in str(caught.value)
    assert str(caught.value).count(". ") == 0
