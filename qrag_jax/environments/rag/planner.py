"""A planner that takes a question apart step by step; a last call puts the answers together.

In each step the model sees the question with the steps so far, and replies with a JSON object: ASK
a sub-question, or STOP. The same reader as ReAct's answers each sub-question.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from functools import partial

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
from qrag_jax.llm.outcomes import Answer
from qrag_jax.llm.text.extraction import NoAnswer, last_object
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import Prompt, one_line

ASK, STOP = "ASK", "STOP"


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plays episodes in which a model asks one sub-question after the other.

    Attributes:
        steps: the prompt of a step, with the slots `question`, `steps` and `max_hops`.
        synthesis: the prompt for the answer, with the slots `question` and `steps`.
        reader: reads the passages.
        generation: how steps and the answer are sampled.
        limits: `max_hops` counts.
    """

    steps: Prompt
    synthesis: Prompt
    reader: Reader
    generation: Generation
    limits: Limits = dataclasses.field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.steps.fill({"question": "", "steps": "", "max_hops": ""})
        self.synthesis.fill({"question": "", "steps": ""})

    def play(self, task: Task) -> Play:
        """One episode."""
        trail = Trail()
        return played(trail, self._answer(task, trail))

    def _answer(self, task: Task, trail: Trail) -> Generator[Step, Reply, str]:
        while len(trail.hops) < self.limits.max_hops:
            sub_query = yield from self._step(task, trail)
            if not sub_query:
                break
            yield from self.reader.hop(trail, sub_query)
        texts = {"question": task.question, "steps": told(trail.hops)}
        answer = yield from trail.final_answer(self.synthesis.fill(texts), self.generation)
        return answer

    def _step(self, task: Task, trail: Trail) -> Generator[Step, Reply, str]:
        """The next sub-question; "" to stop."""
        texts = {
            "question": task.question,
            "steps": told(trail.hops),
            "max_hops": str(self.limits.max_hops),
        }
        request, read = self.generation.request, partial(self._read, trail)
        step = yield from trail.ask_well(self.steps.fill(texts), request, read)
        return step

    def _read(self, trail: Trail, answer: Answer) -> str | Wrong:
        """The sub-question or "".

        The strategy makes the model think of other ways to ask; nothing here depends on it.
        """
        said = self.generation.said(answer)
        if isinstance(said, NoAnswer):
            return Wrong(MALFORMED_CALL, "Your thinking did not end; think in fewer words.")
        found = last_object(said, ("action",))
        if found is None:
            return Wrong(MALFORMED_CALL, 'Your reply has no JSON object with an "action".')
        action = str(found["action"]).strip().upper()
        if action == STOP:
            if trail.searches:
                return ""
            return Wrong(NO_RETRIEVAL, "You have not asked anything yet; ASK once at least.")
        sub_query = found.get("sub_query")
        if action != ASK:
            return Wrong(MALFORMED_CALL, 'The "action" of your reply is neither ASK nor STOP.')
        if not isinstance(sub_query, str) or not any(map(str.isalnum, sub_query)):
            return Wrong(MALFORMED_CALL, 'Your reply has no sub-question in "sub_query".')
        return one_line(sub_query)
