"""What all agents share: how they ask and search, and how their episodes end."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

from qrag_jax.environments.rag.episode import (
    NO_RETRIEVAL,
    Broken,
    Complete,
    Finished,
    Hop,
    Play,
    Reply,
    Retrieve,
    Seen,
    Step,
)
from qrag_jax.llm.outcomes import READ, UNREAD, Answer, ChatRequest, CompletionRequest, Failure
from qrag_jax.llm.text.extraction import NoAnswer
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import Messages, harmless, one_line


class Unplayable(Exception):
    """Ends an episode from within; `played` makes a `Broken` of it."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Wrong(NamedTuple):
    """Why a model's reply cannot be used."""

    cause: str  # of the episode's end, if the model does not mend it
    message: str  # one sentence, told to the model


Read = TypeVar("Read")


class Trail:
    """What an agent has done in one episode.

    Attributes:
        hops: the retrievals whose passages have been read.
        searches: number of retrievals.
    """

    def __init__(self) -> None:
        self.hops: list[Hop] = []
        self.searches = 0

    def ask(self, request: ChatRequest | CompletionRequest) -> Generator[Step, Reply, Answer]:
        """The model's answer.

        Raises:
            Unplayable: there is none.
        """
        reply = yield Complete(request, shared=not self.searches)
        if isinstance(reply, Failure):
            raise Unplayable(reply.cause, reply.message)
        if not isinstance(reply, Answer):
            raise TypeError(f"the reply to Complete is an outcome, not {type(reply).__name__}.")
        return reply

    def ask_well(
        self,
        talk: Messages,
        request: Callable[[Messages, Callable[[Answer], str]], ChatRequest],
        read: Callable[[Answer], Read | Wrong],
    ) -> Generator[Step, Reply, Read]:
        """What is read from the model's reply; if it is wrong, the model is told so once.

        Raises:
            Unplayable: there is no reply, or the second one is wrong, too.
        """

        def reads(answer: Answer) -> str:
            return UNREAD if isinstance(read(answer), Wrong) else READ

        answer = yield from self.ask(request(talk, reads))
        found = read(answer)
        if not isinstance(found, Wrong):
            return found
        again = (("assistant", harmless(answer.text)), ("user", f"{found.message} Reply again."))
        answer = yield from self.ask(request((*talk, *again), reads))
        found = read(answer)
        if not isinstance(found, Wrong):
            return found
        raise Unplayable(found.cause, f"the model was corrected, and still: {found.message}")

    def search(self, sub_query: str) -> Generator[Step, Reply, tuple[Seen, ...]]:
        """The passages found, in the order in which they are read.

        Raises:
            Unplayable: the search failed.
        """
        if len(self.hops) != self.searches:
            raise RuntimeError("an agent reads the passages of a search before it searches again.")
        reply = yield Retrieve(sub_query, tuple(self.hops))
        if isinstance(reply, Failure):
            raise Unplayable(reply.cause, reply.message)
        if isinstance(reply, Answer):
            raise TypeError("the reply to Retrieve is passages, not an Answer.")
        self.searches += 1
        return tuple(reply)

    def final_answer(
        self, messages: Messages, generation: Generation
    ) -> Generator[Step, Reply, str]:
        """The answer of a reply that ends with a line "Final answer: …".

        Raises:
            Unplayable: there is no reply, or no answer in it.
        """
        answer = yield from self.ask(generation.request(messages, generation.reads_answer))
        found = generation.final_answer(answer)
        if isinstance(found, NoAnswer):
            raise Unplayable(found.cause, found.message)
        return found


def played(trail: Trail, steps: Generator[Step, Reply, str]) -> Play:
    """Plays the steps, which return the answer; this is the only way to a `Finished`.

    An episode without a retrieval is broken whatever it says: the retriever has no part in it.
    """
    try:
        answer = yield from steps
        if not trail.searches:
            raise Unplayable(NO_RETRIEVAL, "the model answered without a search.")
    except Unplayable as why:
        return Broken(why.cause, str(why), tuple(trail.hops))
    return Finished(answer, tuple(trail.hops))


def told(hops: list[Hop]) -> str:
    """The hops as a model is told them, two lines each; "none" if there are none."""
    lines = [
        f"{number}. {one_line(hop.sub_query)}\n   {hop.status}: {one_line(hop.answer)}"
        for number, hop in enumerate(hops, 1)
    ]
    return "\n".join(lines) or "none"


def shown(passages: tuple[Seen, ...]) -> str:
    """The passages as a model is shown them: numbered, a line each; "none" if there are none."""
    lines = [f"[{number}] {passage.whole}" for number, passage in enumerate(passages, 1)]
    return "\n".join(lines) or "none"
