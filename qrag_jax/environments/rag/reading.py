"""The reading of passages: a second call of the model says what they answer to a sub-query."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator

from qrag_jax.environments.rag.episode import AMBIGUOUS, FOUND, STATUSES, Hop, Reply, Step
from qrag_jax.environments.rag.trail import Trail, shown
from qrag_jax.llm.outcomes import READ, UNREAD, Answer
from qrag_jax.llm.text.extraction import NoAnswer, last_object
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import Prompt, one_line


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads passages with a language model.

    It is shown the bare sub-query, not the history: that is the retriever's.

    Attributes:
        prompt: with the slots `question` and `passages`.
        generation: how replies are sampled.
    """

    prompt: Prompt
    generation: Generation

    def __post_init__(self) -> None:
        self.prompt.fill({"question": "", "passages": ""})

    def hop(self, trail: Trail, sub_query: str) -> Generator[Step, Reply, Hop]:
        """Searches, reads what is found, and adds the hop to the trail.

        A reply that cannot be read counts as AMBIGUOUS with the answer "".

        Raises:
            Unplayable: the search or the call failed.
        """
        passages = yield from trail.search(sub_query)
        texts = {"question": sub_query, "passages": shown(passages)}
        said = self.generation.said

        def reads(answer: Answer) -> str:
            return UNREAD if read(sub_query, said(answer)) is None else READ

        answer = yield from trail.ask(self.generation.request(self.prompt.fill(texts), reads))
        hop = read(sub_query, said(answer)) or Hop(sub_query, "", AMBIGUOUS)
        trail.hops.append(hop)
        return hop


def read(sub_query: str, said: str | NoAnswer) -> Hop | None:
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
