"""Agents that plan with one prompt and read with another: ReAct, and a planner of sub-questions.

ReAct (Yao et al., 2023) is one conversation: the planner's own replies, and after each search one
line of the reader. It never sees a passage. After the last search it is asked for an answer from
what the reader said.

The planner of sub-questions sees in each step the question with the steps so far, and replies with
a JSON object: ASK a sub-question, or STOP. A last call puts the answers together.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Generator
from functools import partial
from typing import NamedTuple

from qrag_jax.environments.episode import (
    MALFORMED_CALL,
    NO_RETRIEVAL,
    Limits,
    Reply,
    Step,
    Task,
)
from qrag_jax.environments.rag.trail import Reader, SearchingAgent, Trail, Wrong, listed
from qrag_jax.llm.outcomes import Answer, ChatRequest
from qrag_jax.llm.text.extraction import NoAnswer, bare_line, last_object
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import Messages, Prompt, harmless, one_line

# What a model might go on with after a search: the reader's line, which it has not seen.
STOP = ("\nObservation", "\nFOUND:", "\nNOT_FOUND:", "\nAMBIGUOUS:")
_ACTION = re.compile(
    r"^[ \t*_`#>-]*(search|(?:final )?answer)[ \t*_`]*[:：][ \t*_`]*",
    re.IGNORECASE | re.MULTILINE,
)
_malformed = partial(Wrong, MALFORMED_CALL)
_ENDLESS = _malformed("Your thinking did not end; think in fewer words.")


def _final_answer(
    trail: Trail, messages: Messages, generation: Generation
) -> Generator[Step, Reply, str]:
    """The answer of a reply that ends with a line "Final answer: …"."""
    request = generation.request(messages, generation.reads_answer)
    return (yield from trail.final_answer(request, generation.final_answer))


class Move(NamedTuple):
    """What a reply of ReAct asks for: a search, or else that the text is the answer."""

    text: str
    searches: bool
    said: str  # the reply up to there


@dataclasses.dataclass(frozen=True)
class ReAct(SearchingAgent):
    """Plays episodes with a planner and a reader.

    Attributes:
        planner: the planner's prompt, with the slots `question` and `max_hops`.
        final: the prompt for the answer at the limit, with the slots `question` and `searches`.
        reader: reads the passages.
        generation: how the planner's replies and the final answer are sampled.
        limits: `max_hops` counts.
    """

    planner: Prompt
    final: Prompt
    reader: Reader
    generation: Generation
    limits: Limits = dataclasses.field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.planner.fill({"question": "", "max_hops": ""})
        self.final.fill({"question": "", "searches": ""})

    def answer(self, task: Task, trail: Trail) -> Generator[Step, Reply, str]:
        """See `SearchingAgent`."""
        texts = {"question": task.question, "max_hops": str(self.limits.max_hops)}
        talk = self.planner.fill(texts)
        while len(trail.hops) < self.limits.max_hops:
            move = yield from trail.ask_well(talk, self._request, partial(self._read, trail))
            if not move.searches:
                return move.text
            hop = yield from self.reader.hop(trail, move.text)
            line = f"{hop.status}: {hop.answer}".rstrip()
            talk = (*talk, ("assistant", harmless(move.said)), ("user", harmless(line)))
        filled = self.final.fill({"question": task.question, "searches": listed(trail.hops)})
        return (yield from _final_answer(trail, filled, self.generation))

    def _request(self, talk: Messages, reads: Callable[[Answer], str]) -> ChatRequest:
        request = self.generation.request(talk, reads)
        return dataclasses.replace(request, extra={**request.extra, "stop": list(STOP)})

    def _read(self, trail: Trail, answer: Answer) -> Move | Wrong:
        said = self.generation.said(answer)
        if isinstance(said, NoAnswer):
            return _ENDLESS
        found = _ACTION.search(said)
        if found is None:
            return _malformed(
                'Your reply has no line that begins with "Search:" or "Answer:"; write one of them '
                "below your thought."
            )
        text, newline, _ = said[found.end() :].lstrip().partition("\n")
        searches = found[1].lower() == "search"
        name = "Search" if searches else "Answer"
        bare = bare_line(one_line(text))
        if not any(map(str.isalnum, bare)):
            return _malformed(f'There is nothing after "{name}:"; write it on the same line.')
        if answer.finish_reason == "length" and not newline:
            return _malformed(f"Your {name.lower()} was cut off; use fewer words.")
        if not searches and not trail.searches:
            return Wrong(NO_RETRIEVAL, "You have not searched yet; search once at least.")
        upto = said[: found.start()].strip()
        return Move(bare, searches, f"{upto}\n{name}: {bare}".strip())


@dataclasses.dataclass(frozen=True)
class Planner(SearchingAgent):
    """Plays episodes in which a model asks one sub-question after the other."""

    steps: Prompt  # the prompt of a step, with the slots `question`, `steps` and `max_hops`
    synthesis: Prompt  # the prompt for the answer, with the slots `question` and `steps`
    reader: Reader  # reads the passages
    generation: Generation  # how steps and the answer are sampled
    limits: Limits = dataclasses.field(default_factory=Limits)  # `max_hops` counts

    def __post_init__(self) -> None:
        self.steps.fill({"question": "", "steps": "", "max_hops": ""})
        self.synthesis.fill({"question": "", "steps": ""})

    def answer(self, task: Task, trail: Trail) -> Generator[Step, Reply, str]:
        """See `SearchingAgent`."""
        request, read = self.generation.request, partial(self._read, trail)
        texts = {"question": task.question, "max_hops": str(self.limits.max_hops)}
        while len(trail.hops) < self.limits.max_hops:
            step = self.steps.fill(texts | {"steps": listed(trail.hops)})
            sub_query = yield from trail.ask_well(step, request, read)
            if not sub_query:
                break
            yield from self.reader.hop(trail, sub_query)
        filled = self.synthesis.fill({"question": task.question, "steps": listed(trail.hops)})
        return (yield from _final_answer(trail, filled, self.generation))

    def _read(self, trail: Trail, answer: Answer) -> str | Wrong:
        """The sub-question; "" to stop.

        The strategy makes the model think of other ways to ask; nothing here depends on it.
        """
        said = self.generation.said(answer)
        if isinstance(said, NoAnswer):
            return _ENDLESS
        found = last_object(said, ("action",))
        if found is None:
            return _malformed('Your reply has no JSON object with an "action".')
        action = str(found["action"]).strip().upper()
        if action == "STOP":
            if trail.searches:
                return ""
            return Wrong(NO_RETRIEVAL, "You have not asked anything yet; ASK once at least.")
        sub_query = found.get("sub_query")
        if action != "ASK":
            return _malformed('The "action" of your reply is neither ASK nor STOP.')
        if not isinstance(sub_query, str) or not any(map(str.isalnum, sub_query)):
            return _malformed('Your reply has no sub-question in "sub_query".')
        return one_line(sub_query)
