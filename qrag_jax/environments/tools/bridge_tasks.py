"""Bridge questions of the invented world as tasks for an agent with tools."""

from __future__ import annotations

from qrag_jax.data.generators.bridge_world import BridgeQuestion
from qrag_jax.environments.tools.episode import Document, ToolTask


def bridge_task(question: BridgeQuestion) -> ToolTask:
    """The task of a question, with its own passages as documents.

    A passage's text begins with its title, so the title is not put before it.
    """
    return ToolTask(
        id=question.id,
        question=question.question,
        answers=(question.answer,),
        documents=tuple(
            Document(passage.id, passage.title, passage.text, passage.is_supporting)
            for passage in question.passages
        ),
        hops=len(question.chain),
    )
