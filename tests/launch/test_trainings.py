"""Real trainings of two processes each, started by the scripts of `launch/`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.entry_points import ROOT, Commands, losses
from tests.launch.scripts import LAUNCH, program
from tests.launch.test_slurm import SRUN

pytestmark = pytest.mark.long

STEPS, EVERY = 30, 5
LIMIT = 900  # seconds; some 30 on a machine that does nothing else
FLAGS = (
    "--config=configs/quickstart.py:tiny",
    f"--config.train.steps={STEPS}",
    f"--config.train.checkpoint_every={EVERY}",
    f"--config.train.eval_every={STEPS}",
    "--config.train.log_every=1",
)
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(commands: Commands) -> Iterator[Start]:
    """Starts a script with a training as its command; what a test leaves running is stopped."""
    processes: list[subprocess.Popen[str]] = []

    def started(*words: str | Path, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**commands.environment, **environment},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        processes.append(process)
        return process

    yield started
    for process in processes:
        process.terminate()
        process.communicate()


def training(workdir: Path, *more: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "qrag_jax.train", *FLAGS, f"--workdir={workdir}", *more)


def end(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=LIMIT)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for_step(process: subprocess.Popen[str], workdir: Path, step: int) -> None:
    until = time.monotonic() + LIMIT
    while not (steps := losses(workdir)) or steps[-1][0] < step:
        assert process.poll() is None, end(process)
        assert time.monotonic() < until
        time.sleep(0.02)


def trainer(workdir: Path, number: int) -> int:
    """The process that trains there as this number of two."""
    # -ww: whole lines, also where readline has put a width into the environment.
    listed = subprocess.run(["ps", "axww", "-o", "pid=,args="], capture_output=True, text=True)
    (found,) = [
        int(line.split()[0])
        for line in listed.stdout.splitlines()
        if f"--workdir={workdir} " in line and line.endswith(f",2,{number}")
    ]
    return found


def test_after_a_kill_both_start_again_and_train_to_the_end(start: Start, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    process = start(LAUNCH / "local.sh", "2", *training(workdir), RESTARTS="1", GRACE="20")
    wait_for_step(process, workdir, 3 * EVERY)
    os.kill(trainer(workdir, 1), signal.SIGKILL)
    told = end(process)
    assert told.returncode == 0, told.stderr[-3000:]
    assert [step for step, _ in losses(workdir)] == list(range(1, STEPS + 1))


def test_slurm_tells_the_tasks_where_they_are(start: Start, tmp_path: Path) -> None:
    """`--hosts=auto`, from the variables that srun sets; srun itself is a stand-in."""
    program(tmp_path / "bin" / "srun", SRUN)
    (tmp_path / "launch").symlink_to(LAUNCH)
    script = shutil.copy(LAUNCH / "slurm.sbatch", tmp_path)
    given = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "QRAG_PYTHON": sys.executable,
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NUM_NODES": "1",
    }
    workdir = tmp_path / "run"
    told = end(start("bash", script, *training(workdir)[3:], **given))
    assert told.returncode == 0, told.stderr[-3000:]
    assert [step for step, _ in losses(workdir)] == list(range(1, STEPS + 1))
