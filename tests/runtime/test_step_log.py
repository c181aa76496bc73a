"""What a training reports: steps, traces, signs of no learning, lines of metrics and episodes."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import struct
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from qrag_jax.runtime.step_log import (
    EQUAL_Q,
    FLAT,
    FLAT_GROUPS,
    NO_ENTROPY,
    NO_GRADIENT,
    ONE_RETURN,
    PERFETTO_NAME,
    SKIPPED,
    WORSE,
    Evaluated,
    StepProfile,
    Watch,
)
from qrag_jax.runtime.writers import Logged, MetricWriter, read_metrics
from tests.entry_points import SHARED, Commands, metric_lines, refusal, saved_state

# ---------------------------------------------------------------------- not finite


def test_a_run_that_cannot_learn_says_so_and_stops_and_keeps_what_is_good(
    commands: Commands, tmp_path: Path
) -> None:
    # The first update moves every weight by about 1e30: no loss is finite from then on.
    fields = ("optimizer.learning_rate=1e30", "train.max_skipped_steps=22", "train.eval_every=22")
    words = [*SHARED, *(f"--config.{field}" for field in fields), f"--workdir={tmp_path}"]
    result = commands.run("train", *words)
    message = refusal(result, status=1)
    assert "22 steps in a row, to step 23 " in message
    assert "--config.optimizer.learning_rate" in message
    said = result.stdout.splitlines()
    signs = [line for line in said if "may not be learning" in line]
    assert all(sign.startswith("step 22: ") for sign in signs)
    assert any(sign.endswith("docs/troubles.md#skipped") for sign in signs)
    lines = [line for line in metric_lines(tmp_path) if "train/loss" in line]
    assert [line["step"] for line in lines][:23] == [*range(1, 24)]
    for line in lines[:23]:
        skipped = line["step"] - 1
        assert line["train/skipped_steps"] == line["train/skipped_in_a_row"] == skipped
        assert (line["train/loss"] is None) == bool(skipped)
        assert line["train/env_steps"] == line["step"] * 16  # time goes on
    # Saved once, at the first checkpoint after the update; the last of them would say no more.
    (saved,) = (tmp_path / "checkpoints/last").iterdir()
    assert saved.name == "4"
    state = saved_state(tmp_path, 4)
    assert state["step"] == 4
    assert all(np.isfinite(leaf).all() for leaf in state.values())
    assert max(np.abs(leaf).max() for name, leaf in state.items() if "params" in name) > 1e29
    (best,) = (tmp_path / "checkpoints/best").iterdir()
    assert best.name == "0"  # what was wrecked is not the best by chance


# ---------------------------------------------------------------------- traces


def play(folder: Path, traced: int, done: int, until: int, fail_at: int = 0) -> None:
    """A loop as the trainer's, from step `done` + 1 to `until`."""
    square, running = jax.jit(lambda x: (x @ x).sum()), None
    with contextlib.closing(StepProfile(folder, traced, done)) as profile:
        for step in range(done + 1, until + 1):
            profile.turn(step, running)
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                running = square(np.ones((64, 64), np.float32))
                if step == fail_at:
                    raise RuntimeError("broken")
        jax.block_until_ready(running)


def traced_steps(folder: Path) -> list[int]:
    """The steps that are marked in a trace, which has what ran on the device, too."""
    (path,) = folder.glob(f"plugins/profile/*/{PERFETTO_NAME}")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any("Execute" in event.get("name", "") for event in events)
    assert len([*folder.glob("plugins/profile/*/*.xplane.pb")]) == 1  # what TensorBoard reads
    return sorted(int(e["args"]["step_num"]) for e in events if e.get("name") == "train")


