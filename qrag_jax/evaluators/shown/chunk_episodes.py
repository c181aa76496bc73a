"""Episodes of Q-RAG for the page: question → chunk → chunk, with Q-values and gold marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qrag_jax.metrics.regret import BestReturn
from qrag_jax.metrics.retrieval_log import Row

WORDS = {
    "score": "return",
    "hops": "facts",
    "solved": "all facts found",
    "unsolved": "facts missing",
}
_BY_SETTINGS = (
    "the return of an episode that takes the supporting facts first, in more than the run's steps "
    "if it must (by γ and the reward that its settings name), minus the return of this episode."
)
_BY_ONE = (
    "1 minus the return of this episode, as the settings of the run, which say what the best "
    "return is, are not beside the log."
)
# Below it, regret is of float32 and not of the retriever.
_NOISE = 1e-4


class ChunkEpisodes:
    """Makes the episodes of a log.

    Attributes:
        texts: of all chunks, each once; episodes have their numbers.
    """

    def __init__(self, best: BestReturn | None) -> None:
        """
        Args:
            best: the best possible return; None: not known.
        """
        self.texts: list[str] = []
        self._best, self._places = best, dict[str, int]()

    @property
    def words(self) -> dict[str, str]:
        """See `page.Section`."""
        return WORDS | {"regret": _BY_SETTINGS if self._best else _BY_ONE}

    def of(self, rows: Sequence[Row], before: Mapping[str, Row]) -> list[dict[str, Any]]:
        """The episodes.

        Args:
            before: rows of the untrained retriever, by their questions' ids.
        """
        return [self._episode(row, before.get(row.id)) for row in rows]

    def _episode(self, row: Row, before: Row | None) -> dict[str, Any]:
        found, facts = set(row.sf_idx) & set(row.pred_idx), len(set(row.sf_idx))
        answers = " / ".join(filter(None, [row.answer, *row.aliases]))
        return {
            "id": row.id,
            "question": row.question,
            "solved": len(found) == facts if facts else None,
            "hops": facts or None,
            **self._worth(row.ret, facts),
            "facts": [
                ["question", row.question],
                ["right answer", answers],
                ["id", row.id],
                ["gold chunks taken", f"{len(found)} of {facts}" if facts else "not known"],
                *self._told(row.ret, facts),
            ],
            "gold": [
                [index, self._text(text)]
                for index, text in zip(row.sf_idx, row.sf_texts, strict=True)
            ],
            "steps": self._steps(row),
            "before": before and {"score": _rounded(before.ret), "steps": self._steps(before)},
        }

    def _worth(self, found: float | None, facts: int) -> dict[str, float | None]:
        """Return and regret; a log may have no return where nobody knows the facts."""
        if found is None or not facts:
            return {"score": _rounded(found), "regret": None}
        regret = self._at_best(facts) - found
        return {
            "score": _rounded(found),
            "regret": 0.0 if abs(regret) < _NOISE else round(regret, 6),
        }

    def _told(self, found: float | None, facts: int) -> list[list[str]]:
        if found is None:
            return []
        best = f", at best {self._at_best(facts):.4f}" if facts else ""
        return [["return", f"{found:.4f}{best}"]]

    def _at_best(self, facts: int) -> float:
        return self._best(facts) if self._best else 1.0

    def _steps(self, row: Row) -> list[list[Any]]:
        q_values: Sequence[float | None] = row.q_values or [None] * len(row.pred_idx)
        return [
            [index, self._text(text), q if q is None else round(q, 6)]
            for index, text, q in zip(row.pred_idx, row.pred_texts, q_values, strict=True)
        ]

    def _text(self, text: str) -> int:
        place = self._places.setdefault(text, len(self.texts))
        if place == len(self.texts):
            self.texts.append(text)
        return place


def _rounded(number: float | None) -> float | None:
    return number if number is None else round(number, 6)
