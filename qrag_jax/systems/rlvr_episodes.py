"""Played episodes of a token policy as predictions: with their texts, as a whole and by tokens."""

from __future__ import annotations

from typing import Any

from qrag_jax.environments.tools.episode import ToolTask
from qrag_jax.evaluators.tool_scores import REWARD
from qrag_jax.metrics.predictions import Prediction
from qrag_jax.rollouts.token_episodes import Speech
from qrag_jax.rollouts.trajectories import TokenTrajectory


class TurnTexts:
    """The texts of turns, as a whole and token by token."""

    def __init__(self, speech: Speech) -> None:
        self._speech, self._known = speech, dict[int, str]()

    def of(self, trajectory: TokenTrajectory) -> list[dict[str, Any]]:
        """See `predictions.Prediction.turns`."""
        return [
            {
                "segment": number,
                "observed": self._decoded(turn.observed.tolist()),
                "sampled": self._speech.text(turn.sampled),
                "observed_tokens": [self._token(each) for each in turn.observed.tolist()],
                "sampled_tokens": [self._token(each) for each in turn.sampled.tolist()],
            }
            for number, segment in enumerate(trajectory.segments)
            for turn in segment
        ]

    def _token(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decoded([token])
        return self._known[token]

    def _decoded(self, ids: list[int]) -> str:
        return self._speech.tokenizer.decode(ids, skip_special_tokens=False)


def prediction_of(task: ToolTask, trajectory: TokenTrajectory, texts: TurnTexts) -> Prediction:
    """The prediction of an episode."""
    return Prediction(
        id=task.id,
        question=task.question,
        answers=[*task.answers],
        hops=task.hops,
        draw=trajectory.member,
        prediction=trajectory.facts.get("answer", ""),
        reward=trajectory.parts.get(REWARD),
        turns=texts.of(trajectory),
        trajectory=trajectory.to_json(),
    )
