"""Searches for a query together with a passage that a language model has written for it.

It is query2doc (Wang et al., EMNLP 2023, arXiv 2303.07678) without its examples: the model writes
what a relevant document may say. For a search for words, the original query is repeated five times
as there, so that it keeps its weight beside the longer passage; for a search by vectors, both stand
there once. It trains nothing; it is what a rewriter is compared with.
"""

from __future__ import annotations

import dataclasses

from qrag_jax.data.generators.dropped_words import any_of
from qrag_jax.environments.query_rewriting.output import REWRITTEN
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
from qrag_jax.errors import check_least
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.json_objects import well_formed
from qrag_jax.llm.text.prompts import one_line

PROMPT = "write_passage"
REPEATS = 5  # of the original query, in a search for words
_END_OF_THINK = "</think>"


@dataclasses.dataclass(frozen=True)
class PassageAgent:
    """Plays one passage and one search.

    Attributes:
        prompt: asks for the passage.
        k: documents that are found.
        repeats: of the original query before the passage.
        boolean: the search obeys operators; then any of all words is searched for.

    Raises:
        InputError: a field is below 1.
    """

    prompt: RewritePrompt
    k: int
    repeats: int = REPEATS
    boolean: bool = False

    def __post_init__(self) -> None:
        check_least("writing", self, k=1, repeats=1)

    def play(self, task: ToolTask) -> Play:
        """One passage for a `RewriteTask`; one that is cut off counts as it is."""
        assert isinstance(task, RewriteTask)
        said = yield Speak(self.prompt.messages(task))
        if isinstance(said, Failure):
            return Failed(said.cause, said.message)
        assert isinstance(said, Said)
        query = self._query(task.question, said.text.rpartition(_END_OF_THINK)[2])
        tally = ToolTally(turns=1, truncated=said.finish == "length")
        found = yield Look(query, self.k)
        if isinstance(found, Failure):
            return Failed(found.cause, found.message, tally)
        assert isinstance(found, tuple)
        assert not isinstance(found, Said | Document)  # which are tuples, too
        return Rewritten(
            answer=query,
            seen=tuple(each.id for each in found),
            tally=dataclasses.replace(tally, searches=1),
            outcome=REWRITTEN,
            found=found,
        )

    def _query(self, original: str, passage: str) -> str:
        if self.boolean:
            return any_of(original, passage)
        own = [one_line(original)] * self.repeats
        return one_line(" ".join([*own, well_formed(passage)]))
