"""For verifiers 0.4: a taskset, and a server of tools that all episodes share."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field, create_model

from musique_multihop.questions import SPLITS, Questions, Settings, Work, turn_text

_TYPES = typing.get_type_hints(Settings)
_FIELDS: Any = {f.name: (_TYPES[f.name], f.default) for f in dataclasses.fields(Settings)}
# The fields of `Settings`, and `split`: "train", or "dev" for the questions to score by.
MusiqueConfig: Any = create_model(
    "MusiqueConfig", __base__=vf.TasksetConfig, split=(str, SPLITS[0]), **_FIELDS
)


class MusiqueData(vf.TaskData):
    """A question; `question_id` finds its documents."""

    question_id: str
    answers: list[str]
    hops: int


class MusiqueState(vf.State):
    """Which question an episode is about, for the tools."""

    question_id: str = ""


class MusiqueToolsConfig(vf.SharedToolsetConfig):
    """The settings, for the tools' own process."""

    settings: dict[str, Any] = Field(default_factory=dict)


class MusiqueTools(vf.Toolset[MusiqueToolsConfig, MusiqueState]):
    """Searches the documents of the episode's question."""

    TOOL_PREFIX = None

    def __init__(self, config: MusiqueToolsConfig) -> None:
        super().__init__(config)
        self._questions = Questions(Settings(**config.settings))
        tasks = (task for split in SPLITS for task in self._questions.tasks(split))
        self._tasks = {task.id: task for task in tasks}

    @vf.tool
    def retrieve_documents(self, query: str, top_n: int | None = None) -> str:
        """Searches for the documents that fit a query best."""
        return self._answer("retrieve_documents", {"query": query, "top_n": top_n})

    @vf.tool
    def complete(
        self, reasoning: str = "", final_answer: str = "", cited_doc_ids: list[str] | None = None
    ) -> str:
        """Ends the work on the question with the answer."""
        return "Done."

    def _answer(self, name: str, arguments: dict[str, Any]) -> str:
        fields = {key: value for key, value in arguments.items() if value is not None}
        work = Work(self._questions, self._tasks[self.state.question_id])
        answers = work.said(turn_text("", [(name, fields)]))
        return "\n\n".join(content for _, content in answers)


class MusiqueTask(vf.Task[MusiqueData, MusiqueState]):
    """A question. Its rewards are those of qrag_jax's agent on the same turns."""

    source: tuple[Questions, Any]

    async def setup(self, trace: vf.Trace, runtime: Any) -> None:
        trace.state.question_id = self.data.question_id

    @vf.stop
    async def closed(self, trace: vf.Trace) -> bool:
        """As the agent ends: by `complete`, a turn without a call, or the limit of turns."""
        return self._work(trace).closed is not None

    @vf.reward(weight=1.0)
    async def combined(self, trace: vf.Trace) -> float:
        return self._rewards(trace)[0]

    @vf.metric
    async def parts(self, trace: vf.Trace) -> dict[str, float]:
        return self._rewards(trace)[1]

    def _rewards(self, trace: vf.Trace) -> tuple[float, dict[str, float]]:
        questions, task = self.source
        return questions.rewards(self._work(trace).end(), task)

    def _work(self, trace: vf.Trace) -> Work:
        questions, task = self.source
        work = Work(questions, task)
        for text, cut in _turns(trace):
            work.said(text, cut=cut)
        return work


class MusiqueTaskset(vf.Taskset[MusiqueTask, MusiqueConfig]):
    """All questions."""

    def load(self) -> Iterator[MusiqueTask]:
        questions = Questions(Settings(**_settings(self.config)))
        for task in questions.tasks(self.config.split):
            opening = questions.agent.opening(task.question)
            system = "\n\n".join(text for role, text in opening if role == "system")
            data = MusiqueData(
                id=task.id,
                question_id=task.id,
                prompt="\n\n".join(text for role, text in opening if role != "system"),
                system_prompt=system or None,
                answers=[*task.answers],
                hops=task.hops,
            )
            entry = MusiqueTask(data, self.config.task)
            entry.source = (questions, task)
            yield entry

    @classmethod
    def toolsets(cls, config: MusiqueConfig) -> list[Any]:
        return [MusiqueTools(MusiqueToolsConfig(settings=_settings(config)))]


def _settings(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _FIELDS}


def _turns(trace: vf.Trace) -> list[tuple[str, bool]]:
    """The model's turns as the agent reads them, and whether each was cut off."""
    cut = {call.node: call.finish_reason == "length" for call in trace.calls}
    turns = []
    for number, node in enumerate(trace.nodes):
        if node.sampled:
            message = node.message
            calls = [(call.name, call.arguments) for call in message.tool_calls or ()]
            turns.append((turn_text(message.content or "", calls), cut.get(number, False)))
    return turns


if __name__ == "__main__":
    MusiqueTools.run()
