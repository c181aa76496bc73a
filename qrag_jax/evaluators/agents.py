"""Scores of a query encoder by the episodes of an agent, searched greedily."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from qrag_jax.data.sample import Sample
from qrag_jax.environments.episode import Failed
from qrag_jax.evaluators.evaluation import Evaluation, lost_text, of_all_hosts, sampler
from qrag_jax.feedback.rag import em_f1
from qrag_jax.metrics import ranking
from qrag_jax.metrics.bootstrap import means
from qrag_jax.metrics.row_log import AGENTS, AgentRow
from qrag_jax.metrics.summaries import agent_columns, agent_counts
from qrag_jax.rollouts.token_episodes import Episode
from qrag_jax.runtime.bounded_json import typed

BEST_BY = ("f1", "em", "recall")


def agent_evaluation(
    step: int,
    golds: Sequence[Sample],
    best_by: str,
    play: Callable[[Sequence[int]], Sequence[Episode]],
) -> Evaluation:
    """Scores fixed questions; of several hosts, each plays its part, and all call this together.

    Args:
        golds: the questions, with their relevant passages as `grades`.
        best_by: the score that chooses the best checkpoint.
        play: places of questions → an episode for each of them, in order.
    """

    def ask(places: Sequence[int]) -> list[Any]:
        rows = map(agent_row, [golds[place] for place in places], play(places))
        return [*map(dataclasses.asdict, rows)]

    rows = [typed(AgentRow, fields) for fields in of_all_hosts(len(golds), ask)]
    columns, counts = agent_columns(rows), agent_counts(rows)
    if not columns["recall"]:  # no question has gold passages
        del columns["recall"]
    scores = means(columns)
    shown = ", ".join(f"{name} {score:.3f}" for name, score in scores.items())
    scores |= {name: counts[name] for name in ("broken_share", "failed_share")}
    lost = lost_text(scores, {"broken_share": "broken", "failed_share": "failed"})
    line = f"step {step}: {shown}{lost} on {len(golds)} questions"
    kept = sampler(AGENTS, rows)
    return Evaluation.of(line, scores, best_by, columns, episodes=kept)


def agent_row(gold: Sample, episode: Episode) -> AgentRow:
    """The row of an episode, whose question has this gold."""
    ended = episode.ended
    names = [s.names for s in episode.searches]
    broken = isinstance(ended, Failed)
    answer = "" if isinstance(ended, Failed) else ended.answer
    scores = em_f1(answer, gold)
    return AgentRow(
        id=gold.id,
        question=gold.question,
        golds=gold.answers,
        answer=answer,
        broken=ended.cause if isinstance(ended, Failed) else "",
        em=0.0 if broken else scores.em,
        f1=0.0 if broken else scores.f1,
        recall=ranking.episode_recall(gold.relevant, names) if gold.relevant else None,
        searches=tuple(
            {"query": hop.sub_query, "status": hop.status, "answer": hop.answer, "names": list(ids)}
            for hop, ids in zip(ended.history, names)
        ),
    )
