"""`qrag sweep` on real trainings: stopped, gone on with, a run that fails, the table."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.entry_points import Commands, metric_lines, refusal

pytestmark = pytest.mark.long

# The fields of `entry_points.SHARED`, so that programs are found in the cache.
GOOD, BAD = "optimizer.learning_rate=1e-3", "optimizer.learning_rate=1e30"
SWEEP = (
    "--config=configs/hotpotqa.py:tiny",
    "--set=optimizer.learning_rate=1e-3,1e30",  # the second one's loss is not finite
    "--set=train.steps=24",
    "--set=train.log_every=1",
    "--set=train.checkpoint_every=4",
    "--set=train.eval_every=6",
    "--set=train.max_skipped_steps=3",
    "--set=encoder.length_buckets=1",
    "--set=encoder.block_sizes=1",
    "--samples=4",
)
NAMES = ["learning_rate-1e-3-seed42", "learning_rate-1e30-seed42"]


def test_stopped_gone_on_with_and_compared(commands: Commands, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    first = out / NAMES[0]
    process = commands.start("sweep", *SWEEP, f"--out={out}", stdin=subprocess.DEVNULL)
    while not any(line["step"] >= 6 for line in metric_lines(first)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    told, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, errors[-2000:]
    last = "SIGINT: stopped, 0 of 2 runs are done; give the same command to go on."
    assert told.splitlines()[-1] == last
    saved = max(int(path.name) for path in (first / "checkpoints/last").iterdir())
    assert 6 <= saved < 24
    # While it is stopped, the table says what there is.
    told = commands.succeed("sweep", "--table", str(out))
    assert f"- {NAMES[0]}: not finished" in told
    assert f"- {NAMES[1]}: not begun" in told
    # The same command goes on; the second run fails, and the sweep does not end with it.
    result = commands.run("sweep", *SWEEP, f"--out={out}")
    assert result.returncode == 1, result.stderr[-2000:]
    assert f"resumed {first} at step {saved}" in (out / f"{NAMES[0]}.log").read_text()
    steps = [line["step"] for line in metric_lines(first) if "train/loss" in line]
    assert steps == [*range(1, 25)]
    good, bad = json.loads((out / "table.json").read_text())["settings"]
    assert (good["settings"], good["seeds"], good["questions"]) == (GOOD, [42], 4)
    summary = json.loads((first / "summary.json").read_text())
    assert good["mean"] == pytest.approx(summary["trained"]["fact_f1"])
    assert bad == {"settings": BAD, "seeds": []}
    assert f"- {NAMES[1]}: not finished: error: the loss or its gradient was" in result.stdout
    # What is left can be run elsewhere.
    (line,) = commands.succeed("sweep", f"--out={out}", "--commands").splitlines()
    assert f"--workdir={out / NAMES[1]} && " in line
    # Once more: what is done stays, what failed is tried again.
    before = (first / "summary.json").stat().st_mtime_ns
    again = commands.run("sweep", f"--out={out}")
    assert again.returncode == 1
    assert f"{NAMES[0]}: done already" in again.stdout
    assert f"{NAMES[1]}: train" in again.stdout
    assert (first / "summary.json").stat().st_mtime_ns == before
    # Another plan, another score.
    text = refusal(commands.run("sweep", *SWEEP, "--seeds=42,43", f"--out={out}"))
    assert "has another plan (seeds: 42 there, 42,43 given)" in text
    told = commands.succeed("sweep", "--table", str(out), "--score=fact_recall")
    assert "| settings | seeds | questions | fact_recall | minus the first |" in told
    text = refusal(commands.run("sweep", "--table", str(out), "--score=speed"))
    assert f"--score=speed is no score of {NAMES[0]}; use one of fact_em, fact_f1" in text


def test_what_is_refused_before_anything_starts(commands: Commands, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    for words, told in (
        (SWEEP, "give the sweep's folder once"),
        ((*SWEEP, f"--out={out}", "--set=train.steps=5"), "gives the values of train.steps again"),
        ((*SWEEP[:1], f"--out={out}", "--set=train.batch_size=5,x"), "train.batch_size"),
        ((*SWEEP[:1], f"--out={out}", "--seeds=a"), "--seeds=a is no list of whole numbers"),
        ((f"--out={out}",), "give the folder of a sweep, or --config to begin one"),
        ((f"--out={out}", "--seeds=1"), "--seeds is given without --config"),
        (("--table", str(out)), "give the folder of a sweep"),
    ):
        assert told in refusal(commands.run("sweep", *words))
        assert not out.exists()
