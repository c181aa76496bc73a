from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from qrag_jax.runtime import curve


def example(count: int = 400) -> list[dict[str, float | None]]:
    rng = np.random.default_rng(0)
    rows: list[dict[str, float | None]] = [
        {"step": 0, "untrained/fact_em": 0.12, "single_step/fact_em": 0.41}
    ]
    for step in range(1, count + 1):
        done = step / count
        rows.append(
            {
                "step": step,
                "train/loss": float(0.05 + 0.3 * math.exp(-4 * done) * rng.uniform(0.5, 1.5)),
                "train/mean_q": float(0.8 * done + rng.normal(0, 0.01)),
            }
        )
        if step % 40 == 0:
            em = 0.12 + 0.6 * (1 - math.exp(-3 * done))
            rows.append({"step": step, "eval/fact_em": em, "eval/fact_f1": em + 0.1})
    return rows


def colours(path: Path, half: slice) -> np.ndarray:
    picture = imread(path)
    height = int(picture.shape[0] * 0.93)  # without the step axis, so that halves are panels
    return picture[height * half.start // 2 : height * half.stop // 2, :, :3].reshape(-1, 3)


def shows(pixels: np.ndarray, colour: str) -> bool:
    return bool((np.abs(pixels - to_rgb(colour)).max(axis=1) < 0.02).sum() > 50)


TOP, BOTTOM = slice(0, 1), slice(1, 2)


def test_the_picture_holds_every_curve_in_its_panel(tmp_path: Path) -> None:
    out = tmp_path / "plots" / "curve.png"
    curve.plot_curve(example(), out, "a small run")
    top, bottom = colours(out, TOP), colours(out, BOTTOM)
    for colour in (curve._EM, curve._F1, *(colour for _, colour in curve._BASELINES.values())):
        assert shows(top, colour)
    for colour in (curve._LOSS, curve._Q):
        assert shows(bottom, colour)
        assert not shows(top, colour)


def test_without_evaluation_the_top_has_no_curve(tmp_path: Path) -> None:
    rows = [row for row in example() if "train/loss" in row]
    curve.plot_curve(rows, tmp_path / "curve.png", "no evaluation")
    top, bottom = colours(tmp_path / "curve.png", TOP), colours(tmp_path / "curve.png", BOTTOM)
    assert not shows(top, curve._EM)
    assert shows(bottom, curve._LOSS)


def test_what_is_not_a_number_is_left_out(tmp_path: Path) -> None:
    clean = example()
    holes: list[dict[str, float | None]] = [
        {"step": 100, "train/loss": math.nan, "eval/fact_em": None, "eval/fact_f1": math.nan},
        {"step": 110, "train/loss": math.inf, "train/mean_q": -math.inf},
        {"step": 120, "untrained/fact_em": None, "single_step/fact_em": math.nan},
    ]
    curve.plot_curve(clean, tmp_path / "clean.png", "same")
    curve.plot_curve(clean[:200] + holes + clean[200:], tmp_path / "holes.png", "same")
    np.testing.assert_array_equal(imread(tmp_path / "clean.png"), imread(tmp_path / "holes.png"))


@pytest.mark.parametrize("rows", [[], [{"step": 1, "train/loss": None}]])
def test_nothing_to_draw_still_makes_a_picture(tmp_path: Path, rows: list) -> None:
    curve.plot_curve(rows, tmp_path / "curve.png", "empty")
    assert imread(tmp_path / "curve.png").shape[:2] == (840, 960)


def test_smoothing_follows_the_level_without_start_up_bias() -> None:
    assert curve._smoothed([2.0] * 300) == pytest.approx([2.0] * 300)
    assert curve._smoothed([1.0, 3.0]) == [1.0, 3.0]  # too short to smooth
    noisy = np.random.default_rng(0).normal(1.0, 1.0, size=3000)
    assert np.std(curve._smoothed(list(noisy))[300:]) < 0.2


def test_matplotlib_is_loaded_only_to_draw_and_needs_no_display(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from qrag_jax.runtime.curve import plot_curve\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plot_curve([{'step': 1, 'eval/fact_em': 0.5}], Path(sys.argv[1]), 't')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
    out = tmp_path / "curve.png"
    subprocess.run([sys.executable, "-c", program, str(out)], env=environment, check=True)
    assert out.stat().st_size > 0


@pytest.mark.parametrize(
    "name",
    [
        *("eval/fact_em", "eval/fact_f1", "untrained/fact_em", "single_step/fact_em"),
        *("train/loss", "train/mean_q"),
    ],
)
def test_every_curve_is_drawn_from_its_own_name(tmp_path: Path, name: str) -> None:
    rows = example(80)
    moved = [
        row | {name: 0.9 * value} if (value := row.get(name)) is not None else row for row in rows
    ]
    curve.plot_curve(rows, tmp_path / "before.png", "same")
    curve.plot_curve(moved, tmp_path / "after.png", "same")
    before, after = imread(tmp_path / "before.png"), imread(tmp_path / "after.png")
    assert (before != after).any()
