"""ReAct (Yao et al., 2023): a planner thinks and searches, and a reader tells it what was found.

The planner is one conversation: its own replies, and after each search one line of the reader. It
never sees a passage. After the last search it is asked for an answer from what the reader said.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Generator
from functools import partial
from typing import NamedTuple

from qrag_jax.environments.rag.episode import (
    MALFORMED_CALL,
    NO_RETRIEVAL,
    Limits,
    Play,
    Reply,
    Step,
    Task,
)
from qrag_jax.environments.rag.reading import Reader
from qrag_jax.environments.rag.trail import Trail, Wrong, played, told
from qrag_jax.llm.outcomes import Answer, ChatRequest
from qrag_jax.llm.text.extraction import NoAnswer, bare_line
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import Messages, Prompt, harmless, one_line

# What a model might go on with after a search: the reader's line, which it has not seen.
STOP = ("\nObservation", "\nFOUND:", "\nNOT_FOUND:", "\nAMBIGUOUS:")
_ACTION = re.compile(
    r"^[ \t*_`#>-]*(search|(?:final )?answer)[ \t*_`]*[:：][ \t*_`]*",
    re.IGNORECASE | re.MULTILINE,
)


class Move(NamedTuple):
    """What a planner's reply asks for: a search, or else that the text is the answer."""

    text: str
    searches: bool
    said: str  # the reply up to there


@dataclasses.dataclass(frozen=True)
class ReAct:
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

    def play(self, task: Task) -> Play:
        """One episode."""
        trail = Trail()
        return played(trail, self._answer(task, trail))

    def _answer(self, task: Task, trail: Trail) -> Generator[Step, Reply, str]:
        texts = {"question": task.question, "max_hops": str(self.limits.max_hops)}
        talk = self.planner.fill(texts)
        while len(trail.hops) < self.limits.max_hops:
            move = yield from trail.ask_well(talk, self._request, partial(self._read, trail))
            if not move.searches:
                return move.text
            hop = yield from self.reader.hop(trail, move.text)
            line = f"{hop.status}: {hop.answer}".rstrip()
            talk = (*talk, ("assistant", harmless(move.said)), ("user", harmless(line)))
        filled = self.final.fill({"question": task.question, "searches": told(trail.hops)})
        answer = yield from trail.final_answer(filled, self.generation)
        return answer

    def _request(self, talk: Messages, reads: Callable[[Answer], str]) -> ChatRequest:
        request = self.generation.request(talk, reads)
        return dataclasses.replace(request, extra={**request.extra, "stop": list(STOP)})

    def _read(self, trail: Trail, answer: Answer) -> Move | Wrong:
        said = self.generation.said(answer)
        if isinstance(said, NoAnswer):
            return Wrong(MALFORMED_CALL, "Your thinking did not end; think in fewer words.")
        found = _ACTION.search(said)
        if found is None:
            return Wrong(
                MALFORMED_CALL,
                'Your reply has no line that begins with "Search:" or "Answer:"; write one of them '
                "below your thought.",
            )
        text, newline, _ = said[found.end() :].lstrip().partition("\n")
        searches = found[1].lower() == "search"
        name = "Search" if searches else "Answer"
        bare = bare_line(one_line(text))
        if not any(map(str.isalnum, bare)):
            return Wrong(
                MALFORMED_CALL, f'There is nothing after "{name}:"; write it on the same line.'
            )
        if answer.finish_reason == "length" and not newline:
            return Wrong(MALFORMED_CALL, f"Your {name.lower()} was cut off; use fewer words.")
        if not searches and not trail.searches:
            return Wrong(NO_RETRIEVAL, "You have not searched yet; search once at least.")
        upto = said[: found.start()].strip()
        return Move(bare, searches, f"{upto}\n{name}: {bare}".strip())
