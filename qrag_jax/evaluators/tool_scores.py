"""Scores of a token policy: with tools, or in an environment that has its own rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qrag_jax.evaluators.evaluation import Evaluation, sampler
from qrag_jax.metrics.bootstrap import means
from qrag_jax.metrics.rows import PREDICTIONS, Prediction
from qrag_jax.rollouts.trajectories import TRUNCATED, TokenTrajectory

REWARD = "reward"
# What the line on the screen tells of an episode with tools; of others it tells everything.
_SHOWN = ("em", "f1", "recall", "citation", REWARD, "turns", "completed", "malformed")


def tool_evaluation(
    step: int,
    played: Sequence[TokenTrajectory],
    best_by: str,
    logged: Callable[[Sequence[int]], Sequence[Prediction]],
) -> Evaluation:
    """Scores an episode for each of the fixed questions of a training.

    Args:
        logged: places of questions → rows to look at.
    """
    rows = []
    for each in played:
        if REWARD in each.parts:
            sampled = sum(len(turn.sampled) for segment in each.segments for turn in segment)
            tally = {**each.facts["tally"], "sampled_tokens": sampled}
            rows.append(measured(each.parts, tally, each.status))
    every = dict.fromkeys((best_by, REWARD, *(name for row in rows for name in row)))
    scores = means({name: [row[name] for row in rows if name in row] for name in every})
    scores["failed_share"] = 1 - len(rows) / len(played) if played else 0.0
    shown = (*_SHOWN, "failed_share") if "searches" in scores else [*scores]
    told = ", ".join(f"{name} {scores[name]:.3f}" for name in shown)
    return Evaluation.of(
        f"step {step}: {told} on {len(played)} questions",
        scores,
        best_by,
        episodes=sampler(PREDICTIONS, logged, len(played)),
        each=[row[best_by] for row in rows],
    )


def measured(parts: Mapping[str, float], tally: Mapping[str, Any], status: str) -> dict[str, float]:
    """The parts of the reward of an episode, and its counts."""
    found = {**parts, "turns": float(tally["turns"]), "truncated": float(status == TRUNCATED)}
    if "searches" in tally:  # with our own tools
        found["searches"], found["completed"] = float(tally["searches"]), float(tally["completed"])
        found["malformed"] = float(tally["malformed"] + tally["unknown_tool"])
    return found | {"sampled_tokens": float(tally["sampled_tokens"])}
