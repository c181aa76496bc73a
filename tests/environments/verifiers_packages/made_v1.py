"""An environment of verifiers 0.4 for tests: a tool that counts letters."""

from __future__ import annotations

import math

import verifiers.v1 as vf


class LettersData(vf.TaskData):
    answer: str


class LettersTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    def count_letters(self, word: str) -> int:
        """Counts the letters of a word."""
        return len(word)


class LettersConfig(vf.TasksetConfig):
    does: str = "tool"
    size: int = 12


class LettersTask(vf.Task[LettersData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        does = trace.task.data.name
        if does == "raise":
            raise KeyError("no answer")
        if does == "nan":
            return math.nan
        return float(trace.task.data.answer in trace.last_reply)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self) -> list[LettersTask]:
        return [
            LettersTask(
                LettersData(
                    name=self.config.does,
                    prompt=f"How many letters has {'abcdefgh'[: 1 + n % 8]}?",
                    system_prompt="Use the tool.",
                    answer=str(1 + n % 8),
                ),
                self.config.task,
            )
            for n in range(self.config.size)
        ]

    @classmethod
    def toolsets(cls, config: LettersConfig) -> list[vf.Toolset]:
        return [LettersTools(vf.ToolsetConfig())]


__all__ = ["LettersTaskset"]


if __name__ == "__main__":
    LettersTools.run()
