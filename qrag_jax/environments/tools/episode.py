"""What an agent with tools asks of the world, what it gets, and how an episode ends.

An agent is a generator without effects, as in `environments.rag.episode`: it yields `Speak`, `Look`
or `Open`, is sent the reply, and returns a `Closed` or a `Failed`. It knows no tokens, no index and
no clock, so that whoever plays it may run hundreds of episodes at once.

    play = agent.play(task)
    step = next(play)
    while True:
        try:
            step = play.send(reply_to(step))
        except StopIteration as end:
            return end.value

A failure is a value: a call that failed ends the episode in `Failed`, which has no reward. What the
model itself does wrong, such as a malformed call, is no failure: it is answered and counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Literal, NamedTuple, Protocol

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import CAUSES, Failure
from qrag_jax.llm.text.prompts import Messages


class Document(NamedTuple):
    """A document as a tool gives it."""

    id: str  # unique among the documents of its task
    title: str
    text: str  # what the model reads: the title is in it, if it is to be read
    is_supporting: bool
    score: float = 0.0  # by the search that found it; 0 where that tells none


@dataclasses.dataclass(frozen=True, slots=True)
class ToolTask:
    """A question, its gold answers, and what it needs.

    Attributes:
        id: the question's own in its data set.
        question: what the agent is asked.
        answers: the gold answers, each of which counts.
        documents: the question's own; () if the agent searches a corpus.
        hops: how many supporting documents the question needs.
        gold_ids: ids of the supporting documents in a corpus; () for own documents.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    documents: tuple[Document, ...] = ()
    hops: int = 1
    gold_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ids = [document.id for document in self.documents]
        if len(set(ids)) < len(ids):
            twice = next(each for each in ids if ids.count(each) > 1)
            raise InputError(
                f"the question {self.id!r} has two documents with the id {twice!r}; give each its "
                "own."
            )
        if self.documents and self.gold_ids:
            raise InputError(
                f"the question {self.id!r} has documents of its own, which say which are gold; "
                "leave gold_ids empty."
            )

    @property
    def gold(self) -> tuple[str, ...]:
        """Ids of the supporting documents."""
        own = tuple(document.id for document in self.documents if document.is_supporting)
        return own or self.gold_ids


@dataclasses.dataclass(frozen=True, slots=True)
class Speak:
    """Let the model speak. The reply is a `Said`.

    Attributes:
        messages: those that follow what was there before; at first the whole prompt. What the
            model itself said is not among them: whoever plays has it, as tokens.
    """

    messages: Messages


class Said(NamedTuple):
    """What the model said in one turn."""

    text: str
    finish: Literal["stop", "length"]  # "length": it was cut off


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """Search. The reply is documents, best first, or a `Failure`.

    Attributes:
        query: what to search for.
        most: how many documents to give, at least 1.
    """

    query: str
    most: int


@dataclasses.dataclass(frozen=True, slots=True)
class Open:
    """Get one document. The reply is the document, None if there is none, or a `Failure`."""

    doc_id: str


FIELDS = ("reasoning", "final_answer", "cited_doc_ids")  # what the tool `complete` takes

Step = Speak | Look | Open
Reply = Said | tuple[Document, ...] | Document | None | Failure


@dataclasses.dataclass(frozen=True, slots=True)
class ToolTally:
    """What happened in an episode, for counting.

    Attributes:
        turns: turns of the model.
        searches: `Look`s that were answered.
        malformed: calls that could not be read, or whose arguments are wrong.
        unknown_tool: calls of a tool that is not there; they are not among `malformed`.
        repeated: searches and openings with the same arguments as one before.
        completed: the model said that it is done.
        truncated: its last turn was cut off at the limit of its length.
    """

    turns: int = 0
    searches: int = 0
    malformed: int = 0
    unknown_tool: int = 0
    repeated: int = 0
    completed: bool = False
    truncated: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Closed:
    """An episode that came to an end, with or without an answer.

    Attributes:
        answer: "" if the model gave none.
        cited: ids of documents that the model names as its evidence, each once.
        seen: ids of the documents in all tool results, in the order of first sight.
        fields: how many of the `FIELDS` of the last call were given, from 0 to 3.
        tally: counts.
    """

    answer: str
    cited: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    fields: int = 0
    tally: ToolTally = ToolTally()


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """An episode in which a call failed. It has no reward; it may be played again.

    Attributes:
        cause: one of `llm.outcomes.CAUSES`.
        message: one sentence.
        tally: the counts until then.
    """

    cause: str
    message: str
    tally: ToolTally = ToolTally()

    def __post_init__(self) -> None:
        if self.cause not in CAUSES:
            raise ValueError(f"a cause of failure is one of {', '.join(CAUSES)}, not {self.cause}.")


Ended = Closed | Failed
Play = Generator[Step, Reply, Ended]


class Agent(Protocol):
    """Plays episodes."""

    def play(self, task: ToolTask) -> Play:
        """One episode; see the module's text."""