def test_the_steps_after_the_first_two_are_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error closes the trace, too: JAX has one at a time."""
    with pytest.raises(RuntimeError, match="broken"):
        play(tmp_path / "broken", traced=5, done=0, until=9, fail_at=4)
    assert traced_steps(tmp_path / "broken") == [3, 4]
    play(tmp_path / "whole", traced=3, done=10, until=20)
    assert f"--logdir={tmp_path / 'whole'}" in capsys.readouterr().out
    assert traced_steps(tmp_path / "whole") == [13, 14, 15]
    play(tmp_path / "short", traced=3, done=7, until=9)
    assert capsys.readouterr().out
    assert not (tmp_path / "short").exists()


# ---------------------------------------------------------------------- nothing is learned

SOUND = {"entropy": 0.6, "grad_norm": 0.3, "flat_groups": 0.2}
FLAT_SCORES = (0.5, 0.52, 0.47, 0.55)


def course(
    scores: Sequence[float] = (0.5, 0.7, 0.8, 0.9),
    *,
    questions: int = 100,
    lines: int = 10,
    **means: Any,
) -> Watch:
    """A training of 100 steps, scored every 20 from step 0 on, with lines of 5 steps each, whose
    means are those of a sound training but for some. Of 100 questions in step 0 half are right: the
    95 % interval is 0.5 ± 0.098."""
    found = Watch(100)
    first = [float(i % 2) for i in range(questions)]
    found.evaluations = [
        Evaluated(20 * number, score, () if number else first, 0.4)
        for number, score in enumerate(scores)
    ]
    for number in range(lines):
        found.line(5, {"return": 0.5 + 0.01 * number} | SOUND | means, 0)
    return found


def kinds(watch: Watch) -> list[str]:
    return [kind for kind, _ in watch.findings()]


def test_scores_are_compared_with_the_interval_of_the_untrained_weights() -> None:
    assert kinds(course()) == kinds(Watch(100)) == []
    assert kinds(course(FLAT_SCORES)) == [FLAT]
    assert kinds(course(FLAT_SCORES[:3])) == []  # too few evaluations
    assert kinds(course((*FLAT_SCORES, 0.75))) == []  # it has risen
    assert kinds(course(FLAT_SCORES, questions=18)) == []
    assert kinds(course((0.5, 0.3, 0.2, 0.3))) == [WORSE]
    assert kinds(course((0.5, 0.3, 0.2, 0.45))) == []


def test_means_of_steps_show_it_unless_the_score_has_risen() -> None:
    def found(*scores: float, lines: int = 10, **mean: Any) -> list[str]:
        return kinds(course(scores or FLAT_SCORES, lines=lines, **mean))

    for kind, name, value in (
        (NO_ENTROPY, "entropy", 0.009),
        (NO_GRADIENT, "grad_norm", 0.0),
        (FLAT_GROUPS, "flat_groups", 0.96),
        (ONE_RETURN, "return", 0.0),
    ):
        assert found(**{name: value}) == found(lines=4, **{name: value}) == [FLAT, kind]
        assert found(0.5, 0.7, 0.8, 0.9, **{name: value}) == []  # sure of itself: it has learned
        assert found(lines=3, **{name: value}) == [FLAT]  # 15 steps
    resumed = course(FLAT_SCORES, entropy=0.0)
    del resumed.evaluations[0]
    assert kinds(resumed) == []


def test_equal_q_values_and_skipped_steps() -> None:
    for spread, found in ((1e-7, [EQUAL_Q]), (0.0, [EQUAL_Q]), (1e-4, []), (None, [])):
        for scores, trained in (((0.5, 0.7), True), ((0.5,), False)):
            watch = course(scores)
            watch.evaluations[-1] = watch.evaluations[-1]._replace(q_spread=spread)
            assert kinds(watch) == (found if trained else [])
    for skipped, counted, found in ((9, 50, []), (10, 50, [SKIPPED]), (10, 19, [])):
        watch = course()
        watch.skipped, watch.counted = skipped, counted
        assert kinds(watch) == found


# ---------------------------------------------------------------------- metrics and episodes


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


def episodes(folder: Path) -> list[tuple[int, int]]:
    lines = (folder / "episodes.jsonl").read_text().splitlines()
    return [(line["step"], line["row"]["n"]) for line in map(json.loads, lines)]


def test_a_killed_and_resumed_run_has_no_step_twice(tmp_path: Path) -> None:
    """Nor one of the run before, where it begins at the start."""
    path = tmp_path / "metrics.jsonl"
    with closing(MetricWriter(tmp_path, -1, Logged())) as before:
        before.write(0, {"train/loss": 50.0})
    with closing(MetricWriter(tmp_path, -1, Logged())) as killed:
        for step in range(8):
            killed.write(step, {"train/loss": float(step), "train/mean_q": -math.inf})
            assert len(path.read_text().splitlines()) == step + 1  # nothing is buffered
        for step in (0, 5, 7):
            killed.write_episodes(step, "chunks", [{"n": 1}, {"n": 2}], "")
    for file in (path, tmp_path / "episodes.jsonl"):
        with file.open("ab") as torn:
            torn.write(b'{"step": 8, "train/lo')
    # The checkpoint was of step 5, whose evaluation is repeated.
    with closing(MetricWriter(tmp_path, 5, Logged())) as writer:
        assert episodes(tmp_path) == [(0, 1), (0, 2), (5, 1), (5, 2)]
        writer.write_episodes(5, "chunks", [{"n": 3}], "")
        for step in (6, 7, 8):
            writer.write(step, {"train/loss": 100.0 + step, "train/mean_q": 1.0})
    expected = [*enumerate([*map(float, range(6)), 106.0, 107.0, 108.0])]
    assert [(row["step"], row["train/loss"]) for row in read_metrics(path)] == expected
    scalars = [(step, value) for step, name, value in board(tmp_path) if name == "train/loss"]
    assert scalars == expected
    assert episodes(tmp_path) == [(0, 1), (0, 2), (5, 3)]
    # What is no number is null in the file.
    row = json.loads(path.read_text().splitlines()[0], parse_constant=pytest.fail)
    assert row == {"step": 0, "train/loss": 0.0, "train/mean_q": None}
    assert math.isnan(read_metrics(path)[0]["train/mean_q"])
