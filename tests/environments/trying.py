"""Episodes by given replies; passages and searches on which query writers are tried."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from examples.worlds.demonstrations import Choices
from examples.worlds.scripts import BridgeQuestion, bridge_question
from qrag_jax.environments.episode import Agent, Document, Ended, Step, Task
from qrag_jax.environments.queries import QueryState
from qrag_jax.llm.text.scaffolds import scaffold_of
from qrag_jax.models.first_language_model import CHAT_TEMPLATE, END, trained_tokenizer
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index
from qrag_jax.retrieval.protocol import NONE, Passage, Queries
from qrag_jax.rollouts.token_episodes import Speech
from tests.retrieval.small_corpus import ListedCorpus

BERG = Document("a", "Ada Berg", "# Ada Berg\nShe was born in Oslo.", True, 5.0)
OSLO = Document("b", "Oslo", "# Oslo\nIt is the capital of Norway.", True, 7.0)
RAIN = Document("c", "Bergen", "# Bergen\nIt is wet.", False, 3.0)
QUESTION = "Of which country is Ada Berg's birthplace the capital?"
STATE = QueryState("q", QUESTION, ("Norway",), hops=2, gold_ids=("a", "b"), pages=("a", "b"))
LATER = STATE.after((BERG, RAIN))
# An episode that takes the good way.
EXPERT = Choices("search_entity", "then_bridge", "answer_right", "cite_right", luck=0.5)


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


class WorldSearch:
    """BM25 over the passages of invented questions."""

    def __init__(self, questions: Sequence[BridgeQuestion], k: int = 3) -> None:
        self._passages = [
            Passage(f"{question.id}/{passage.id}", passage.text, passage.title)
            for question in questions
            for passage in question.passages
        ]
        words = BM25Config(k1=0.9, b=0.4, stemmer="", stop_words="")
        self._index, self._k = BM25Index.build(ListedCorpus(self._passages), words), k

    def __call__(self, queries: Sequence[str]) -> list[tuple[Document, ...]]:
        hits = self._index.search(Queries(queries), self._k)
        return [
            tuple(self._document(*hit) for hit in zip(numbers, scores) if hit[0] != NONE)
            for numbers, scores in zip(hits.numbers.tolist(), hits.scores.tolist())
        ]

    def _document(self, number: int, score: float) -> Document:
        passage = self._passages[number]
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


def saved_tokenizer(folder: Path, template: str | None) -> str:
    """The folder of a tokenizer of words, without a vocabulary, with any chat template."""
    unknown = "[UNK]"
    words = Tokenizer(WordLevel({unknown: 0}, unk_token=unknown))
    words.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token=unknown)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)
