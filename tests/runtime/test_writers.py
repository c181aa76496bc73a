"""Lines of metrics and episodes: each step once, whatever is killed; and their figure."""

from __future__ import annotations

import json
import math
import struct
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from tensorboardX.proto import event_pb2

from qrag_jax.runtime.plots import plot_curve
from qrag_jax.runtime.writers import MetricWriter, read_metrics


def lines(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def board(workdir: Path) -> list[tuple[int, str, float]]:
    """Scalars TensorBoard would show: (step, tag, value), purged as TensorBoard does it."""
    shown: list[tuple[int, str, float]] = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:  # records: length, its checksum, the event, its checksum
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.session_log.status == event_pb2.SessionLog.START:
                shown = [scalar for scalar in shown if scalar[0] < event.step]
            shown += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return shown


def test_nan_and_infinity_are_null_and_read_as_nan(tmp_path: Path) -> None:
    with closing(MetricWriter(tmp_path)) as writer:
        writer.write(3, {"train/loss": math.nan, "train/mean_q": -math.inf, "train/lr": 0.1})
    text = (tmp_path / "metrics.jsonl").read_text()
    expected = {"step": 3, "train/loss": None, "train/mean_q": None, "train/lr": 0.1}
    assert json.loads(text, parse_constant=pytest.fail) == expected
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(row["train/loss"])
    assert row["train/lr"] == 0.1


def test_a_killed_and_resumed_run_has_no_step_twice(tmp_path: Path) -> None:
    with closing(MetricWriter(tmp_path, resume_step=None)) as killed:
        for step in range(8):
            killed.write(step, {"train/loss": float(step)})
            assert len(lines(tmp_path)) == step + 1  # nothing is buffered
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 8, "train/lo')
    # The checkpoint was of step 5.
    with closing(MetricWriter(tmp_path, resume_step=5)) as writer:
        for step in (6, 7, 8):
            writer.write(step, {"train/loss": 100.0 + step})
    expected = [*map(float, range(6)), 106.0, 107.0, 108.0]
    assert [line["step"] for line in lines(tmp_path)] == list(range(9))
    assert [line["train/loss"] for line in lines(tmp_path)] == expected
    shown = board(tmp_path)
    assert [(step, value) for step, _, value in shown] == list(enumerate(expected))
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "tensorboard"}


def test_a_run_from_the_start_moves_old_lines_aside(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        with closing(MetricWriter(tmp_path, resume_step=None)) as writer:
            writer.write(0, {"train/loss": value})
    assert board(tmp_path) == [(0, "train/loss", 2.0)]
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "train/loss": 2.0}]
    assert read_metrics(tmp_path / "metrics.jsonl.old") == [{"step": 0, "train/loss": 1.0}]


def episodes(folder: Path) -> list[tuple[int, int]]:
    lines = (folder / "episodes.jsonl").read_text().splitlines()
    return [(line["step"], line["row"]["n"]) for line in map(json.loads, lines)]


def test_a_resumed_run_has_no_step_of_episodes_twice(tmp_path: Path) -> None:
    with closing(MetricWriter(tmp_path)) as kept:
        for step in (0, 5, 10, 15):
            kept.write_episodes(step, "chunks", [{"n": 1}, {"n": 2}], "")
    with (tmp_path / "episodes.jsonl").open("a") as file:
        file.write('{"step": 20, "row"')  # torn by a kill
    with closing(MetricWriter(tmp_path, 10)) as resumed:
        assert episodes(tmp_path) == [(0, 1), (0, 2), (5, 1), (5, 2), (10, 1), (10, 2)]
        resumed.write_episodes(10, "chunks", [{"n": 3}], "")  # an evaluation that is repeated
        resumed.write_episodes(15, "chunks", [{"n": 4}], "")
    assert episodes(tmp_path) == [(0, 1), (0, 2), (5, 1), (5, 2), (10, 3), (15, 4)]
    with closing(MetricWriter(tmp_path)) as new:
        new.write_episodes(0, "chunks", [{"n": 5}], "")
    assert episodes(tmp_path) == [(0, 5)]


def test_what_is_not_a_number_is_left_out_of_a_curve(tmp_path: Path) -> None:
    rows: list[dict[str, float | None]] = [
        {"step": 0, "untrained/fact_em": 0.12},
        *({"step": n, "train/loss": 1 / n, "train/mean_q": 0.01 * n} for n in range(1, 60)),
        {"step": 60, "eval/fact_em": 0.6, "eval/fact_f1": 0.7},
    ]
    holes: list[dict[str, float | None]] = [
        {"step": 30, "train/loss": math.nan, "eval/fact_em": None},
        {"step": 31, "train/loss": math.inf, "train/mean_q": -math.inf},
    ]
    pictures = []
    for number, some in enumerate((rows, rows[:30] + holes + rows[30:], [])):
        plot_curve(some, tmp_path / "deep" / f"{number}.png", "same")
        pictures.append(imread(tmp_path / "deep" / f"{number}.png"))
    np.testing.assert_array_equal(pictures[0], pictures[1])
    assert (pictures[0] != pictures[2]).any()
