"""What an agent asks of the world, what it gets, and how an episode ends.

An agent is a generator without effects: it yields a step, is sent the reply, and returns a `Closed`
or a `Failed`. It knows no model, tokens, index or clock, so that whoever plays it may run hundreds
of episodes at once and put their requests into batches.

    play = agent.play(task)
    step = next(play)
    while True:
        try:
            step = play.send(reply_to(step))
        except StopIteration as end:
            return end.value

A failure is a value, never an answer: a call that failed ends the episode in `Failed`, which has no
reward. So does, of agents of a server's model, a reply that cannot be used even after a correction,
or an episode without a retrieval. What a policy itself does wrong, such as a malformed call, is no
failure: it is answered and counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from qrag_jax.data.sample import Passage
from qrag_jax.llm.outcomes import ChatRequest, CompletionRequest, Failure, Outcome
from qrag_jax.llm.text.prompts import Messages

FOUND, NOT_FOUND, AMBIGUOUS = STATUSES = ("FOUND", "NOT_FOUND", "AMBIGUOUS")
FIELDS = ("reasoning", "final_answer", "cited_doc_ids")  # what the tool `complete` takes

# Why an episode failed, besides the causes of `outcomes.Failure`: the model never searched, its
# calls could not be read, or a user's own agent failed.
NO_RETRIEVAL, MALFORMED_CALL, OWN_CODE = "no_retrieval", "malformed_call", "own_code"


class Document(NamedTuple):
    """A document as a tool gives it."""

    id: str  # unique among the documents of its task
    title: str
    text: str  # what the model reads: the title is in it, if it is to be read
    # of a task's own document: whether its question needs it. What a search finds does not say
    is_supporting: bool = False
    score: float = 0.0  # by the search that found it; 0 where that tells none


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What an agent is asked; `id` is the question's own in its data set."""

    id: str
    question: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolTask(Task):
    """A question, its gold answers, and what it needs."""

    answers: tuple[str, ...]  # the gold answers, each of which counts
    documents: tuple[Document, ...] = ()  # the question's own; () if the agent searches a corpus
    hops: int = 1  # how many supporting documents the question needs
    # ids of the supporting documents in a corpus; () for own documents
    gold_ids: tuple[str, ...] = ()

    @property
    def gold(self) -> tuple[str, ...]:
        ids = tuple(document.id for document in self.documents if document.is_supporting)
        return ids or self.gold_ids


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """What a search and the reading of its passages gave."""

    sub_query: str  # what was searched for
    answer: str  # what its passages say to it, in a few words; may be ""
    status: str = ""  # one of `STATUSES`; "" if the agent has no such judgement (Search-R1)


History = tuple[Hop, ...]  # the oldest first


@dataclasses.dataclass(frozen=True, slots=True)
class Complete:
    """Ask a server's language model. The reply is an `Outcome`."""

    request: ChatRequest | CompletionRequest  # what is asked
    # nothing retrieved has gone into the request. It depends on the question alone, so that the
    # episodes of a group may share one outcome.
    shared: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Retrieve:
    """Search by the policy. The reply is the passages, as they are read, or a `Failure`."""

    sub_query: str  # what to search for
    history: History  # the hops before this one, each with the evidence that it found


@dataclasses.dataclass(frozen=True, slots=True)
class Speak:
    """Let the policy speak. The reply is a `Said` or a `Failure`."""

    # those that follow what was there before; at first the whole prompt. What the model itself said
    # is not among them: whoever plays has it, as tokens.
    messages: Messages


class Said(NamedTuple):
    text: str
    finish: Literal["stop", "length"]  # "length": it was cut off


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """Search by a tool. The reply is documents, best first, or a `Failure`."""

    query: str  # what to search for
    most: int  # how many documents to give, at least 1


@dataclasses.dataclass(frozen=True, slots=True)
class Open:
    """Get one document. The reply is it alone, () if there is none, or a `Failure`."""

    doc_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """Call a function of the user's. The reply is a `tool_functions.Called`, two texts."""

    name: str
    arguments: Mapping[str, Any]


Step = Complete | Retrieve | Speak | Look | Open | Call
Reply = Outcome | Sequence[Passage] | Said | tuple[Document, ...] | tuple[str, str]


@dataclasses.dataclass(slots=True)
class ToolTally:
    """What happened in an episode of a policy that speaks; it is counted while that is played."""

    turns: int = 0  # turns of the model
    searches: int = 0  # `Look`s that were answered
    malformed: int = 0  # calls that could not be read, or whose arguments are wrong
    unknown_tool: int = 0  # calls of a tool that is not there; they are not among `malformed`
    repeated: int = 0  # searches and openings with the same arguments as one before
    calls: int = 0  # of the user's functions, but for those that are `malformed`
    failed_calls: int = 0  # of these, those that raised, took too long or ended the process
    completed: bool = False  # the model said that it is done
    truncated: bool = False  # its last turn was cut off at the limit of its length


@dataclasses.dataclass(frozen=True, slots=True)
class Closed:
    """An episode that came to an end, with or without an answer, which may be wrong."""

    answer: str  # "" if the model gave none
    cited: tuple[str, ...] = ()  # ids of documents that the model names as its evidence, each once
    # ids of the documents in all tool results, in the order of first sight
    seen: tuple[str, ...] = ()
    fields: int = 0  # how many of the `FIELDS` of the last call were given, from 0 to 3
    tally: ToolTally = dataclasses.field(default_factory=ToolTally)  # counts
    history: History = ()  # all hops of an agent that retrieves, one for each retrieval


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """An episode without a reward; it may be played again."""

    cause: str  # of a `Failure`, or `NO_RETRIEVAL`, `MALFORMED_CALL` or `OWN_CODE`
    message: str  # one sentence
    # the counts until then
    tally: ToolTally = dataclasses.field(default_factory=ToolTally)
    history: History = ()  # the hops until then


Ended = Closed | Failed
T = TypeVar("T")
Steps = Generator[Step, Reply, T]  # some steps of an episode, which come to a value
Play = Steps[Ended]


class Agent(Protocol):
    def play(self, task: Any) -> Play:
        """One episode of a `Task`; see the module's text."""


class Unplayable(Exception):
    """Ends an episode from within; its agent makes a `Failed` of it."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


def line_of(passage: Passage) -> str:
    """A passage as an agent of a server's model sees it."""
    parts = (passage.title.strip(), passage.text.strip())
    return " ".join(". ".join(part for part in parts if part).split())


def ask(step: Step) -> Steps[Any]:
    return usable((yield step))


def usable(value: T | Failure) -> T:
    if isinstance(value, Failure):
        raise Unplayable(value.cause, value.message)
    return value
