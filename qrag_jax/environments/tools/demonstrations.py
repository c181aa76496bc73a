"""Scripted demonstrations of bridge questions, flawed on purpose and in stated shares.

A tiny language model knows nothing, so reinforcement learning can only choose among what it already
does. Here it gets things to choose from: searches, answers and citations, each in a good and in
flawed ways. The flaws and the good ways can all be seen in the context; which is which cannot.

A demonstration plays one episode: a first search, perhaps a second one, and the answer. It knows
the question's names and reads passages by script, but only those that the environment has shown.
So it also reads a wrong passage, as if it were the right one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from qrag_jax.data.scripted import BridgePassage, BridgeQuestion, Draw
from qrag_jax.environments.shares import check_shares, drawn
from qrag_jax.llm.text.tool_calls import HERMES, ToolCall, write_call

REASONING = "The passages say so."  # of every demonstration
_SECTION = "demonstrations"
_STREAM = 2  # of `Draw`; 0 and 1 draw the questions of the two splits
_FINE = 1 << 53
_SHOWN = re.compile(r"^Document ID: (.+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class DemonstrationsConfig:
    """Section `demonstrations`: shares of what episodes do. Those of one decision sum to 1."""

    search_entity: float = 0.6  # the first query is the first entity's name,
    search_question: float = 0.2  # or the question,
    search_relations: float = 0.2  # or the words of both relations
    then_bridge: float = 0.4  # then the bridge's name with the second relation is searched for,
    then_again: float = 0.2  # or the first query once more,
    then_answer: float = 0.4  # or nothing
    answer_right: float = 0.7  # the answer is what the passage gives for the second relation,
    answer_other: float = 0.3  # or another name in it
    cite_right: float = 1 / 3  # cited are the supporting passages among those shown,
    cite_all: float = 1 / 3  # or all shown,
    cite_none: float = 1 / 3  # or none

    def __post_init__(self) -> None:
        for shares in self.decisions.values():
            check_shares(_SECTION, self, shares)

    @property
    def decisions(self) -> dict[str, dict[str, float]]:
        """The shares by decision: "search", "then", "answer", "cite" → field's name → share."""
        found: dict[str, dict[str, float]] = {}
        for field in dataclasses.fields(self):
            decision = field.name.partition("_")[0]
            found.setdefault(decision, {})[field.name] = getattr(self, field.name)
        return found


# Every episode takes the good way.
EXPERT = DemonstrationsConfig(
    search_entity=1.0,
    search_question=0.0,
    search_relations=0.0,
    then_bridge=1.0,
    then_again=0.0,
    then_answer=0.0,
    answer_right=1.0,
    answer_other=0.0,
    cite_right=1.0,
    cite_all=0.0,
    cite_none=0.0,
)


class Choices(NamedTuple):
    """What one episode does: for each decision the name of a field of `DemonstrationsConfig`.

    `luck`, in [0, 1), picks a name where any will do.
    """

    search: str
    then: str
    answer: str
    cite: str
    luck: float


def draw_choices(config: DemonstrationsConfig, seed: int, index: int) -> Choices:
    """The choices of episode `index`; they depend on the arguments only.

    Args:
        config: the shares.
        seed: from 0 to 2^63 - 1.
        index: from 0; the episodes of one question have different ones.
    """
    draw = Draw(seed, _STREAM, index)
    made = {name: drawn(shares, draw) for name, shares in config.decisions.items()}
    return Choices(**made, luck=draw.below(_FINE) / _FINE)


@dataclasses.dataclass(frozen=True, slots=True)
class Demonstration:
    """Plays one episode of a question.

    Attributes:
        question: what is asked.
        choices: see `draw_choices`.
        form: how tool calls are written, one of `tool_calls.FORMATS`.
    """

    question: BridgeQuestion
    choices: Choices
    form: str = HERMES

    def say(self, shown: Sequence[str]) -> str:
        """The text of the next turn, which is one tool call.

        Args:
            shown: the texts of all tool results so far, one for each turn, oldest first.
        """
        results = [self._passages(text) for text in shown]
        if not results:
            return self._search(self._first_query())
        if len(results) == 1 and self.choices.then != "then_answer":
            return self._search(self._second_query(results[0]))
        return self._complete(results)

    def _first_query(self) -> str:
        question = self.question
        return {
            "search_entity": question.entity,
            "search_question": question.question,
            "search_relations": " ".join(question.relations),
        }[self.choices.search]

    def _second_query(self, result: Sequence[BridgePassage]) -> str:
        """A name that was read as the bridge; the first query again where there is none."""
        if self.choices.then == "then_again" or not result:
            return self._first_query()
        bridge = _said(result, 0) or self._any(result[0].names[1:] or result[0].names)
        return f"{bridge} {self.question.relations[1]}"

    def _answer(self, results: Sequence[Sequence[BridgePassage]]) -> str:
        """From the last result that has passages; the entity's name where there are none."""
        result = next((result for result in reversed(results) if result), ())
        if not result:
            return self.question.entity
        right = _said(result, 1)
        if right and self.choices.answer == "answer_right":
            return right
        own = next((passage for passage in result if passage.said[1]), result[0])
        names = [name for name in own.names if name != right]
        return self._any(names)

    def _complete(self, results: Sequence[Sequence[BridgePassage]]) -> str:
        seen = dict.fromkeys(passage for result in results for passage in result)
        cited = {
            "cite_right": [passage.id for passage in seen if passage.is_supporting],
            "cite_all": [passage.id for passage in seen],
            "cite_none": [],
        }[self.choices.cite]
        return self._call(
            "complete",
            reasoning=REASONING,
            final_answer=self._answer(results),
            cited_doc_ids=cited,
        )

    def _search(self, query: str) -> str:
        return self._call("retrieve_documents", query=query)

    def _call(self, tool: str, **arguments: Any) -> str:
        return write_call(ToolCall(tool, arguments), self.form)

    def _any(self, names: Sequence[str]) -> str:
        return names[int(self.choices.luck * len(names))]

    def _passages(self, text: str) -> list[BridgePassage]:
        """The question's passages that a tool result shows, best first."""
        known = {passage.id: passage for passage in self.question.passages}
        return [known[name] for name in _SHOWN.findall(text) if name in known]


def _said(result: Sequence[BridgePassage], hop: int) -> str:
    """What the best passage that says something for the hop's relation says; "": none does."""
    return next((passage.said[hop] for passage in result if passage.said[hop]), "")
