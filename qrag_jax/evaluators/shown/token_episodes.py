"""Episodes of a token policy for the page: turns with masks, log-probabilities, tool results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qrag_jax.metrics.predictions import Prediction

WORDS = {"score": "reward", "hops": "hops", "solved": "right", "unsolved": "wrong"}
_REGRET = "the highest reward of an episode that is shown here minus the reward of this episode."


class TokenEpisodes:
    """Makes the episodes of files of predictions.

    Attributes:
        tokens: ids and texts of all tokens, each pair once; turns have their numbers.
    """

    def __init__(self) -> None:
        self.tokens: list[tuple[int, str]] = []
        self._places: dict[tuple[int, str], int] = {}

    @property
    def words(self) -> dict[str, str]:
        """See `page.Section`."""
        return WORDS | {"regret": _REGRET}

    def of(
        self,
        rows: Sequence[Prediction],
        before: Mapping[tuple[str, int], Prediction],
        *,
        masks_truncated: bool,
    ) -> list[dict[str, Any]]:
        """The episodes.

        Args:
            before: those of the untrained model, by question and draw.
            masks_truncated: whether an episode that was cut off trains nothing.
        """
        best = max((row.reward for row in rows if row.reward is not None), default=0.0)
        found = []
        for row in rows:
            own, early = self._played(row, masks_truncated), before.get((row.id, row.draw))
            score = row.reward
            found.append(
                {
                    "id": row.id,
                    "question": row.question,
                    "solved": None if score is None else row.trajectory["parts"].get("em") == 1,
                    "hops": row.hops,
                    "regret": None if score is None else round(best - score, 6),
                    **own,
                    "before": early and self._played(early, masks_truncated),
                }
            )
        return found

    def _played(self, row: Prediction, masks_truncated: bool) -> dict[str, Any]:
        turns = [turn for segment in row.trajectory["segments"] for turn in segment]
        return {
            "score": row.reward,
            "answered": row.prediction,
            "trains": trains(row, masks_truncated),
            "parts": row.trajectory["parts"],
            "facts": [
                ["question", row.question],
                ["answered", row.prediction or "(no answer)"],
                ["right answer", " / ".join(row.answers)],
                ["id", f"{row.id}, draw {row.draw}"],
                ["ended", _ended(row.trajectory)],
            ],
            "turns": [
                {
                    "observed": self._numbers(turn["observed"], texts["observed_tokens"]),
                    "sampled": self._numbers(turn["sampled"], texts["sampled_tokens"]),
                    "log_probs": [round(each, 4) for each in turn["log_probs"]],
                    "finish": turn["finish"],
                    "version": turn["version"],
                }
                for turn, texts in zip(turns, row.turns, strict=True)
            ],
        }

    def _numbers(self, ids: Sequence[int], texts: Sequence[str]) -> list[int]:
        found = []
        for pair in zip(ids, texts, strict=True):
            place = self._places.setdefault(pair, len(self.tokens))
            if place == len(self.tokens):
                self.tokens.append(pair)
            found.append(place)
        return found


def trains(prediction: Prediction, masks_truncated: bool) -> bool:
    """Whether an update would learn from the sampled tokens of the episode."""
    status = prediction.trajectory["status"]
    return prediction.reward is not None and not (masks_truncated and status == "truncated")


def _ended(trajectory: Mapping[str, Any]) -> str:
    facts = trajectory["facts"]
    counts = ", ".join(f"{name} {count}" for name, count in facts.get("tally", {}).items())
    lists = [f"{name} {', '.join(facts[name])}" for name in ("cited", "seen") if facts.get(name)]
    message = [facts["message"]] if facts.get("message") else []
    return "; ".join([trajectory["status"], *message, *filter(None, [counts]), *lists])
