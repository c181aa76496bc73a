from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from qrag_jax.runtime.threshold_plot import plot_lengths


def result(chunks: int, em: float, seconds: float | None, memory: float | None) -> dict[str, Any]:
    interval = {"mean": em, "low": em - 0.05, "high": em + 0.05}
    return {
        "chunks": chunks,
        "fact_em": em,
        "fact_f1": em / 2,
        "seconds_per_episode": seconds,
        "peak_memory_mib": memory,
        "intervals": {"fact_em": interval, "fact_f1": interval},
    }


def ink(path: Path, panel: int) -> int:
    """Pixels in colour in one of the three panels, from the top."""
    picture = imread(path)[:, :, :3]
    height = picture.shape[0] // 3
    part = picture[panel * height : (panel + 1) * height]
    return int((np.ptp(part, axis=2) > 0.1).sum())


def test_three_panels(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "lengths.png"
    plot_lengths([result(50, 0.9, 0.1, 800), result(400_000, 0.8, 60, 2000)], out, "run")
    assert all(ink(out, panel) > 200 for panel in range(3))


@pytest.mark.parametrize("known", [0, 1])
def test_what_was_not_measured_is_left_out(tmp_path: Path, known: int) -> None:
    results = [result(50, 0.9, None, None), result(160, 0.8, 0.2, 900)][: known + 1]
    plot_lengths(results, tmp_path / "lengths.png", "run")
    assert ink(tmp_path / "lengths.png", 0) > 200
    for panel in (1, 2):
        assert (ink(tmp_path / "lengths.png", panel) > 0) == bool(known)
