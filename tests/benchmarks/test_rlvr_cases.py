"""The cases of the suite rlvr: what counts as a gain."""

from __future__ import annotations

import pytest

from benchmarks.rlvr import cases

IMITATED = "after imitation, step 5"


def part(after: list[float], before: list[float]) -> dict:
    """A part's result by intervals of the exact match: mean, low, high."""
    names = ("mean", "low", "high")
    ends = {"step 9": after, IMITATED: before}
    scores = {told: {"all": {"em": dict(zip(names, em))}} for told, em in ends.items()}
    gain = {"em": {"mean": after[0] - before[0], "low": 0.1, "high": 0.3}}
    return {
        "scores": {"bm25": scores},
        "gains": {"bm25": {IMITATED: gain, "untrained": gain}},
        "main": {"retriever": "bm25", "weights": "step 9"},
        "minutes": 20.0,
    }


@pytest.mark.parametrize(
    ("after", "before", "holds"),
    [
        ([0.5, 0.44, 0.56], [0.2, 0.15, 0.25], True),
        ([0.35, 0.3, 0.4], [0.2, 0.15, 0.25], False),  # a gain of 0.15
        ([0.5, 0.24, 0.56], [0.2, 0.15, 0.25], False),  # the intervals overlap
    ],
)
def test_a_gain_is_large_and_its_intervals_are_apart(after, before, holds) -> None:
    gain, minutes = cases("grpo-42", part(after, before), asked=True)
    assert gain.holds is holds
    assert gain.value == pytest.approx(after[0] - before[0])
    assert minutes.holds
    assert cases("best-42", part(after, before), asked=False)[0].holds is None


def test_imitation_alone_has_no_gain() -> None:
    alone = part([0.5, 0.4, 0.6], [0.1, 0.0, 0.2])
    del alone["gains"]["bm25"][IMITATED]
    assert [case.unit for case in cases("imitation-42", alone, asked=False)] == ["min"]
