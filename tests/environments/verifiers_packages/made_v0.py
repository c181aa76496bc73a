"""An environment of verifiers below 0.4 for tests: a tool that counts letters."""

from __future__ import annotations

import math

import verifiers as vf
from datasets import Dataset


def count_letters(word: str) -> int:
    """Counts the letters of a word.

    Args:
        word: the word.
    """
    return len(word)


class Endless(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "go on"}]


class Stubborn(Endless):
    """It asks again whatever it is told."""

    async def setup_state(self, state):
        for _ in range(100):
            try:
                await self.get_model_response(state, state["prompt"])
            except vf.Error:
                continue
        return state


class OtherModel(Endless):
    async def setup_state(self, state):
        state["model"] = "another-model"
        return state


class Rewrites(Endless):
    """It shortens what the model said, and asks twice behind one prompt."""

    async def get_prompt_messages(self, state):
        turns = len(state["trajectory"])
        if turns == 0:
            return state["prompt"]
        if turns == 1:
            return [*state["prompt"], {"role": "assistant", "content": "short"}, *self._go_on()]
        first = state["trajectory"][0]
        return [*first["prompt"], *first["completion"], *self._go_on()]

    def _go_on(self):
        return [{"role": "user", "content": "go on"}]


KINDS = {"endless": Endless, "stubborn": Stubborn, "model": OtherModel, "rewrites": Rewrites}


def load_environment(does: str = "tool", size: int = 12):
    rows = [
        {"question": f"How many letters has {'abcdefgh'[: 1 + n % 8]}?", "answer": str(1 + n % 8)}
        for n in range(size)
    ]

    def right(completion, answer, **kwargs):
        if does == "raise":
            raise KeyError("no answer")
        if does == "nan":
            return math.nan
        return float(answer in (completion[-1]["content"] or ""))

    async def length(completion, **kwargs):
        return float(len(completion))

    rubric = vf.Rubric(funcs=[right, length], weights=[1.0, 0.0])
    given = {"dataset": Dataset.from_list(rows), "rubric": rubric}
    if does in KINDS:
        return KINDS[does](max_turns=4 if does == "rewrites" else -1, **given)
    if does == "group":

        def rank(completions, **kwargs):
            sizes = [len(each[-1]["content"] or "") for each in completions]
            return [sorted(sizes).index(size) / len(sizes) for size in sizes]

        given["rubric"] = vf.Rubric(funcs=[rank])
        return vf.SingleTurnEnv(**given)
    return vf.ToolEnv(tools=[count_letters], system_prompt="Use the tool.", max_turns=6, **given)
