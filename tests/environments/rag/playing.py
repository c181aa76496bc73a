"""Plays an episode with replies that are written down, which are all that an agent gets."""

from __future__ import annotations

from collections.abc import Sequence

from qrag_jax.environments.rag.episode import (
    Agent,
    Complete,
    Ended,
    Reply,
    Retrieve,
    Seen,
    Step,
    Task,
)
from qrag_jax.llm.outcomes import Answer, ChatRequest, CompletionRequest, how_read
from qrag_jax.llm.text.prompts import Messages

TASK = Task("q1", "Of which country is Ada Berg's birthplace the capital?")
OSLO = (Seen("p1", "She was born\nin Oslo.", "Ada Berg"), Seen("p2", "Bergen is wet."))
NORWAY = (Seen("p3", "The capital of Norway is Oslo.", "Norway"),)


def played(
    agent: Agent, replies: Sequence[Reply | str], task: Task = TASK
) -> tuple[list[Step], Ended]:
    """The steps of one episode and its end; a text is a whole answer. All replies are used."""
    play, left = agent.play(task), list(replies)
    steps = [next(play)]
    while True:
        reply = left.pop(0)
        try:
            steps.append(play.send(Answer(reply) if isinstance(reply, str) else reply))
        except StopIteration as end:
            assert not left, f"the episode ended before {left}"
            return steps, end.value


def asked(step: Step) -> Messages:
    """The messages of a step that asks a chat model."""
    assert isinstance(step, Complete)
    assert isinstance(step.request, ChatRequest)
    return step.request.messages


def how(step: Step, reply: str | Answer) -> str:
    """How the agent reads a reply to this step."""
    assert isinstance(step, Complete)
    return how_read(step.request, Answer(reply) if isinstance(reply, str) else reply)


def continued(step: Step) -> str:
    """The text that a step has a model continue."""
    assert isinstance(step, Complete)
    assert isinstance(step.request, CompletionRequest)
    assert isinstance(step.request.prompt, str)
    return step.request.prompt


def searches(steps: Sequence[Step]) -> list[str]:
    """The sub-queries, in order."""
    return [step.sub_query for step in steps if isinstance(step, Retrieve)]
