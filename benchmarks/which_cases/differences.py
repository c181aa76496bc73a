"""Cases of the suite which: what trained lines find more, or less, than others."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import Case
from benchmarks.which_cases.row import TRAINED, UNTRAINED
from benchmarks.which_cases.scores import Interval
from benchmarks.which_cases.table import (
    COMPARED,
    CONTRASTIVE,
    SIMPLE,
    Scored,
    begun_with,
    difference_of,
    score_of,
)


def cases(lines: Sequence[Scored]) -> list[Case]:
    """Trained lines less untrained ones, contrastive training, and the best simple search."""
    found = []
    for line in lines:
        if line.way != TRAINED:
            continue
        own = [each for each in lines if each.trained_in == line.trained_in]
        beside = [each for each in begun_with(line, own) if each.way == UNTRAINED]
        further = (CONTRASTIVE, *SIMPLE)
        beside += [each for each in own if each.row.name in further]
        for other in dict((each.title, each) for each in beside if each is not line).values():
            gain = difference_of(line, other)
            if gain is not None:
                found.append(_case(line, other, gain))
    return found


def _case(line: Scored, other: Scored, gain: Interval) -> Case:
    after, before = (score_of(each, COMPARED) for each in (line, other))
    assert after is not None
    assert before is not None
    order = "above" if gain.low > 0 else "below" if gain.high < 0 else "not told apart"
    return Case(
        f"{line.trained_in}, {COMPARED}: {line.title} - {other.title}",
        gain.mean,
        "share of questions",
        peer=before.mean,
        details={
            "low": gain.low,
            "high": gain.high,
            "ordering": order,
            line.title: after.mean,
            "trainings": float(len(line.seeds)),
            "questions": float(gain.questions),
        },
    )
