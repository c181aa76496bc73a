"""The log of `qrag filter_data`: the rewards of several episodes of every training question."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from qrag_jax.errors import InputError
from qrag_jax.metrics import answer_log

_DIGITS = 9  # of a reward; what follows is the rounding of sums in another order


@dataclasses.dataclass(frozen=True)
class RewardRow:
    """The rewards of one question.

    Attributes:
        id, question: of the data set.
        mean: of the rewards; None if there is none.
        std: their standard deviation, that of n and not of n − 1; None if there is none.
        rewards: of each episode; None: it broke, or could not be scored.
        scored: number of episodes with a reward.
        broken: why the others have none, in their order.
        kept: whether `std` is above the threshold.
    """

    id: str
    question: str
    mean: float | None
    std: float | None
    rewards: list[float | None]
    scored: int
    broken: list[str]
    kept: bool


def row(
    asked: tuple[str, str], rewards: Sequence[float | str], least_std: float = 0.0
) -> RewardRow:
    """The row of a question.

    Args:
        asked: its id and text.
        rewards: of each episode; or the cause, if it has none.
        least_std: the threshold of the standard deviation; equal rewards have exactly 0.
    """
    given = [None if isinstance(each, str) else round(each, _DIGITS) for each in rewards]
    known = [each for each in given if each is not None]
    new = RewardRow(
        *asked,
        mean=statistics.fmean(known) if known else None,
        std=statistics.pstdev(known) if known else None,
        rewards=given,
        scored=len(known),
        broken=[each for each in rewards if isinstance(each, str)],
        kept=False,
    )
    return judged(new, least_std)


def judged(each: RewardRow, least_std: float) -> RewardRow:
    """The row with another threshold."""
    return dataclasses.replace(each, kept=each.std is not None and each.std > least_std)


def read(path: Path, field: str) -> list[RewardRow]:
    """Reads a finished log; does not change the file.

    Args:
        field: the config's field that names the file, for errors.
    """
    fix = f"give a file of qrag filter_data as {field}"
    try:
        with path.open("rb") as file:
            rows, whole = answer_log.read_lines(file, path, RewardRow, fix)
    except OSError as error:
        raise InputError(
            f"{field} is {path}, which cannot be read ({error.strerror}); give a file of qrag "
            "filter_data."
        ) from None
    if whole < path.stat().st_size:
        raise InputError(
            f"{field} is {path}, which ends in the middle of a line; give the command qrag "
            "filter_data again, which goes on with it."
        )
    return rows


def summary(rows: Sequence[RewardRow], least_std: float) -> list[str]:
    """Lines on what is kept."""
    kept = sum(each.kept for each in rows)
    without = sum(each.std is None for each in rows)
    rewards = [reward for each in rows for reward in each.rewards if reward is not None]
    mean = f"{statistics.fmean(rewards):.3f}" if rewards else "unknown"
    few = "all the same" if not least_std else "varies too little"
    lines = {
        "kept": f"{kept} of {len(rows)} questions, standard deviation above {least_std:g}",
        few: f"{len(rows) - kept - without}",
        "without reward": f"{without}",
        "mean reward": f"{mean} of {len(rewards)} episodes",
    }
    causes = [cause for each in rows for cause in each.broken]
    if causes:
        counts = (f"{causes.count(cause)} {cause}" for cause in sorted(set(causes)))
        lines["broken episodes"] = ", ".join(counts)
    width = max(map(len, lines))
    return [f"{name.ljust(width)}  {text}" for name, text in lines.items()]
