from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from qrag_jax.runtime.plots import plot_curve, plot_lengths, plot_thresholds

CURVES = (
    *("eval/fact_em", "eval/fact_f1", "untrained/fact_em", "single_step/fact_em"),
    *("train/loss", "train/mean_q"),
)
THRESHOLDS = np.linspace(0.9, 0.1, 9).tolist()
SCORES = {
    "fact_f1": np.linspace(0.0, 0.6, 9).tolist(),
    "fact_precision": np.linspace(0.9, 0.3, 9).tolist(),
    "fact_recall": np.linspace(0.0, 0.8, 9).tolist(),
    "fact_em": np.linspace(0.0, 0.4, 9).tolist(),
    "steps": np.linspace(0.0, 4.0, 9).tolist(),
}


def example(count: int = 80) -> list[dict[str, float | None]]:
    rows: list[dict[str, float | None]] = [
        {"step": 0, "untrained/fact_em": 0.12, "single_step/fact_em": 0.41}
    ]
    for step in range(1, count + 1):
        done = step / count
        loss = 0.05 + 0.3 * math.exp(-4 * done)
        rows.append({"step": step, "train/loss": loss, "train/mean_q": 0.8 * done})
        if step % 40 == 0:
            rows.append({"step": step, "eval/fact_em": 0.6 * done, "eval/fact_f1": 0.7 * done})
    return rows


def test_every_curve_is_drawn_from_its_own_name(tmp_path: Path) -> None:
    rows = example()
    plot_curve(rows, tmp_path / "plots" / "before.png", "same")
    before = imread(tmp_path / "plots" / "before.png")
    assert before.shape[:2] == (840, 960)
    for name in CURVES:
        moved = [row | {name: 0.9 * v} if (v := row.get(name)) is not None else row for row in rows]
        plot_curve(moved, tmp_path / "after.png", "same")
        assert (before != imread(tmp_path / "after.png")).any(), name


def test_what_is_not_a_number_is_left_out(tmp_path: Path) -> None:
    clean = example()
    holes: list[dict[str, float | None]] = [
        {"step": 30, "train/loss": math.nan, "eval/fact_em": None, "eval/fact_f1": math.nan},
        {"step": 31, "train/loss": math.inf, "train/mean_q": -math.inf},
        {"step": 32, "untrained/fact_em": None, "single_step/fact_em": math.nan},
    ]
    plot_curve(clean, tmp_path / "clean.png", "same")
    plot_curve(clean[:40] + holes + clean[40:], tmp_path / "holes.png", "same")
    np.testing.assert_array_equal(imread(tmp_path / "clean.png"), imread(tmp_path / "holes.png"))
    plot_curve([], tmp_path / "empty.png", "empty")
    assert imread(tmp_path / "empty.png").shape[:2] == (840, 960)


def test_matplotlib_is_loaded_only_to_draw_and_needs_no_display(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from qrag_jax.runtime.plots import plot_curve\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plot_curve([{'step': 1, 'eval/fact_em': 0.5}], Path(sys.argv[1]), 't')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
    out = tmp_path / "curve.png"
    subprocess.run([sys.executable, "-c", program, str(out)], env=environment, check=True)
    assert out.stat().st_size > 0


def test_scores_over_thresholds_and_the_chosen_one(tmp_path: Path) -> None:
    plot_thresholds(THRESHOLDS, SCORES, 0.7, tmp_path / "before.png", "same")
    before = imread(tmp_path / "before.png")
    for name, values in SCORES.items():
        moved = SCORES | {name: [0.5 * value for value in values]}
        plot_thresholds(THRESHOLDS, moved, 0.7, tmp_path / "after.png", "same")
        assert (before != imread(tmp_path / "after.png")).any(), name
    plot_thresholds(THRESHOLDS, SCORES, 0.3, tmp_path / "chosen.png", "same")
    rows = (before != imread(tmp_path / "chosen.png")).any(axis=(1, 2))
    assert rows[: rows.size // 2].any()
    assert rows[rows.size * 3 // 4 :].any()


def result(chunks: int, seconds: float | None, memory: float | None) -> dict[str, Any]:
    interval = {"mean": 0.8, "low": 0.75, "high": 0.85}
    return {
        **{"chunks": chunks, "fact_em": 0.8, "fact_f1": 0.4},
        **{"seconds_per_episode": seconds, "peak_memory_mib": memory},
        "intervals": {"fact_em": interval, "fact_f1": interval},
    }


def ink(path: Path, panel: int) -> int:
    """Pixels in colour in one of the three panels, from the top."""
    picture = imread(path)[:, :, :3]
    height = picture.shape[0] // 3
    part = picture[panel * height : (panel + 1) * height]
    return int((np.ptp(part, axis=2) > 0.1).sum())


@pytest.mark.parametrize("known", [0, 1, 2])
def test_lengths_have_three_panels_without_what_was_not_measured(
    tmp_path: Path, known: int
) -> None:
    measured = [(0.1, 800.0), (60.0, 2000.0)]
    pairs = [pair if n < known else (None, None) for n, pair in enumerate(measured)]
    results = [result(50 * 8000**n, *pair) for n, pair in enumerate(pairs)]
    plot_lengths(results, tmp_path / "deep" / "lengths.png", "run")
    out = tmp_path / "deep" / "lengths.png"
    assert ink(out, 0) > 200
    assert all((ink(out, panel) > 0) == bool(known) for panel in (1, 2))
