"""Scores of a query encoder by the episodes of an agent, searched greedily."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from qrag_jax.environments.episode import Failed
from qrag_jax.evaluators.evaluation import Evaluation, lost_text, of_all_hosts, sampler
from qrag_jax.feedback.rag import Gold
from qrag_jax.metrics import answers, bootstrap, ranking
from qrag_jax.metrics.rows import AGENTS, AgentRow
from qrag_jax.rollouts.token_episodes import Episode

BEST_BY = ("f1", "em", "recall")

_COLUMNS = ("em", "f1", "recall", "hops", "broken", "failed")


def agent_evaluation(
    step: int,
    golds: Sequence[Gold],
    best_by: str,
    play: Callable[[Sequence[int]], Sequence[Episode]],
) -> Evaluation:
    """Scores fixed questions; of several hosts, each plays its part, and all call this together.

    Args:
        golds: what is right for each question.
        best_by: the score that chooses the best checkpoint.
        play: places of questions → an episode for each of them, in order.
    """
    rows = list[AgentRow]()

    def ask(places: Sequence[int]) -> np.ndarray:
        rows.extend(map(agent_row, [golds[place] for place in places], play(places)))
        return score_rows(rows)

    scored = of_all_hosts(len(golds), len(_COLUMNS), ask)
    scores = means(scored)
    lost = lost_text(scores, {"broken_share": "broken", "failed_share": "failed"})
    shown = ", ".join(f"{name} {scores[name]:.3f}" for name in _COLUMNS[:4] if name in scores)
    line = f"step {step}: {shown}{lost} on {len(golds)} questions"
    kept = sampler(AGENTS, lambda at: [rows[place] for place in at], len(rows))
    column = scored[:, _COLUMNS.index(best_by)]
    each = column[~np.isnan(column)].tolist()
    return Evaluation.of(line, scores, best_by, episodes=kept, each=each)


def score_rows(rows: Sequence[AgentRow]) -> np.ndarray:
    """float64 `[questions, 6]`: EM, F1, recall of gold passages, searches, whether the model broke
    it, whether the infrastructure did.

    EM and F1 of an episode that the model broke are 0. One that the infrastructure broke has no
    scores: they are NaN. The recall of a question without gold passages is NaN.
    """
    scored = np.full((len(rows), len(_COLUMNS)), np.nan)
    for scores, row in zip(scored, rows, strict=True):
        scores[4:] = bool(row.broken) and not row.failed, row.failed
        if not row.failed:
            recall = np.nan if row.recall is None else row.recall
            scores[:4] = row.em, row.f1, recall, len(row.searches)
    return scored


def means(rows: np.ndarray) -> dict[str, float]:
    """Means over the questions of `score_rows`, each over those that have such a score.

    `recall` is missing if no question has gold passages; others are 0 if no question has them.
    """
    columns = {name: each[~np.isnan(each)] for name, each in zip(_COLUMNS, rows.T, strict=True)}
    if not len(columns["recall"]):
        del columns["recall"]
    found = bootstrap.means(columns)
    return found | {f"{name}_share": found.pop(name) for name in ("broken", "failed")}


def agent_row(gold: Gold, episode: Episode) -> AgentRow:
    """The row of an episode, whose question has this gold."""
    ended = episode.ended
    names = [each.names for each in episode.searches]
    broken = isinstance(ended, Failed)
    answer = "" if isinstance(ended, Failed) else ended.answer
    em_f1 = answers.score(gold.rule, gold.id, gold.question, answer, gold.answers)
    return AgentRow(
        id=gold.id,
        question=gold.question,
        golds=gold.answers,
        answer=answer,
        broken=ended.cause if isinstance(ended, Failed) else "",
        em=0.0 if broken else em_f1.em,
        f1=0.0 if broken else em_f1.f1,
        recall=ranking.episode_recall(gold.relevant, names) if gold.relevant else None,
        searches=tuple(
            {"query": hop.sub_query, "status": hop.status, "answer": hop.answer, "names": list(own)}
            for hop, own in zip(ended.history, names)
        ),
    )
