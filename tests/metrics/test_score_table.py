from __future__ import annotations

import pytest

from qrag_jax.metrics.score_table import columns_text, interval_text


def test_intervals_as_text() -> None:
    interval = {"mean": 0.8124, "low": -0.01, "high": 1.0}
    assert interval_text(interval) == "0.812 [-0.010, 1.000]"
    assert interval_text(interval, sign=True) == "+0.812 [-0.010, +1.000]"


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    lines = [["", "f1", "steps"], ["no stopping", "0.5", "1"], ["x", "0.25", ""]]
    assert columns_text(lines) == [
        "             f1    steps",
        "no stopping  0.5   1",
        "x            0.25",
    ]
    with pytest.raises(ValueError):
        columns_text([["a"], ["b", "c"]])
