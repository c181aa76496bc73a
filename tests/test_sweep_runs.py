"""`qrag sweep` on real trainings: stopped, gone on with, a run that fails, the table."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.entry_points import Commands, end, losses, refusal, wait_for_step

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
    wait_for_step(process, first, 6)
    done = end(process, signal.SIGINT)
    assert done.returncode == 128 + signal.SIGINT, done.stderr[-2000:]
    saved = max(int(path.name) for path in (first / "checkpoints/last").iterdir())
    assert 6 <= saved < 24
    assert NAMES[1] in commands.succeed("sweep", "--table", str(out))  # not begun
    # The same command goes on; the second run fails, and the sweep does not end with it.
    result = commands.run("sweep", *SWEEP, f"--out={out}")
    assert result.returncode == 1, result.stderr[-2000:]
    assert f"resumed {first} at step {saved}" in (out / f"{NAMES[0]}.log").read_text()
    assert [step for step, _ in losses(first)] == [*range(1, 25)]
    good, bad = json.loads((out / "table.json").read_text())["settings"]
    assert (good["settings"], good["seeds"], good["questions"]) == (GOOD, [42], 4)
    summary = json.loads((first / "summary.json").read_text())
    assert good["mean"] == pytest.approx(summary["trained"]["fact_f1"])
    assert bad == {"settings": BAD, "seeds": []}
    assert f"- {NAMES[1]}: not finished: error: " in result.stdout
    # What is left can be run elsewhere.
    (line,) = commands.succeed("sweep", f"--out={out}", "--commands").splitlines()
    assert f"--workdir={out / NAMES[1]} && " in line
    # Once more: what is done stays, what failed is tried again.
    before = (first / "summary.json").stat().st_mtime_ns
    again = commands.run("sweep", f"--out={out}")
    assert again.returncode == 1
    assert f"{NAMES[1]}: train" in again.stdout
    assert (first / "summary.json").stat().st_mtime_ns == before
    # Another plan, another score.
    assert "seeds" in refusal(commands.run("sweep", *SWEEP, "--seeds=42,43", f"--out={out}"))
    assert "fact_recall" in commands.succeed("sweep", "--table", str(out), "--score=fact_recall")
    assert "--score" in refusal(commands.run("sweep", "--table", str(out), "--score=speed"))


def test_what_is_refused_before_anything_starts(commands: Commands, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    for words, named in (
        (SWEEP, "folder"),
        ((*SWEEP, f"--out={out}", "--set=train.steps=5"), "train.steps"),
        ((*SWEEP[:1], f"--out={out}", "--set=train.batch_size=5,x"), "train.batch_size"),
        ((*SWEEP[:1], f"--out={out}", "--seeds=a"), "--seeds"),
        ((f"--out={out}", "--seeds=1"), "--config"),
        (("--table", str(out)), "folder"),
    ):
        assert named in refusal(commands.run("sweep", *words))
        assert not out.exists()
