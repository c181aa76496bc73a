"""Plays one hop of a query writer: one turn of the model, one search.

The hop is an episode as `environments.tools.episode` has it, so whatever plays agents with tools
plays it: a sampler on the device or a server, tokens in, tokens out, a failure as a value.
"""

from __future__ import annotations

import dataclasses

from qrag_jax.environments.query_writing.prompt import QueryPrompt
from qrag_jax.environments.query_writing.state import (
    EMPTY,
    SEARCHED,
    STOPPED,
    TOO_LONG,
    QueryState,
    Searched,
)
from qrag_jax.environments.tools.episode import (
    Document,
    Failed,
    Look,
    Play,
    Said,
    Speak,
    ToolTally,
    ToolTask,
)
from qrag_jax.errors import check_least
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import one_line


@dataclasses.dataclass(frozen=True)
class QueryAgent:
    """Plays tries.

    Attributes:
        prompt: asks for the query.
        k: passages that a query finds.
        stop: what the model writes to end the search; "": it cannot.
    """

    prompt: QueryPrompt
    k: int = 3
    stop: str = ""

    def __post_init__(self) -> None:
        check_least("writing", self, k=1)

    def play(self, task: ToolTask) -> Play:
        """One try at the next hop of a `QueryState`."""
        assert isinstance(task, QueryState)
        said = yield Speak(self.prompt.messages(task))
        if isinstance(said, Failure):
            return Failed(said.cause, said.message)
        assert isinstance(said, Said)
        query, cut_off = one_line(said.text), said.finish == "length"
        outcome = self._outcome(query, cut_off=cut_off)
        if outcome != SEARCHED:
            stopped = outcome == STOPPED
            tally = ToolTally(turns=1, completed=stopped, truncated=cut_off)
            return Searched(answer=query, tally=tally, outcome=outcome)
        found = yield Look(query, self.k)
        if isinstance(found, Failure):
            return Failed(found.cause, found.message, ToolTally(turns=1))
        assert isinstance(found, tuple)
        assert not isinstance(found, Said | Document)  # which are tuples, too
        return Searched(
            answer=query,
            seen=tuple(each.id for each in found),
            tally=ToolTally(turns=1, searches=1),
            outcome=SEARCHED,
            found=found,
        )

    def _outcome(self, query: str, *, cut_off: bool) -> str:
        if cut_off:
            return TOO_LONG
        if not query:
            return EMPTY
        is_stop = self.stop and query.casefold() == one_line(self.stop).casefold()
        return STOPPED if is_stop else SEARCHED
