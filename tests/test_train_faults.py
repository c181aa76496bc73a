"""A run that is stopped, killed or out of space goes on as if nothing had happened."""

from __future__ import annotations

import gzip
import json
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.entry_points import (
    CHECKPOINT_EVERY,
    SHARED,
    STEPS,
    Commands,
    losses,
    metric_lines,
    refusal,
    saved_state,
)

pytestmark = pytest.mark.long

POLL = 0.002  # seconds; a step takes some 30 ms


def wait_for_step(process: subprocess.Popen[str], workdir: Path, step: int) -> None:
    """Returns when `metrics.jsonl` holds the training line of `step`, or the process ended."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        steps = losses(workdir)
        if steps and steps[-1][0] >= step:
            return
        time.sleep(POLL)


def end(process: subprocess.Popen[str], number: int | None = None) -> tuple[int, str, str]:
    """Sends the signal; exit status, standard output and standard error."""
    if number is not None:
        process.send_signal(number)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def last_steps(workdir: Path) -> list[int]:
    return sorted(int(p.name) for p in (workdir / "checkpoints/last").glob("*") if p.name.isdigit())


def assert_same_run(workdir: Path, reference: Path) -> None:
    """Parameters, targets, optimizer state, key and metrics equal, bit for bit."""
    expected, found = saved_state(reference, STEPS), saved_state(workdir, STEPS)
    assert found.keys() == expected.keys()
    for part in ("params/", "target_params/", "opt_state/", "key", "step", "env_steps"):
        assert any(name.startswith(part) for name in expected)
    for name, leaf in expected.items():
        assert found[name].dtype == leaf.dtype
        assert np.array_equal(found[name], leaf), name
    assert losses(workdir) == losses(reference)
    scores = [
        [
            (line["step"], line["eval/return"], line["untrained/fact_f1"])
            for line in metric_lines(folder)
            if "eval/return" in line
        ]
        for folder in (workdir, reference)
    ]
    assert scores[0] == scores[1]


def test_killed_three_times_equals_never_killed(
    commands: Commands, finished_run: Path, tmp_path: Path
) -> None:
    draw = random.Random(20)
    workdir = tmp_path / "run"
    for earliest in (CHECKPOINT_EVERY + 1, 2 * CHECKPOINT_EVERY + 2, 3 * CHECKPOINT_EVERY + 3):
        step = max(earliest, *(step + 1 for step in last_steps(workdir) or [0]))
        process = commands.start("train", *SHARED, f"--workdir={workdir}")
        wait_for_step(process, workdir, step)
        time.sleep(draw.uniform(0, 0.06))  # anywhere in a step, in a save or between the two
        assert end(process, signal.SIGKILL)[0] == -signal.SIGKILL
        assert not (workdir / "learning_curve.png").exists()
    out = commands.succeed("train", *SHARED, f"--workdir={workdir}")
    assert f"resumed {workdir} at step " in out
    assert_same_run(workdir, finished_run)


@pytest.mark.parametrize("later", [False, True])
def test_a_finished_run_goes_on(later: bool, commands: Commands, tmp_path: Path) -> None:
    """With a constant rate it equals the run that was that long from the beginning."""
    (tmp_path / "own.py").write_text("def score(question, answers, taken, gold):\n    return 1.0\n")
    reward = (f"--config.reward.path={tmp_path / 'own.py'}:score",) if later else ()
    few, more = ("--config.train.steps=6",), ("--config.train.steps=12",)
    fields = (*SHARED, *reward, "--config.optimizer.schedule=constant")
    commands.succeed("train", *fields, *few, f"--workdir={tmp_path / 'one'}")
    for folder in ("one", "other"):
        commands.succeed("train", *fields, *more, f"--workdir={tmp_path / folder}")
        assert json.loads((tmp_path / folder / "config.json").read_text())["train"]["steps"] == 12
    refused = refusal(commands.run("train", *fields, *few, f"--workdir={tmp_path / 'one'}"))
    assert "config.train.steps" in refused
    found, expected = (saved_state(tmp_path / folder, 12) for folder in ("one", "other"))
    if later:  # the batches at the border are played by later weights
        assert np.isfinite([loss for _, loss in losses(tmp_path / "one")]).all()
    else:
        assert all(np.array_equal(found[name], leaf) for name, leaf in expected.items())


def test_stopped_before_its_first_evaluation(
    commands: Commands, finished_run: Path, tmp_path: Path
) -> None:
    """No weights are the best then; the clock brings the next evaluation, and changes no weight."""
    workdir = tmp_path / "run"
    fields = (*SHARED, "--config.train.eval_every=1000", f"--workdir={workdir}")
    process = commands.start("train", *fields)
    wait_for_step(process, workdir, 2)
    assert end(process, signal.SIGTERM)[0] == 128 + signal.SIGTERM
    assert "--checkpoint=last" in refusal(commands.run("evaluate", f"--workdir={workdir}"))
    commands.succeed("evaluate", f"--workdir={workdir}", "--checkpoint=last", "--samples=2")
    commands.succeed("train", *fields, "--config.train.first_eval_minutes=0.0001")
    first, early, *later = (x["step"] for x in metric_lines(workdir) if "eval/return" in x)
    assert (first, later) == (0, [STEPS])
    assert 0 < early < STEPS
    expected, found = saved_state(finished_run, STEPS), saved_state(workdir, STEPS)
    assert all(np.array_equal(found[name], leaf) for name, leaf in expected.items())


@pytest.mark.slow
def test_killed_before_the_first_checkpoint(
    commands: Commands, finished_run: Path, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    process = commands.start("train", *SHARED, f"--workdir={workdir}")
    wait_for_step(process, workdir, 1)
    assert end(process, signal.SIGKILL)[0] == -signal.SIGKILL
    shutil.rmtree(workdir / "checkpoints" / "last")  # should the kill have come too late
    commands.succeed("train", *SHARED, f"--workdir={workdir}")
    assert_same_run(workdir, finished_run)


@pytest.mark.slow
def test_documents_drawn_anew_go_on_in_their_epoch(commands: Commands, tmp_path: Path) -> None:
    """Two steps an epoch; the run goes on at the border of two."""
    arguments = (
        *("train", "--config=configs/babilong.py:tiny", "--config.train.steps=4"),
        *("--config.data.sources.babilong.train=16", "--config.train.checkpoint_every=2"),
        *("--config.train.eval_every=4", "--config.encoder.length_buckets=1"),
        "--config.encoder.block_sizes=1",
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    commands.succeed(*arguments, f"--workdir={whole}")
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "last" / "4")
    commands.succeed(*arguments, f"--workdir={parts}")
    expected, found = saved_state(whole, 4), saved_state(parts, 4)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert np.array_equal(found[name], leaf), name
    assert not np.array_equal(saved_state(whole, 2)["env_steps"], expected["env_steps"])


def test_signals_stop_in_good_order(commands: Commands, finished_run: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    for number, name, step in ((signal.SIGTERM, "SIGTERM", 3), (signal.SIGINT, "SIGINT", 8)):
        process = commands.start("train", *SHARED, f"--workdir={workdir}")
        wait_for_step(process, workdir, step)
        status, out, err = end(process, number)
        assert status == 128 + number, err[-2000:]
        saved = last_steps(workdir)[-1]
        assert step <= saved < STEPS
        assert f"{name}: stopped, saved at step {saved}; give the same command to go on." in out
        assert "Traceback" not in err
        assert losses(workdir)[-1][0] == saved
    # A terminal that closes: nobody reads what is written, then the signal comes.
    process = commands.start(
        "train",
        *SHARED,
        f"--workdir={workdir}",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # tests under nohup
    )
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    process.stdout = process.stderr = None
    wait_for_step(process, workdir, 14)  # behind an evaluation, which is told
    assert end(process, signal.SIGHUP)[0] == 128 + signal.SIGHUP
    saved = last_steps(workdir)[-1]
    assert 14 <= saved < STEPS
    assert losses(workdir)[-1][0] == saved
    out = commands.succeed("train", *SHARED, f"--workdir={workdir}")
    assert f"resumed {workdir} at step {saved}" in out
    assert_same_run(workdir, finished_run)


@pytest.mark.slow
def test_profiled_and_stopped_meanwhile(
    commands: Commands, finished_run: Path, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    process = commands.start("train", *SHARED, f"--workdir={workdir}", "--config.profile=1000")
    wait_for_step(process, workdir, 5)
    status, out, err = end(process, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM, err[-2000:]
    saved = last_steps(workdir)[-1]
    assert 5 <= saved < STEPS
    assert f"profile of steps 3 to {saved}: open {workdir / 'profile'}" in out
    (first,) = workdir.glob("profile/plugins/profile/*/perfetto_trace.json.gz")
    assert traced_steps(first) == list(range(3, saved + 1))
    # Gone on with another value, and without: the field changes nothing in what is computed.
    commands.succeed("train", *SHARED, f"--workdir={workdir}", "--config.profile=1")
    (second,) = set(workdir.glob("profile/plugins/profile/*/perfetto_trace.json.gz")) - {first}
    assert traced_steps(second) == [saved + 3]
    assert_same_run(workdir, finished_run)


def traced_steps(path: Path) -> list[int]:
    """Steps marked in a trace, which also holds the program that computed them."""
    found = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    events = [event for event in found if "name" in event]
    steps = sorted(int(event["args"]["step_num"]) for event in events if event["name"] == "train")
    assert any(event["name"] == "PjitFunction(train_step)" for event in events)
    assert any(event["name"].startswith("dot") for event in events)  # operations on the device
    return steps


def test_disk_full_while_a_checkpoint_is_written(
    commands: Commands, finished_run: Path, tmp_path: Path
) -> None:
    workdir = Path(shutil.copytree(finished_run, tmp_path / "run"))
    kept = STEPS - CHECKPOINT_EVERY
    shutil.rmtree(workdir / "checkpoints" / "last" / str(STEPS))
    before = saved_state(workdir, kept)
    whole = sum(p.stat().st_size for p in (workdir / "checkpoints/last").rglob("*"))
    smaller = [p.stat().st_size for p in workdir.glob("*") if p.is_file()]
    limit = whole // 5  # of one file: those with a state's arrays are larger, all else is not
    assert limit > 1.5 * max(smaller)

    process = commands.start("train", *SHARED, f"--workdir={workdir}")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    status, _, err = end(process)
    assert status == 1
    text = err.splitlines()[-1]  # TensorStore's own complaints may stand before it
    assert text.startswith("error: a checkpoint could not be written")
    assert "File too large" in text
    assert f"could not be written to {workdir / 'checkpoints'}" in text
    assert f"the state of step {kept} is kept" in text
    assert last_steps(workdir) == [kept]
    after = saved_state(workdir, kept)
    assert all(np.array_equal(after[name], leaf) for name, leaf in before.items())
    out = commands.succeed("train", *SHARED, f"--workdir={workdir}")
    assert f"resumed {workdir} at step {kept}" in out
    assert_same_run(workdir, finished_run)
