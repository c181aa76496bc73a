"""Scores of a token policy: with tools, or in an environment that has its own rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from qrag_jax.environments.episode import Failed, ToolTask
from qrag_jax.evaluators.evaluation import Evaluation, lost_text, sampler
from qrag_jax.feedback.llm import Unscored
from qrag_jax.feedback.rubric import PARTS, Rubric, reward_of, score
from qrag_jax.metrics.bootstrap import means
from qrag_jax.metrics.rows import PREDICTIONS, Prediction
from qrag_jax.rollouts.environment_play import Scored
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.runtime.own_code import OwnCode

REWARD = "reward"
_OF_TOOLS = (*PARTS, REWARD, "turns", "searches", "completed", "truncated", "malformed")

# Places of questions → rows to look at.
Logged = Callable[[Sequence[int]], Sequence[Prediction]]


def tool_evaluation(
    step: int,
    tasks: Sequence[ToolTask],
    episodes: Sequence[TokenEpisode],
    *,
    rubric: Rubric | OwnCode,
    best_by: str,
    logged: Logged,
) -> Evaluation:
    """Scores an episode for each of the fixed questions of a training."""
    rows = score_rows(tasks, episodes, rubric)
    scores = _means(rows, len(tasks), (*_OF_TOOLS, "sampled_tokens"))
    malformed = f", {n:.2f} malformed calls" if (n := scores["malformed"]) else ""
    line = (
        f"step {step}: EM {scores['em']:.3f}, F1 {scores['f1']:.3f}, recall "
        f"{scores['recall']:.3f}, citation {scores['citation']:.3f}, reward "
        f"{scores[REWARD]:.3f}, {scores['turns']:.2f} turns, "
        f"{scores['completed']:.0%} completed{malformed}"
        f"{lost_text(scores, {'failed_share': 'failed'})} on {len(tasks)} questions"
    )
    kept, each = sampler(PREDICTIONS, logged, len(tasks)), [row[best_by] for row in rows]
    return Evaluation.of(line, scores, best_by, episodes=kept, each=each)


def environment_evaluation(
    step: int, episodes: Sequence[TokenEpisode], logged: Logged
) -> Evaluation:
    """Scores an episode for each of the fixed tasks of an environment with its own rewards."""
    rows = environment_rows(episodes)
    scores = _means(rows, len(episodes), (REWARD,))
    parts = ", ".join(f"{name} {value:.3f}" for name, value in scores.items())
    line = f"step {step}: {parts} on {len(episodes)} tasks"
    kept, each = sampler(PREDICTIONS, logged, len(episodes)), [row[REWARD] for row in rows]
    return Evaluation.of(line, scores, REWARD, episodes=kept, each=each)


def score_rows(
    tasks: Sequence[ToolTask], episodes: Sequence[TokenEpisode], rubric: Rubric | OwnCode
) -> list[dict[str, float]]:
    """Scores of each question whose episode did not fail, nor its reward."""
    rows: list[dict[str, float]] = []
    for task, episode in zip(tasks, episodes, strict=True):
        ended = episode.ended
        if isinstance(ended, Failed):
            continue
        parts, tally = score(ended, task), ended.tally
        reward = reward_of(rubric, ended, task, parts)
        if isinstance(reward, Unscored):
            continue
        rows.append(
            parts
            | {
                REWARD: reward,
                "turns": tally.turns,
                "searches": tally.searches,
                "completed": float(tally.completed),
                "truncated": float(tally.truncated),
                "malformed": tally.malformed + tally.unknown_tool,
                "sampled_tokens": _sampled_tokens(episode),
            }
        )
    return rows


def environment_rows(episodes: Sequence[TokenEpisode]) -> list[dict[str, float]]:
    """The reward, its parts and counts of each episode that has a reward."""
    return [
        {
            REWARD: episode.ended.reward,
            **{name: value for name, value in episode.ended.parts.items() if name != REWARD},
            "turns": float(sum(len(segment) for segment in episode.segments)),
            "truncated": float(episode.ended.tally.truncated),
            "sampled_tokens": float(_sampled_tokens(episode)),
        }
        for episode in episodes
        if isinstance(episode.ended, Scored)
    ]


def _sampled_tokens(episode: TokenEpisode) -> int:
    return sum(len(turn.sampled) for segment in episode.segments for turn in segment)


def _means(
    rows: Sequence[Mapping[str, float]], episodes: int, names: Sequence[str]
) -> dict[str, float]:
    """Means over the rows, of these names 0 if there are none; and the share without a row."""
    every = dict.fromkeys((*names, *(name for row in rows for name in row)))
    scores = means({name: [row[name] for row in rows if name in row] for name in every})
    return scores | {"failed_share": 1 - len(rows) / episodes if episodes else 0.0}
