"""An agent without a language model, which follows a decomposition that comes with the data.

It asks the sub-questions that the data set's makers wrote, and it knows the right answer of each:
"reading" means to look whether that answer stands in the passages. So it shows what a retriever
learns, quickly and without a server, and not what an agent can do: it never asks the wrong question
and is never misled, but it also takes a passage that names the answer for another reason.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Generator, Iterable, Mapping

from qrag_jax.data.sample import Decomposition
from qrag_jax.environments.rag.episode import FOUND, NOT_FOUND, Hop, Limits, Play, Reply, Step, Task
from qrag_jax.environments.rag.trail import Trail, played
from qrag_jax.errors import InputError
from qrag_jax.metrics.answers import normalise

_JOINED = re.compile(r"[-‐‑–—−/]")  # "French-American" says "French"


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Plays episodes by decompositions.

    A sub-question whose answer stands in the passages found has the status FOUND, else NOT_FOUND,
    and is asked again. If the retrievals are used up before all answers are found, the agent gives
    up with the answer "". Otherwise its answer is that of the last hop or, where the hops' answers
    are compared, the data's own.

    Attributes:
        decompositions: by the question's id.
        limits: `max_hops` counts.
    """

    decompositions: Mapping[str, Decomposition]
    limits: Limits = dataclasses.field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name, each in self.decompositions.items():
            if len(each.hops) > self.limits.max_hops:
                raise InputError(
                    f"question {name} has {len(each.hops)} hops, and config.agent.max_hops is "
                    f"{self.limits.max_hops}; raise it, or leave out such questions."
                )

    def play(self, task: Task) -> Play:
        """One episode."""
        if task.id not in self.decompositions:
            raise InputError(
                f"question {task.id} has no decomposition, without which the scripted agent cannot "
                "play; leave it out, or use an agent with a language model."
            )
        trail = Trail()
        return played(trail, self._answer(self.decompositions[task.id], trail))

    def _answer(self, whole: Decomposition, trail: Trail) -> Generator[Step, Reply, str]:
        answers: list[str] = []
        for hop in whole.hops:
            sub_query, found = hop.filled(answers), ""
            while not found:
                if trail.searches == self.limits.max_hops:
                    return ""
                passages = yield from trail.search(sub_query)
                found = named(hop.answers, (passage.whole for passage in passages))
                trail.hops.append(Hop(sub_query, found, FOUND if found else NOT_FOUND))
            answers.append(found)
        chained = normalise(answers[-1]) in map(normalise, whole.answers)
        return answers[-1] if chained else whole.answers[0]


def named(answers: Iterable[str], texts: Iterable[str]) -> str:
    """The first answer that one of the texts has as whole words, in normal form; else ""."""
    padded = [f" {_words(text)} " for text in texts]
    for answer in answers:
        words = _words(answer)
        if words and any(f" {words} " in text for text in padded):
            return answer
    return ""


def _words(text: str) -> str:
    return normalise(_JOINED.sub(" ", text))
