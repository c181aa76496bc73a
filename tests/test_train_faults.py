"""A run that is stopped, damaged or read-only goes on, or is refused, as if nothing had happened.

Kills are in `test_system_commands`, those at random moments in `nightly`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from configs import hotpotqa
from qrag_jax import train
from qrag_jax.errors import InputError
from qrag_jax.runtime import whole_files
from qrag_jax.systems.config import load_config
from qrag_jax.systems.saved_run import SavedRun
from tests import disks
from tests.entry_points import (
    CHECKPOINT_EVERY,
    SHARED,
    STEPS,
    Commands,
    assert_same_run,
    assert_same_state,
    end,
    files,
    losses,
    metric_lines,
    refusal,
    wait_for_step,
)

BEFORE_LAST = STEPS - CHECKPOINT_EVERY


def flip_a_bit(folder: Path) -> None:
    """In the middle of the largest file, which holds arrays."""
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def last_step(workdir: Path) -> int:
    return max(int(p.name) for p in (workdir / "checkpoints/last").glob("*") if p.name.isdigit())


def test_ctrl_c_and_a_closed_terminal_stop_in_good_order(
    commands: Commands, finished_run: Path, tmp_path: Path
) -> None:
    """At first only untrained weights are scored; the clock brings the next evaluation."""
    workdir, clock = tmp_path / "run", "--config.train.first_eval_minutes=0.0001"
    given = ("train", *SHARED, "--config.train.eval_every=1000", f"--workdir={workdir}")
    process = commands.start(*given)
    wait_for_step(process, workdir, 3)
    done = end(process, signal.SIGINT)
    assert done.returncode == 128 + signal.SIGINT, done.stderr[-2000:]
    saved = last_step(workdir)
    assert 3 <= saved < STEPS
    assert f"saved at step {saved}" in done.stdout
    assert "Traceback" not in done.stderr
    assert losses(workdir)[-1][0] == saved
    assert "--checkpoint=last" in refusal(commands.run("evaluate", f"--workdir={workdir}"))
    # A terminal that closes: nobody reads what is written, then the signal comes.
    process = commands.start(
        *given,
        clock,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # tests under nohup
    )
    for stream in (process.stdout, process.stderr):
        stream.close()
    process.stdout = process.stderr = None
    wait_for_step(process, workdir, 14)  # behind an evaluation, which writes a line
    assert end(process, signal.SIGHUP).returncode == 128 + signal.SIGHUP
    saved = last_step(workdir)
    assert 14 <= saved < STEPS
    assert f"resumed {workdir} at step {saved}" in commands.succeed(*given, clock)
    assert_same_state(workdir, finished_run, STEPS)
    assert losses(workdir) == losses(finished_run)
    first, early, *later = (x["step"] for x in metric_lines(workdir) if "eval/return" in x)
    assert (first, later) == (0, [STEPS])
    assert 3 < early < saved


# ---------------------------------------------------------------------- the folder


def test_a_config_that_is_missing_or_was_cut_is_refused(run_copy: Path) -> None:
    path = run_copy / "config.json"
    for content in (None, b'{"seed": 1'):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError, match=r"config\.json"):
            train.train(hotpotqa.get_config("tiny"), run_copy)
        assert (run_copy / "encoder" / "model.safetensors").exists()
        with pytest.raises(InputError, match=r"config\.json"):  # as evaluation reads it
            load_config(path)
        path.touch()


def test_what_a_killed_start_left_is_deleted_and_nothing_else(run_copy: Path) -> None:
    before, config = files(run_copy), hotpotqa.get_config("tiny")
    config.pqn.gamma = 0.5
    half = [
        run_copy / ".encoder-0a1b2c",
        run_copy / "checkpoints" / "last" / f"{STEPS + 4}.orbax-checkpoint-tmp",
    ]
    for folder in half:
        folder.mkdir()
        (folder / "part").write_text("x")
    # Not while they are being written.
    with whole_files.run_lock(run_copy), pytest.raises(InputError, match=str(run_copy)):
        train.train(config, run_copy)
    assert all(folder.exists() for folder in half)
    with pytest.raises(InputError, match=r"config\.pqn\.gamma"):
        train.train(config, run_copy)
    assert not any(folder.exists() for folder in half)
    assert {n: b for n, b in files(run_copy).items() if n != ".lock"} == {
        n: b for n, b in before.items() if n != ".lock"
    }


def test_a_damaged_newest_checkpoint_costs_its_steps_alone(
    commands: Commands, finished_run: Path, run_copy: Path
) -> None:
    flip_a_bit(run_copy / "checkpoints" / "last" / str(STEPS))
    result = commands.run("train", *SHARED, f"--workdir={run_copy}")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Traceback" not in result.stderr
    assert f"checkpoint {STEPS} is damaged" in result.stdout
    assert f"resumed {run_copy} at step {BEFORE_LAST}" in result.stdout
    assert_same_run(run_copy, finished_run)


def test_scoring_takes_no_damaged_checkpoint(
    run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (best,) = (run_copy / "checkpoints" / "best").iterdir()
    flip_a_bit(best)
    flip_a_bit(run_copy / "checkpoints" / "last" / str(STEPS))
    run = SavedRun.open(run_copy, load_config(run_copy / "config.json"))
    with pytest.raises(InputError, match="--checkpoint=last"):
        run.trained("best")
    assert run.trained("last")[1] == BEFORE_LAST
    assert f"checkpoint {STEPS} is damaged" in capsys.readouterr().out
    flip_a_bit(run_copy / "checkpoints" / "last" / str(BEFORE_LAST))
    with pytest.raises(InputError, match="damaged"):
        run.trained("last")


def test_a_run_may_be_shared_as_the_umask_says(finished_run: Path, commands: Commands) -> None:
    umask = os.umask(0o022)
    os.umask(umask)
    folders = [path for path in finished_run.rglob("*") if path.is_dir()]
    folders += [path for path in (commands.folder / "cache").rglob("*") if path.is_dir()]
    assert {path.name for path in folders} >= {"encoder", "tokens", "last"}
    for folder in folders:
        assert folder.stat().st_mode & 0o777 == 0o777 & ~umask, folder


def test_a_run_that_may_only_be_read(run_copy: Path, commands: Commands, tmp_path: Path) -> None:
    with disks.read_only(run_copy):
        with pytest.raises(InputError, match="--workdir"):
            train.train(hotpotqa.get_config("tiny"), run_copy)
        scoring = ("evaluate", f"--workdir={run_copy}", "--samples=2")
        assert "--out" in refusal(commands.run(*scoring))
        commands.succeed(*scoring, f"--out={tmp_path / 'scores'}")
