"""A passage in place of a query, played by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.which_cases.pseudo_document import PROMPT, PassageAgent
from qrag_jax.environments.query_rewriting.prompt import RewritePrompt
from qrag_jax.environments.query_rewriting.task import RewriteTask, Rewritten
from qrag_jax.environments.tools.episode import Ended, Failed, Look, Said, Speak, ToolTally
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import load
from tests.environments.query_writing.trying import OSLO

TASK = RewriteTask.judged("q", "Ada\nBerg", {"b": 2})
AGENT = PassageAgent(RewritePrompt(load(PROMPT)), 3, repeats=2)
DEAD = Failure("server", "status 500")


def played(agent: PassageAgent, said: Said | Failure, found: Any = (OSLO,)) -> tuple[Ended, str]:
    """How an episode ends, and what was searched for."""
    play, query, reply = agent.play(TASK), "", said
    assert next(play) == Speak(agent.prompt.messages(TASK))
    while True:
        try:
            step = play.send(reply)
        except StopIteration as end:
            return end.value, query
        assert isinstance(step, Look)
        assert step.most == 3
        query, reply = step.query, found


def test_the_query_is_there_with_the_passage() -> None:
    ended, query = played(AGENT, Said("<think>who?</think> She was born\n in Oslo. ", "stop"))
    assert query == "Ada Berg Ada Berg She was born in Oslo."
    assert ended == Rewritten(
        query, seen=("b",), tally=ToolTally(turns=1, searches=1), found=(OSLO,)
    )


def test_a_passage_that_is_cut_off_counts() -> None:
    ended, query = played(AGENT, Said("She was", "length"))
    assert query == "Ada Berg Ada Berg She was"
    assert ended.tally.truncated
    assert played(AGENT, Said("", "stop"))[1] == "Ada Berg Ada Berg"


def test_failures_are_values() -> None:
    assert played(AGENT, DEAD) == (Failed("server", "status 500"), "")
    ended, _ = played(AGENT, Said("Oslo", "stop"), DEAD)
    assert ended == Failed("server", "status 500", ToolTally(turns=1))


def test_what_makes_no_sense() -> None:
    with pytest.raises(InputError, match="repeats"):
        PassageAgent(AGENT.prompt, 3, repeats=0)
