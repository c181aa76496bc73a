"""Episodes by given replies; passages and searches on which query writers are tried."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from examples.worlds.scripts import bridge_question
from qrag_jax.data.scripted import BridgeQuestion
from qrag_jax.environments.demonstrations import DemonstrationsConfig
from qrag_jax.environments.episode import Agent, Document, Ended, Step, Task
from qrag_jax.environments.queries import QueryState
from qrag_jax.errors import InputError
from qrag_jax.llm.text.scaffolds import scaffold_of
from qrag_jax.models.first_language_model import CHAT_TEMPLATE, END, trained_tokenizer
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index
from qrag_jax.retrieval.protocol import NONE, Passage, Queries, Where
from qrag_jax.rollouts.token_episodes import Speech

BERG = Document("a", "Ada Berg", "# Ada Berg\nShe was born in Oslo.", True, 5.0)
OSLO = Document("b", "Oslo", "# Oslo\nIt is the capital of Norway.", True, 7.0)
RAIN = Document("c", "Bergen", "# Bergen\nIt is wet.", False, 3.0)
QUESTION = "Of which country is Ada Berg's birthplace the capital?"
STATE = QueryState("q", QUESTION, ("Norway",), hops=2, gold_ids=("a", "b"), pages=("a", "b"))
LATER = STATE.after((BERG, RAIN))
# Every episode takes the good way.
EXPERT = DemonstrationsConfig(
    search_entity=1.0,
    search_question=0.0,
    search_relations=0.0,
    then_bridge=1.0,
    then_again=0.0,
    then_answer=0.0,
    answer_right=1.0,
    answer_other=0.0,
    cite_right=1.0,
    cite_all=0.0,
    cite_none=0.0,
)


def episode_of(agent: Agent, task: Task, replies: Sequence[Any]) -> tuple[list[Step], Ended]:
    """The steps of one episode and its end; all replies are used."""
    play, left = agent.play(task), list(replies)
    steps = [next(play)]
    while True:
        try:
            steps.append(play.send(left.pop(0)))
        except StopIteration as end:
            assert not left, f"the episode ended before {left}"
            return steps, end.value


class Listed:
    """A corpus in memory."""

    digest = "listed"

    def __init__(self, listed: Sequence[Passage]) -> None:
        self._listed = listed

    def __len__(self) -> int:
        return len(self._listed)

    def passages(self, numbers: Sequence[int] | np.ndarray) -> list[Passage]:
        return [self._listed[int(number)] for number in numbers]

    def matching(self, where: Where) -> np.ndarray:
        raise InputError("there are no fields.")


class WorldSearch:
    """BM25 over the passages of invented questions; remembers how it was called."""

    def __init__(self, questions: Sequence[BridgeQuestion], k: int = 3) -> None:
        self._passages = [
            Passage(f"{question.id}/{passage.id}", passage.text, passage.title)
            for question in questions
            for passage in question.passages
        ]
        words = BM25Config(k1=0.9, b=0.4, stemmer="", stop_words="")
        self._index, self._k = BM25Index.build(Listed(self._passages), words), k
        self.calls: list[list[str]] = []

    def __call__(self, queries: Sequence[str]) -> list[tuple[Document, ...]]:
        self.calls.append([*queries])
        hits = self._index.search(Queries(queries), self._k)
        return [
            tuple(
                _document(self._passages[number], score)
                for number, score in zip(numbers, scores)
                if number != NONE
            )
            for numbers, scores in zip(hits.numbers.tolist(), hits.scores.tolist())
        ]


def _document(passage: Passage, score: float) -> Document:
    text = f"# {passage.title}\n{passage.text}"
    return Document(passage.name, passage.title, text, False, score)


@cache
def world(count: int) -> tuple[BridgeQuestion, ...]:
    """The first questions of the world."""
    return tuple(bridge_question(0, "train", index) for index in range(count))


def world_state(question: BridgeQuestion) -> QueryState:
    """A question before its first hop."""
    gold = tuple(f"{question.id}/{passage.id}" for passage in question.supporting)
    return QueryState(
        question.id, question.question, (question.answer,), hops=2, gold_ids=gold, pages=gold
    )


def tiny_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """That of the package's small language models, with its chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=trained_tokenizer(texts, 400),
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_speech(turn: int = 40, room: int = 400) -> Speech:
    tokenizer = tiny_tokenizer(f"{q.question} {p.text}" for q in world(4) for p in q.passages)
    return Speech(tokenizer, scaffold_of(tokenizer), turn, room)
