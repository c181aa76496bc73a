"""Rewards of an episode with tools: its answer, its searches, its citations and its form.

`score` measures the parts, and `Rubric` says what each is worth.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated

from qrag_jax.environments.episode import FIELDS, Closed, ToolTask
from qrag_jax.errors import Positive, one_of
from qrag_jax.metrics import answers
from qrag_jax.runtime import own_code
from qrag_jax.runtime.own_code import OwnCode

if TYPE_CHECKING:
    from qrag_jax.feedback.rewards import Reward

OF_ANSWER = ("em", "f1")
PARTS = (
    *OF_ANSWER,
    *("recall", "precision", "citation", "citation_precision", "citation_f1", "format"),
)

HOP_FACTORS: dict[str, Callable[[int], float]] = {
    "none": lambda hops: 1.0,
    "times_half": lambda hops: hops / 2,
    "times_half_up_to_1": lambda hops: min(hops / 2, 1.0),
    "over": lambda hops: 1 / hops,
}
ANSWER, ALL = "answer", "all"


def score(closed: Closed, task: ToolTask) -> dict[str, float]:
    """Each of `PARTS` of one episode, in [0, 1]; `Rubric` says what they are.

    Without an answer `em` and `f1` are 0. Without gold documents `recall` and `precision` are 0,
    and the three parts of citations 1.
    """
    em, f1 = answers.musique(closed.answer, task.answers)
    if not closed.answer.strip():
        em = f1 = 0.0
    gold, seen, cited = set(task.gold), set(closed.seen), set(closed.cited)
    cited_recall = _share(gold & cited, gold) if gold else 1.0
    cited_precision = _share(gold & cited, cited) if gold else 1.0
    total = cited_recall + cited_precision
    return {
        "em": em,
        "f1": f1,
        "recall": _share(gold & seen, gold),
        "precision": _share(gold & seen, seen),
        "citation": cited_recall,
        "citation_precision": cited_precision,
        "citation_f1": 2 * cited_recall * cited_precision / total if total else 0.0,
        "format": closed.fields / len(FIELDS),
    }


def _share(part: Collection[str], whole: Collection[str]) -> float:
    return len(part) / len(whole) if whole else 0.0


@dataclasses.dataclass(frozen=True)
class Rubric:
    """One reward: the weighted sum of the parts over the divisor.

    The defaults are those of the last commit of RLVR (github.com/bdsaglam/rlvr); its earlier ones
    are variants of configs/rlvr.py.
    """

    # Weight of exact match of the answer, by MuSiQue's metric; 0: a part does not count
    em: float = 0.9
    f1: float = 1.0  # weight of the answer's F1, likewise
    recall: float = 1.0  # weight of the share of gold documents that tools gave
    precision: float = 0.4  # weight of the share of gold ones among the documents that tools gave
    # Weight of the share of gold documents that are cited, so that it is free to cite everything
    citation: float = 0.6
    citation_precision: float = 0.0  # weight of the share of gold ones among those cited
    citation_f1: float = 0.0  # weight of the harmonic mean of the two before
    format: float = 0.1  # weight of the share of the fields of the last call that were given
    # Factor by the number h of documents that the question needs: none (1), times_half (h/2),
    # times_half_up_to_1 (h/2, at most 1) or over (1/h)
    hops: Annotated[str, one_of(HOP_FACTORS)] = "times_half"
    scales: Annotated[str, one_of((ANSWER, ALL))] = ALL  # it multiplies em and f1 alone, or all
    divisor: Positive = 4.0  # of the sum

    def reward(self, parts: Mapping[str, float], hops: int) -> float:
        """The reward of an episode with the parts of `score`, for a question of so many hops."""
        factor, terms = HOP_FACTORS[self.hops](hops), []
        for part in PARTS:
            scaled = factor if self.scales == ALL or part in OF_ANSWER else 1.0
            terms.append(getattr(self, part) * scaled / self.divisor * parts[part])
        return math.fsum(terms)


# ---------------------------------------------------------------- a user's own function
#
#     def score(question, answers, answer, parts):
#         return parts["f1"] + 0.5 * parts["recall"] - 0.1 * ("I think" in answer)
#
# `question` and `answer` (the model's; "" if it gave none) are texts, `answers` is a list of the
# right ones, and `parts` has the measures above. Failures are as in `rewards.number_of`.

OWN_PATH = "config.rubric.path"


def own_rubric(path: str) -> OwnCode:
    return own_code.load(path, OWN_PATH, ("question", "answers", "answer", "parts"))


def reward_of(
    rubric: Rubric | OwnCode, closed: Closed, task: ToolTask, parts: Mapping[str, float]
) -> Reward:
    """The reward of an episode by the parts of `score`, or why a user's function gives none."""
    if isinstance(rubric, Rubric):
        return rubric.reward(parts, task.hops)
    from qrag_jax.feedback.rewards import number_of  # environments of others use rubrics alone

    texts = {"question": task.question, "answers": [*task.answers], "answer": closed.answer}
    return number_of(rubric, lambda: rubric.function(**texts, parts=dict(parts)), task.id)
