"""Plays one rewriting: one turn of the model, one search.

It is an episode as `environments.tools.episode` has it, so whatever plays agents with tools plays
it: a sampler on the device or a server, tokens in, tokens out, a failure as a value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from qrag_jax.environments.query_rewriting.output import (
    FORMS,
    NO_QUERY,
    REWRITTEN,
    TOO_LONG,
    UNREADABLE,
    read_output,
)
from qrag_jax.environments.query_rewriting.prompt import RewritePrompt
from qrag_jax.environments.query_rewriting.task import RewriteTask, Rewritten
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
from qrag_jax.errors import check_known, check_least
from qrag_jax.llm.outcomes import Failure


def any_query(query: str) -> bool:
    """True: a search that reads words reads every query."""
    return True


@dataclasses.dataclass(frozen=True)
class RewriteAgent:
    """Plays rewritings.

    Attributes:
        prompt: asks for the query.
        form: of the output, one of `output.FORMS`.
        k: documents that a query finds.
        readable: whether the search can read a query. One that it cannot read, such as an open
            parenthesis in a Boolean query, is not searched for.
    """

    prompt: RewritePrompt
    form: str
    k: int
    readable: Callable[[str], bool] = any_query

    def __post_init__(self) -> None:
        check_least("writing", self, k=1)
        check_known("writing", self, "form", FORMS)

    def play(self, task: ToolTask) -> Play:
        """One rewriting of a `RewriteTask`."""
        assert isinstance(task, RewriteTask)
        said = yield Speak(self.prompt.messages(task))
        if isinstance(said, Failure):
            return Failed(said.cause, said.message)
        assert isinstance(said, Said)
        query, outcome = read_output(said.text, self.form, cut_off=said.finish == "length")
        if outcome == REWRITTEN and not self.readable(query):
            outcome = UNREADABLE
        if outcome != REWRITTEN:
            tally = ToolTally(
                turns=1,
                malformed=int(outcome not in (NO_QUERY, TOO_LONG)),
                truncated=outcome == TOO_LONG,
            )
            return Rewritten(answer=query, tally=tally, outcome=outcome)
        found = yield Look(query, self.k)
        if isinstance(found, Failure):
            return Failed(found.cause, found.message, ToolTally(turns=1))
        assert isinstance(found, tuple)
        assert not isinstance(found, Said | Document)  # which are tuples, too
        return Rewritten(
            answer=query,
            seen=tuple(each.id for each in found),
            tally=ToolTally(turns=1, searches=1),
            found=found,
        )
