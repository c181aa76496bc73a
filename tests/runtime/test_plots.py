"""The figures: each is a PNG of its own size, whatever is missing among the numbers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib.image import imread

from qrag_jax.runtime.plots import plot_curve, plot_thresholds

ROWS: list[dict[str, float | None]] = [
    {"step": 0, "untrained/fact_em": 0.12},
    *({"step": step, "train/loss": 1 / step, "train/mean_q": 0.01 * step} for step in range(1, 60)),
    {"step": 60, "eval/fact_em": 0.6, "eval/fact_f1": 0.7},
]
HOLES: list[dict[str, float | None]] = [
    {"step": 30, "train/loss": math.nan, "eval/fact_em": None},
    {"step": 31, "train/loss": math.inf, "train/mean_q": -math.inf, "untrained/fact_em": None},
]


def test_what_is_not_a_number_is_left_out_of_a_curve(tmp_path: Path) -> None:
    pictures = []
    for number, rows in enumerate((ROWS, ROWS[:30] + HOLES + ROWS[30:], ROWS[:30], [])):
        plot_curve(rows, tmp_path / "deep" / f"{number}.png", "same")
        pictures.append(imread(tmp_path / "deep" / f"{number}.png"))
    np.testing.assert_array_equal(pictures[0], pictures[1])
    assert (pictures[0] != pictures[2]).any()


def test_thresholds_and_the_chosen_one(tmp_path: Path) -> None:
    names = "fact_f1", "fact_precision", "fact_recall", "fact_em", "steps"
    scores = {name: np.linspace(0.0, 0.6, 9).tolist() for name in names}
    for chosen in (0.3, 0.7):
        plot_thresholds(
            np.linspace(0.9, 0.1, 9).tolist(), scores, chosen, tmp_path / f"{chosen}.png", ""
        )
    assert (imread(tmp_path / "0.3.png") != imread(tmp_path / "0.7.png")).any()
