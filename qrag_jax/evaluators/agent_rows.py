"""Episodes of an agent as rows of its log."""

from __future__ import annotations

from qrag_jax.environments.rag.episode import Broken
from qrag_jax.feedback.rag import Gold
from qrag_jax.metrics import answers, hops
from qrag_jax.metrics.agent_log import AgentRow
from qrag_jax.rollouts.agents import Episode


def agent_row(gold: Gold, episode: Episode) -> AgentRow:
    """The row of an episode, whose question has this gold."""
    ended = episode.ended
    names = [each.names for each in episode.searches]
    broken = isinstance(ended, Broken)
    answer = "" if isinstance(ended, Broken) else ended.answer
    em_f1 = answers.score(gold.rule, gold.id, gold.question, answer, gold.answers)
    return AgentRow(
        id=gold.id,
        question=gold.question,
        golds=gold.answers,
        answer=answer,
        broken=ended.cause if isinstance(ended, Broken) else "",
        em=0.0 if broken else em_f1.em,
        f1=0.0 if broken else em_f1.f1,
        recall=hops.recall(gold.relevant, names) if gold.relevant else None,
        searches=tuple(
            {"query": hop.sub_query, "status": hop.status, "answer": hop.answer, "names": list(own)}
            for hop, own in zip(ended.history, names)
        ),
    )
