"""The reward of an episode with tools by a user's own function, by the path of its file.

    def score(question, answers, answer, parts):
        return parts["f1"] + 0.5 * parts["recall"] - 0.1 * ("I think" in answer)

`question` and `answer` (the model's; "" if it gave none) are texts, `answers` is a list of the
right ones, and `parts` has the measures of `feedback.rubric`. What it may return, and what a
failure is, is as in `feedback.own_reward`; there is no sandbox.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from qrag_jax.environments.episode import Closed, ToolTask
from qrag_jax.feedback.language_model import Reward
from qrag_jax.feedback.own_reward import number_of
from qrag_jax.feedback.rubric import Rubric
from qrag_jax.runtime import own_code
from qrag_jax.runtime.own_code import OwnCode

PATH = "config.rubric.path"
TAKES = ("question", "answers", "answer", "parts")


@dataclasses.dataclass(frozen=True)
class OwnRubric:
    """A user's function in the place of a `Rubric`."""

    code: OwnCode

    @classmethod
    def load(cls, path: str) -> OwnRubric:
        """Runs the file."""
        return cls(own_code.load(path, PATH, TAKES))


def reward_of(
    rubric: Rubric | OwnRubric, closed: Closed, task: ToolTask, parts: Mapping[str, float]
) -> Reward:
    """The reward of an episode, or why a user's function gives none.

    Args:
        parts: as `feedback.rubric.score` gives them.
    """
    if isinstance(rubric, Rubric):
        return rubric.reward(parts, task.hops)
    texts = {"question": task.question, "answers": [*task.answers], "answer": closed.answer}
    call = rubric.code.function
    return number_of(rubric.code, lambda: call(**texts, parts=dict(parts)), task.id)
