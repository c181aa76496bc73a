"""What the agents that retrieve share: how they ask, search and read, and how they end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

from qrag_jax.environments.episode import (
    AMBIGUOUS,
    FOUND,
    NO_RETRIEVAL,
    STATUSES,
    Closed,
    Complete,
    Failed,
    Hop,
    Play,
    Reply,
    Retrieve,
    Seen,
    Step,
    Task,
    Unplayable,
    ask,
)
from qrag_jax.llm.outcomes import READ, UNREAD, Answer, ChatRequest, CompletionRequest
from qrag_jax.llm.text.extraction import NoAnswer, last_object
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import Messages, Prompt, harmless, one_line


class Wrong(NamedTuple):
    """Why a model's reply cannot be used."""

    cause: str  # of the episode's end, if the model does not mend it
    message: str  # one sentence, which the model reads


Read = TypeVar("Read")


class Trail:
    """What an agent has done in one episode. What fails raises `Unplayable`.

    Attributes:
        hops: the retrievals whose passages have been read.
        searches: number of retrievals.
    """

    def __init__(self) -> None:
        self.hops: list[Hop] = []
        self.searches = 0

    def ask(self, request: ChatRequest | CompletionRequest) -> Generator[Step, Reply, Answer]:
        """The model's answer."""
        answer: Answer = yield from ask(Complete(request, shared=not self.searches))
        return answer

    def ask_well(
        self,
        talk: Messages,
        request: Callable[[Messages, Callable[[Answer], str]], ChatRequest],
        read: Callable[[Answer], Read | Wrong],
    ) -> Generator[Step, Reply, Read]:
        """What is read from the model's reply; if it is wrong, the model is corrected once."""

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
        """The passages found, in the order in which they are read."""
        passages = yield from ask(Retrieve(sub_query, tuple(self.hops)))
        self.searches += 1
        return tuple(passages)

    def final_answer(
        self,
        request: ChatRequest | CompletionRequest,
        read: Callable[[Answer], str | NoAnswer],
    ) -> Generator[Step, Reply, str]:
        """The answer that is read from the model's reply."""
        found = read((yield from self.ask(request)))
        if isinstance(found, NoAnswer):
            raise Unplayable(found.cause, found.message)
        return found


class SearchingAgent:
    """What all these agents are: `answer` plays the steps of one episode."""

    def answer(self, task: Task, trail: Trail) -> Generator[Step, Reply, str]:
        """The answer. What cannot be played raises `Unplayable`."""
        raise NotImplementedError

    def play(self, task: Task) -> Play:
        """One episode.

        Without a retrieval it fails whatever it says: the retriever has no part in it.
        """
        trail = Trail()
        try:
            answer = yield from self.answer(task, trail)
            if not trail.searches:
                raise Unplayable(NO_RETRIEVAL, "the model answered without a search.")
        except Unplayable as why:
            return Failed(why.cause, str(why), history=tuple(trail.hops))
        return Closed(answer, history=tuple(trail.hops))


def listed(hops: list[Hop]) -> str:
    """The hops as a model reads them, two lines each; "none" if there are none."""
    lines = [
        f"{number}. {one_line(hop.sub_query)}\n   {hop.status}: {one_line(hop.answer)}"
        for number, hop in enumerate(hops, 1)
    ]
    return "\n".join(lines) or "none"


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads passages: a second call of the model says what they answer to a sub-query.

    It is shown the bare sub-query, not the history: that is the retriever's.
    """

    prompt: Prompt  # with the slots `question` and `passages`
    generation: Generation  # how replies are sampled

    def __post_init__(self) -> None:
        self.prompt.fill({"question": "", "passages": ""})

    def hop(self, trail: Trail, sub_query: str) -> Generator[Step, Reply, Hop]:
        """Searches, reads what is found, and adds the hop to the trail.

        A reply that cannot be read counts as AMBIGUOUS with the answer "".
        """
        passages = yield from trail.search(sub_query)
        lines = [f"[{number}] {passage.whole}" for number, passage in enumerate(passages, 1)]
        texts = {"question": sub_query, "passages": "\n".join(lines) or "none"}
        said = self.generation.said

        def reads(answer: Answer) -> str:
            return UNREAD if read_evidence(sub_query, said(answer)) is None else READ

        answer = yield from trail.ask(self.generation.request(self.prompt.fill(texts), reads))
        hop = read_evidence(sub_query, said(answer)) or Hop(sub_query, "", AMBIGUOUS)
        trail.hops.append(hop)
        return hop


def read_evidence(sub_query: str, said: str | NoAnswer) -> Hop | None:
    """What a reader's reply says; None if it has no JSON object with a status and an answer.

    FOUND without an answer says nothing either.
    """
    found = None if isinstance(said, NoAnswer) else last_object(said, ("status", "answer"))
    if found is None:
        return None
    status = "_".join(str(found["status"]).upper().replace("-", " ").replace("_", " ").split())
    text = found["answer"]
    if text is None:
        text = ""
    if isinstance(text, int | float) and not isinstance(text, bool):
        text = str(text)
    if status not in STATUSES or not isinstance(text, str):
        return None
    text = one_line(text)
    return None if status == FOUND and not text else Hop(sub_query, text, status)
