"""Files of predictions: one JSON line for each episode of a question, with all of its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.metrics import answer_log, row_log
from qrag_jax.runtime import bounded_json

KIND = "predictions of episodes with tools"  # in the record beside a file, by which it is known
# Parts of a reward and counts that every scored episode has.
OF_PARTS = ("em", "f1", "recall", "precision", "citation", "citation_precision", "format")
_FIX = "delete the line, or give --restart to `qrag predict`, to begin anew"


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One episode.

    Attributes:
        id, question: of the data set.
        answers: the gold answers.
        hops: of the question.
        draw: number of the episode among those of its question, from 0.
        prediction: the answer; "" if there is none.
        reward: None: the episode failed, so it has no reward.
        turns: of each turn of the model, `segment` (its number), `observed` (the text before it),
            `sampled` (what it said) and the texts of the single tokens of both,
            `observed_tokens` and `sampled_tokens`.
        trajectory: as `rollouts.trajectories.TokenTrajectory.to_json` gives it: ids, log-probs,
            the parts of the reward, and facts such as what was cited.
    """

    id: str
    question: str
    answers: list[str]
    hops: int
    draw: int
    prediction: str
    reward: float | None
    turns: list[dict]
    trajectory: dict


@dataclasses.dataclass(frozen=True)
class ScoredEpisode:
    """What the scores of an episode need of its line.

    Attributes:
        line: its number in the file, from 1.
        status, parts: as in a `TokenTrajectory`.
        tally: counts of what happened.
    """

    line: int
    id: str
    question: str
    answers: tuple[str, ...]
    hops: int
    draw: int
    prediction: str
    reward: float | None
    status: str
    parts: Mapping[str, float]
    tally: Mapping[str, Any]


def read(path: Path) -> Iterator[Prediction]:
    """The episodes of a file; a last line that is not whole is left out."""
    try:
        with path.open("rb") as file:
            for row, _ in answer_log.each_line(file, path, Prediction, _FIX):
                yield row
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); give a file of `qrag predict`."
        ) from None


def read_scores(path: Path) -> list[ScoredEpisode]:
    """The episodes of a file without their tokens."""
    return [
        ScoredEpisode(
            line=number,
            id=row.id,
            question=row.question,
            answers=tuple(row.answers),
            hops=row.hops,
            draw=row.draw,
            prediction=row.prediction,
            reward=row.reward,
            status=row.trajectory["status"],
            parts=row.trajectory["parts"],
            tally=row.trajectory["facts"]["tally"],
        )
        for number, row in enumerate(read(path), start=1)
    ]


def parsed_row(line: bytes, place: str) -> Prediction:
    """One prediction.

    Args:
        place: file and line, for the error.
    """
    return row_log.parsed_row(Prediction, line, place, _FIX)


def read_record(path: Path) -> dict[str, Any] | None:
    """What a file of predictions was made with; None: the file is none of predictions."""
    beside = path.with_suffix(".json")
    if path.suffix != ".jsonl" or not beside.is_file():
        return None
    try:
        record = bounded_json.load(beside, finite=False)
    except (ValueError, OSError) as error:
        raise InputError(
            f"{beside}, which says what {path.name} was made with, cannot be read ({error}); "
            "restore it, or delete both files."
        ) from None
    return record if isinstance(record, dict) and record.get("kind") == KIND else None
