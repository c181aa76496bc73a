"""Files of predictions: one JSON line for each episode of a question, with all of its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qrag_jax.errors import InputError
from qrag_jax.metrics import answer_log, row_log
from qrag_jax.runtime import bounded_json
from qrag_jax.runtime.typed_json import made

KIND = "predictions of episodes with tools"  # in the record beside a file, by which it is known
# Parts of a reward and counts that every scored episode has.
OF_PARTS = ("em", "f1", "recall", "precision", "citation", "citation_precision", "format")
_COUNTS = ("completed", "malformed", "unknown_tool", "truncated", "turns", "searches")
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
        offset: bytes of the file before it.
        status, parts: as in a `TokenTrajectory`.
        tally: counts of what happened.
    """

    line: int
    offset: int
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


class _Turn(NamedTuple):
    """A turn in a `TokenTrajectory`, as JSON has it."""

    observed: list[int]
    sampled: list[int]
    log_probs: list[float]
    finish: str
    version: str


class _Texts(NamedTuple):
    """The texts of a turn; see `Prediction.turns`."""

    segment: int
    observed: str
    sampled: str
    observed_tokens: list[str]
    sampled_tokens: list[str]


class _Facts(NamedTuple):
    """The facts of a trajectory that are shown."""

    tally: dict[str, float | bool]
    cited: list[str]
    seen: list[str]
    message: str


class _Trajectory(NamedTuple):
    """A `TokenTrajectory`, as JSON has it."""

    question: int
    member: int
    attempt: int
    segments: list[list[_Turn]]
    status: str
    parts: dict[str, float]
    facts: dict[str, Any]


def read_scores(path: Path) -> list[ScoredEpisode]:
    """The episodes of a file without their tokens; a last line that is not whole is left out."""
    found: list[ScoredEpisode] = []
    before = 0
    for row, size in _read(path, 0):
        found.append(_scored(len(found) + 1, before, row, path))
        before += size
    return found


def read_at(path: Path, offset: int) -> Prediction:
    """The prediction whose line begins behind so many bytes; see `ScoredEpisode.offset`."""
    for row, _ in _read(path, offset):
        _check_turns(row, path)
        return row
    raise InputError(f"{path} has become shorter while it was read; give the command again.")


def parsed_row(line: bytes, place: str) -> Prediction:
    """One prediction, whose turns fit together.

    Args:
        place: file and line, for the error.
    """
    row = row_log.parsed_row(Prediction, line, place, _FIX)
    _check_turns(row, place)
    return row


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


def _read(path: Path, offset: int) -> Iterator[tuple[Prediction, int]]:
    """The predictions behind so many bytes, each with the bytes of its line."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            yield from answer_log.each_line(file, path, Prediction, _FIX)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); give a file of `qrag predict`."
        ) from None


def _scored(number: int, offset: int, row: Prediction, path: Path) -> ScoredEpisode:
    trajectory = row.trajectory
    try:
        parts = made(dict[str, float], trajectory.get("parts"))
        status = made(str, trajectory.get("status"))
        tally = made(_Facts, _facts(trajectory)).tally
        if not row.answers:
            raise ValueError("its question has no right answer")
        if row.reward is not None and not {*OF_PARTS} <= parts.keys():
            raise ValueError("a part of the reward is missing")
        if not {*_COUNTS} <= tally.keys():
            raise ValueError("a count is missing")
    except ValueError as error:
        raise InputError(
            f"{path}, line {number}: field 'trajectory' is none of an episode ({error}); {_FIX}"
        ) from None
    return ScoredEpisode(
        line=number,
        offset=offset,
        id=row.id,
        question=row.question,
        answers=tuple(row.answers),
        hops=row.hops,
        draw=row.draw,
        prediction=row.prediction,
        reward=row.reward,
        status=status,
        parts=parts,
        tally=tally,
    )


def _facts(trajectory: Mapping[str, Any]) -> Any:
    """The facts that are shown; those that an episode need not have are filled in."""
    facts = trajectory.get("facts")
    if not isinstance(facts, dict):
        return facts
    none = {"cited": [], "seen": [], "message": ""}
    return {name: facts[name] for name in _Facts._fields if name in facts} | {
        name: value for name, value in none.items() if not facts.get(name)
    }


def _check_turns(row: Prediction, path: Path | str) -> None:
    """Refuses a prediction whose turns have other numbers of ids and of texts."""
    try:
        made(_Facts, _facts(row.trajectory))
        turns = [turn for segment in made(_Trajectory, row.trajectory).segments for turn in segment]
        texts = made(list[_Texts], row.turns)
        sizes = [(len(t.observed), len(t.sampled), len(t.sampled)) for t in turns]
        told = [
            (len(each.observed_tokens), len(each.sampled_tokens), len(turn.log_probs))
            for each, turn in zip(texts, turns, strict=True)
        ]
        if sizes != told:
            raise ValueError("a turn has other numbers of ids and of texts")
    except ValueError as error:
        raise InputError(
            f"{path}: the episode of question {bounded_json.shown(row.id)} cannot be shown "
            f"({error}); {_FIX}"
        ) from None
