from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from qrag_jax.runtime import threshold_plot
from qrag_jax.runtime.threshold_plot import plot_thresholds

THRESHOLDS = np.linspace(0.9, 0.1, 9).tolist()
SCORES = {
    "fact_f1": np.linspace(0.0, 0.6, 9).tolist(),
    "fact_precision": np.linspace(0.9, 0.3, 9).tolist(),
    "fact_recall": np.linspace(0.0, 0.8, 9).tolist(),
    "fact_em": np.linspace(0.0, 0.4, 9).tolist(),
    "steps": np.linspace(0.0, 4.0, 9).tolist(),
}


def shows(path: Path, colour: str) -> bool:
    pixels = imread(path)[..., :3].reshape(-1, 3)
    return bool((np.abs(pixels - to_rgb(colour)).max(axis=1) < 0.02).sum() > 50)


def test_the_picture_is_a_png_with_every_curve(tmp_path: Path) -> None:
    out = tmp_path / "plots" / "stopping.png"
    plot_thresholds(THRESHOLDS, SCORES, 0.45, out, "a threshold")
    assert out.read_bytes().startswith(b"\x89PNG\r\n")
    for _, colour, _ in threshold_plot._SCORES.values():
        assert shows(out, colour)
    assert shows(out, threshold_plot._STEPS)


@pytest.mark.parametrize("name", SCORES)
def test_every_curve_is_drawn_from_its_own_name(tmp_path: Path, name: str) -> None:
    moved = SCORES | {name: [0.5 * value for value in SCORES[name]]}
    plot_thresholds(THRESHOLDS, SCORES, 0.45, tmp_path / "before.png", "same")
    plot_thresholds(THRESHOLDS, moved, 0.45, tmp_path / "after.png", "same")
    assert (imread(tmp_path / "before.png") != imread(tmp_path / "after.png")).any()


def test_the_chosen_threshold_is_marked_in_both_panels(tmp_path: Path) -> None:
    plot_thresholds(THRESHOLDS, SCORES, 0.7, tmp_path / "a.png", "same")
    plot_thresholds(THRESHOLDS, SCORES, 0.3, tmp_path / "b.png", "same")
    moved = (imread(tmp_path / "a.png") != imread(tmp_path / "b.png")).any(axis=(1, 2))
    assert moved[: moved.size // 2].any()
    assert moved[moved.size * 3 // 4 :].any()


def test_a_single_candidate_can_be_drawn(tmp_path: Path) -> None:
    one = {name: [0.5] for name in SCORES}
    plot_thresholds([0.3], one, 0.3, tmp_path / "one.png", "one")
    assert (tmp_path / "one.png").stat().st_size > 0
