"""For verifiers below 0.4."""

from __future__ import annotations

import importlib
from typing import Any

from datasets import Dataset

from musique_multihop.questions import PARTS, SPLITS, Questions, Settings, turn_text

try:  # 0.3 has moved it
    vf: Any = importlib.import_module("verifiers.legacy")
except ModuleNotFoundError:
    vf = importlib.import_module("verifiers")


class MusiqueEnv(vf.MultiTurnEnv):
    """Plays qrag_jax's agent; a turn without a call ends the episode, as `complete` does."""

    def __init__(self, questions: Questions, **given: Any) -> None:
        super().__init__(**given)
        self._questions = questions
        self._tasks = {task.id: task for split in SPLITS for task in questions.tasks(split)}

    async def setup_state(self, state: Any) -> Any:
        state["work"] = self._questions.begin(self._tasks[state["info"]["id"]])
        return state

    @vf.stop
    async def is_closed(self, state: Any) -> bool:
        """Whether the last turn has ended the episode."""
        return self.read(state)

    def read(self, state: Any) -> bool:
        """Reads the last turn, once, and keeps what is answered; whether the episode has ended."""
        trajectory, work = state["trajectory"], state.get("work")
        if work is None or not trajectory or state.get("read") == len(trajectory):
            return work is not None and work.closed is not None
        state["read"] = len(trajectory)
        message, last = trajectory[-1]["completion"][-1], trajectory[-1]
        calls = message.get("tool_calls") or []
        text = turn_text(message["content"] or "", [(call.name, call.arguments) for call in calls])
        answers = work.said(text, cut=bool(last["is_truncated"]))
        state["answers"] = [
            {"role": "tool", "tool_call_id": call.id, "content": content}
            for call, (_, content) in zip(calls, answers)
        ] + [{"role": "user", "content": content} for _, content in answers[len(calls) :]]
        return work.closed is not None

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return state["answers"]


def open_environment(**arguments: Any) -> Any:
    """The environment; see `Settings`."""
    questions = Questions(Settings(**arguments))

    def found(state: Any) -> tuple[float, dict[str, float]]:
        if "found" not in state:
            environment.read(state)  # another limit may have ended the episode
            work = state["work"]
            closed = work.closed or work.break_off()
            state["found"] = questions.rewards(closed, work.task)
        return state["found"]

    def part(name: str) -> Any:
        def measure(state: Any, **kwargs: Any) -> float:
            return found(state)[1][name]

        measure.__name__ = name
        return measure

    def combined(state: Any, **kwargs: Any) -> float:
        return found(state)[0]

    rubric = vf.Rubric(funcs=[combined, *map(part, PARTS)], weights=[1.0, *([0.0] * len(PARTS))])
    rows = {
        split: Dataset.from_list(
            [
                {
                    "prompt": questions.opening(task),
                    "answer": task.answers[0],
                    "info": {"id": task.id, "hops": task.hops},
                }
                for task in questions.tasks(split)
            ]
        )
        for split in SPLITS
    }
    environment = MusiqueEnv(
        questions,
        dataset=rows["train"],
        eval_dataset=rows["dev"],
        rubric=rubric,
        tool_defs=questions.schemas(),
        max_turns=questions.settings.max_turns,
    )
    return environment
