"""What an agent asks of the world, what it gets, and how an episode ends.

An agent is a generator without effects: it yields `Complete` or `Retrieve`, is sent the reply, and
returns a `Finished` or a `Broken`. It knows no model, index or clock, so that whoever plays it may
run hundreds of episodes at once and put their requests into batches.

    play = agent.play(question)
    step = next(play)
    while True:
        try:
            step = play.send(reply_to(step))
        except StopIteration as end:
            return end.value

A failure is a value, never an answer: a call that failed, a reply that cannot be used even after a
correction, or an episode without a retrieval ends in `Broken`, which has no reward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol

from qrag_jax.errors import check_least
from qrag_jax.llm.outcomes import CAUSES as CALL_CAUSES
from qrag_jax.llm.outcomes import ChatRequest, CompletionRequest, Outcome
from qrag_jax.llm.text.extraction import NO_ANSWER_CAUSES

FOUND, NOT_FOUND, AMBIGUOUS = STATUSES = ("FOUND", "NOT_FOUND", "AMBIGUOUS")

NO_RETRIEVAL, MALFORMED_CALL, OWN_CODE = "no_retrieval", "malformed_call", "own_code"
# Why an episode broke off: a call failed, its final answer cannot be read, the model never
# searched, its calls could not be read, or a user's own agent failed.
BROKEN_CAUSES = (*CALL_CAUSES, *NO_ANSWER_CAUSES, NO_RETRIEVAL, MALFORMED_CALL, OWN_CODE)


class Seen(NamedTuple):
    """A passage as an agent sees it."""

    name: str  # the id in the corpus
    text: str
    title: str = ""

    @property
    def whole(self) -> str:
        """Title and text, on one line."""
        parts = (self.title.strip(), self.text.strip())
        return " ".join(". ".join(part for part in parts if part).split())


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """What a search and the reading of its passages gave.

    Attributes:
        sub_query: what was searched for.
        answer: what its passages say to it, in a few words; may be "".
        status: one of `STATUSES`; "" if the agent has no such judgement (Search-R1).
    """

    sub_query: str
    answer: str
    status: str = ""


History = tuple[Hop, ...]  # the oldest first


@dataclasses.dataclass(frozen=True, slots=True)
class Complete:
    """Ask the language model. The reply is an `Outcome`.

    Attributes:
        request: what is asked.
        shared: nothing retrieved has gone into the request. It depends on the question alone, so
            that the episodes of a group may share one outcome.
    """

    request: ChatRequest | CompletionRequest
    shared: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Retrieve:
    """Search the corpus. The reply is the passages in the order in which they are read.

    If the search fails, the reply is a `Failure`.

    Attributes:
        sub_query: what to search for.
        history: the hops before this one, each with the evidence that it found.
    """

    sub_query: str
    history: History


Step = Complete | Retrieve
Reply = Outcome | Sequence[Seen]


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """An episode that ended with an answer, which may be wrong.

    Attributes:
        answer: "" if the agent gave up.
        history: all hops, one for each retrieval.
    """

    answer: str
    history: History


@dataclasses.dataclass(frozen=True, slots=True)
class Broken:
    """An episode without an answer. It has no reward; it may be played again.

    Attributes:
        cause: one of `BROKEN_CAUSES`.
        message: one sentence.
        history: the hops until then.
    """

    cause: str
    message: str
    history: History = ()

    def __post_init__(self) -> None:
        if self.cause not in BROKEN_CAUSES:
            known = ", ".join(BROKEN_CAUSES)
            raise ValueError(f"an episode's cause is one of {known}, not {self.cause}.")


Ended = Finished | Broken
Play = Generator[Step, Reply, Ended]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What an agent is asked; `id` is the question's own in its data set."""

    id: str
    question: str


class Agent(Protocol):
    """Plays episodes."""

    def play(self, task: Task) -> Play:
        """One episode; see the module's text."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long an episode may be."""

    max_hops: int = 4  # retrievals; after the last one a final answer is asked for
    max_turns: int = 5  # Search-R1: replies of the model before that, unusable ones included

    def __post_init__(self) -> None:
        check_least("agent", self, max_hops=1, max_turns=1)
