"""The text of the policy's state: what the query encoder reads before it scores passages.

Stateful, as in HARR (Zhang et al., 2026):

    Instruct: INSTRUCTION
    Original Question: …
    History: [{"sub_query": …, "status": …, "answer": …}, …]
    Query: the sub-query

Stateless it is the instruction and the query alone. A text that is too long loses the oldest hops,
and then the end of the original question, never a part of the sub-query.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import NamedTuple

from qrag_jax.environments.episode import Hop, Retrieve
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.extraction import well_formed
from qrag_jax.llm.text.prompts import least, one_line

STATELESS = "Given a question, retrieve the passages that answer it."
STATEFUL = (
    "A question is answered in several searches. Given the original question, the searches so far "
    "with what they found, and the query of this search, retrieve the passages that answer the "
    "query."
)


@dataclasses.dataclass(frozen=True)
class StateText:
    """How states are written.

    Attributes:
        stateful: with the original question and the history, or the query alone.
        instruction: on the first line, after "Instruct: "; None: the one above that fits; "": no
            such line, for encoders that were trained without.
        max_tokens: longest text; 0: no limit.
        count: number of tokens of a text, as the encoder reads it. More text must not have fewer.
    """

    stateful: bool = True
    instruction: str | None = None
    max_tokens: int = 0
    count: Callable[[str], int] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens and self.count is None:
            raise ValueError("a limit of tokens needs a function that counts them.")

    def of(self, question: str, step: Retrieve) -> Fitted | Failure:
        """The state in which a search is made.

        Args:
            question: the original question.
            step: the search.

        Returns:
            The text that fits, or a `Failure` with the cause "too_long" if even the instruction and
            the sub-query do not.
        """
        words = question.split() if self.stateful else []
        history = step.history if self.stateful else ()

        def fits(dropped: int, cut: int) -> bool:
            text = self._text(words[: len(words) - cut], history[dropped:], step.sub_query)
            return self.count is None or not self.max_tokens or self.count(text) <= self.max_tokens

        dropped = least(0, len(history), lambda hops: fits(hops, 0))
        cut = 0
        if not fits(dropped, 0):
            if not fits(dropped, len(words)):
                return Failure(
                    "too_long",
                    f"the sub-query and the instruction are longer than {self.max_tokens} tokens.",
                    attempts=0,
                )
            cut = least(0, len(words), lambda number: fits(dropped, number))
        text = self._text(words[: len(words) - cut], history[dropped:], step.sub_query)
        return Fitted(text, dropped, cut)

    def _text(self, words: list[str], history: tuple[Hop, ...], sub_query: str) -> str:
        instruction = self.instruction
        if instruction is None:
            instruction = STATEFUL if self.stateful else STATELESS
        lines = [f"Instruct: {one_line(instruction)}"] if instruction else []
        if self.stateful:
            lines += [f"Original Question: {' '.join(words)}", f"History: {as_json(history)}"]
        return well_formed("\n".join([*lines, f"Query: {one_line(sub_query)}"]))


class Fitted(NamedTuple):
    """The text of a state, and what was left out of it."""

    text: str
    hops: int = 0  # number of hops, the oldest ones
    words: int = 0  # number of words of the original question, the last ones


def as_json(history: tuple[Hop, ...]) -> str:
    """A list of objects with `sub_query`, `status` (if there is one) and `answer`, one a hop."""
    hops = []
    for hop in history:
        status = {"status": hop.status} if hop.status else {}
        hops.append({"sub_query": hop.sub_query, **status, "answer": hop.answer})
    return json.dumps(hops, ensure_ascii=False)
