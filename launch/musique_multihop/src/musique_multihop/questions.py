"""The questions, the agent of RLVR that acts on them, and the rewards: without verifiers.

The agent is qrag_jax's own (`qrag_jax.environments.tools`): a generator that is sent what the
model said, and asks for searches. It reads calls in their text, so calls that verifiers gives as
objects are written again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from qrag_jax.data.reading import read_parts
from qrag_jax.data.sample import is_held_out, world
from qrag_jax.environments.episode import Closed, Said, Speak, ToolTask
from qrag_jax.environments.tasks import TasksConfig, bridge_task, tasks_of
from qrag_jax.environments.tools import COMPLETE, RETRIEVE, ToolAgent
from qrag_jax.feedback.rubric import Rubric, score
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.tool_calls import HERMES, ToolCall, write_call
from qrag_jax.retrieval.own_documents import OwnRetriever
from qrag_jax.runtime.bounded_json import typed

BRIDGE = "bridge"
SPLITS = ("train", "dev")
Message = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Arguments of the environment."""

    questions: str = BRIDGE  # or parts of data, PATH,CONFIG,SPLIT;PATH,CONFIG,SPLIT
    count: int = 300  # of questions that are made
    seed: int = 0  # of these
    retriever: str = "bm25"  # or golden
    top_n: int = 2  # documents of a search that does not say how many
    most: int = 20  # documents that a search may ask for
    max_turns: int = 10  # of the model
    prompt: str = "bare_question"  # a name of qrag_jax's or a file
    rubric: dict[str, Any] | None = None  # fields of `config.rubric`; the others are as there


class Questions:
    """The questions of some settings."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.retriever = settings, OwnRetriever(settings.retriever)
        self.rubric = typed(Rubric, settings.rubric or {}, "rubric")
        self.agent = ToolAgent(
            prompts.load(settings.prompt),
            form=HERMES,
            tools=(RETRIEVE, COMPLETE),
            max_turns=settings.max_turns,
            top_n=settings.top_n,
            most=settings.most,
        )

    def tasks(self, split: str = SPLITS[0]) -> list[ToolTask]:
        """All tasks of one of `SPLITS`; every tenth question of data, by its id, is of "dev"."""
        settings = self.settings
        if settings.questions == BRIDGE:
            questions = world().bridge_questions(settings.seed, split, range(settings.count))
            return [bridge_task(question) for question in questions]
        tasks = tasks_of(read_parts(settings.questions)[0], TasksConfig())
        return [task for task in tasks if is_held_out(task.id) == (split == "dev")]

    def rewards(self, closed: Closed, task: ToolTask) -> tuple[float, dict[str, float]]:
        """The reward of an episode, and its parts."""
        parts = score(closed, task)
        return self.rubric.reward(parts, task.hops), parts


class Work:
    """An episode of a task while it is played; `closed` is how it ended, None: it has not."""

    def __init__(self, questions: Questions, task: ToolTask) -> None:
        self.closed: Closed | None = None
        self.task, self._questions = task, questions
        self._play = questions.agent.play(task)
        next(self._play)

    def said(self, text: str, *, cut: bool = False) -> list[Message]:
        """What the environment answers to a turn of the model; [] if that was the last one."""
        if self.closed is not None:
            return []
        try:
            step: Any = self._play.send(Said(text, "length" if cut else "stop"))
            while not isinstance(step, Speak):  # a search: the agent has no tool that opens texts
                search = step.query, step.most, self.task.documents
                step = self._play.send(self._questions.retriever.find([search])[0])
            return [*step.messages]
        except StopIteration as end:
            self.closed = end.value
            return []

    def end(self) -> Closed:
        """How it ended; one that has not ended is broken off, by a turn without a call."""
        self.said("", cut=True)
        assert self.closed is not None
        return self.closed


def turn_text(content: str, calls: Sequence[tuple[str, Any]]) -> str:
    """A turn as the agent reads it: the text, then its calls.

    Args:
        calls: names, and arguments as JSON or as objects.
    """
    parts = [content] if content else []
    for name, arguments in calls:
        values = arguments
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                values = json.loads(arguments)
        if isinstance(values, Mapping):
            parts.append(write_call(ToolCall(name, values), HERMES))
        else:
            parts.append(f"<tool_call>\n{arguments}\n</tool_call>")
    return "\n".join(parts)
