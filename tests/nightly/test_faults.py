"""Kills, full disks and damaged checkpoints, over short runs of every system: `make nightly`.

After each disturbance the same command is given again. The run must end with the parameters, the
optimizer's state, the key and the log of a run that was never disturbed, to the last bit, and no
process may be left behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import disks
from tests.entry_points import ROOT, assert_same_state, free_address, metric_lines

pytestmark = pytest.mark.nightly

KILLS = 6  # of each course
PATIENCE, ORPHANS = 600.0, 30.0  # seconds for a run to end; for what a killed one leaves behind
# Rates, and what has been counted since the start of a run that goes on.
OF_START = (
    *("speed/", "searches", "kept_search_share", "turns_per_batch", "failed_episodes"),
    *("failed_tries", "broken_episodes"),
)


@dataclasses.dataclass(frozen=True)
class Course:
    """A short run of a system.

    Attributes:
        fields: of the command line.
        steps: of the whole run.
        hosts: processes that train together.
        victim: the number of the host that is killed; -1: a data worker of the first one.
    """

    fields: tuple[str, ...]
    steps: int
    hosts: int = 1
    victim: int = 0


def course(config: str, steps: int, *fields: str, **more: Any) -> Course:
    return Course((f"--config=configs/{config}", *(f"--config.{f}" for f in fields)), steps, **more)


OFTEN = ("train.log_every=1", "train.checkpoint_every=2")
Q_RAG = ("quickstart.py:tiny", 20, "train.steps=20", "train.eval_every=8", *OFTEN)
COURSES = {
    "Q-RAG": course(*Q_RAG),
    "Q-RAG, a data worker": course(*Q_RAG, "data.workers=1", victim=-1),
    "Q-RAG, the first of two hosts": course(*Q_RAG, hosts=2, victim=0),
    "Q-RAG, the second of two hosts": course(*Q_RAG, hosts=2, victim=1),
    "HARR": course("harr_grpo.py:tiny", 10, "train.steps=10", "train.eval_every=4", *OFTEN),
    "RLVR": course("rlvr.py:tiny", 10, *OFTEN),
    "LeReT": course("leret.py:tiny", 46, "iterations=1", *OFTEN),
    "DeepRetrieval": course("deepretrieval.py:tiny", 10, "script.steps=6", *OFTEN),
}


class Started:
    """The processes of a run, one for each host, each the leader of a session."""

    def __init__(self, course: Course, workdir: Path, programs: Path) -> None:
        self.began, self.course = time.monotonic(), course
        self._logs = [workdir.with_suffix(f".{n}.log") for n in range(course.hosts)]
        address = free_address()
        command = [sys.executable, "-m", "qrag_jax.train", *course.fields, f"--workdir={workdir}"]
        own = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(programs)}
        self.processes = []
        for number, log in enumerate(self._logs):
            hosts = [f"--hosts={address},{course.hosts},{number}"] if course.hosts > 1 else []
            with log.open("wb") as file:
                self.processes.append(
                    subprocess.Popen(
                        [*command, *hosts],
                        cwd=ROOT,
                        env=os.environ | own,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # so that what it leaves behind can be found
                    )
                )

    def statuses(self) -> list[int]:
        """Exit statuses; waits for the ends."""
        try:
            return [process.wait(PATIENCE) for process in self.processes]
        finally:
            self.end()

    def log(self) -> str:
        """All logs, one after the other."""
        return "\n".join(log.read_text(errors="replace") for log in self._logs)

    def kill(self) -> bool:
        """Kills the victim; whether it was alive."""
        process = self.processes[max(self.course.victim, 0)]
        if process.poll() is not None:
            return False
        pid = process.pid
        if self.course.victim < 0:
            workers = [each for each in session(pid) if each != pid]
            if not workers:
                return False
            pid = max(workers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    def end(self) -> None:
        """Ends all that is left."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def session(leader: int) -> list[int]:
    """The processes of a session that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # After the name, which may hold blanks: state, parent, group, session.
                state, _, _, own = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(own) == leader and state not in "ZX":
                    found.append(int(entry.name))
    return found


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def last_step(workdir: Path) -> int:
    return max((row["step"] for row in metric_lines(workdir) if "train/loss" in row), default=0)


def finish(course: Course, workdir: Path, programs: Path) -> float:
    """Runs a course to its end; its seconds."""
    run = Started(course, workdir, programs)
    assert not any(run.statuses()), run.log()
    return time.monotonic() - run.began


def assert_same(course: Course, workdir: Path, reference: Path) -> None:
    assert_same_state(workdir, reference, course.steps)
    rows, expected = (
        [
            {name: value for name, value in row.items() if not name.startswith(OF_START)}
            for row in metric_lines(each)
            if "speed/time_to_first_step" not in row
        ]
        for each in (workdir, reference)
    )
    assert rows == expected


@pytest.fixture(scope="module", params=COURSES)
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Course, Path, Path, float]:
    """A course, its run that nothing disturbs, its compiled programs, and its seconds."""
    course, folder = COURSES[request.param], tmp_path_factory.mktemp("undisturbed")
    finish(course, folder / "first", folder / "programs")
    # Now all programs are compiled, as when a run goes on.
    seconds = finish(course, folder / "run", folder / "programs")
    return course, folder / "run", folder / "programs", seconds


def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    undisturbed: tuple[Course, Path, Path, float], tmp_path: Path
) -> None:
    course, reference, programs, seconds = undisturbed
    draw = random.Random(20)
    for number in range(KILLS):
        workdir = tmp_path / str(number)
        run = Started(course, workdir, programs)
        # Once in three before the first step, else in any step or behind it.
        if number % 3:
            step = draw.randint(1, course.steps - 1)
            ended = run.processes[0]
            wait_until(lambda: last_step(workdir) >= step or ended.poll() is not None, PATIENCE)  # noqa: B023
            time.sleep(draw.uniform(0.0, 0.5))
        else:
            time.sleep(draw.uniform(0.1, 0.7) * seconds)
        if run.kill():
            # The others of a killed process end by themselves.
            ended = wait_until(lambda: all(p.poll() is not None for p in run.processes), PATIENCE)  # noqa: B023
            assert ended, "a process hangs"
            left = wait_until(lambda: not any(session(p.pid) for p in run.processes), ORPHANS)  # noqa: B023
            assert left, "processes are left behind"
        run.end()
        finish(course, workdir, programs)
        assert_same(course, workdir, reference)
        shutil.rmtree(workdir)


def test_a_run_on_a_full_disk_ends_in_a_sentence_and_goes_on(
    undisturbed: tuple[Course, Path, Path, float], tmp_path: Path
) -> None:
    """Files that may grow to a limit, where a write fails as on a full disk; a read-only folder."""
    course, reference, programs, _ = undisturbed
    if course not in (COURSES["Q-RAG"], COURSES["RLVR"]):
        pytest.skip("files are written in the same way")
    workdir = tmp_path / "run"
    for limit in (2_000, 20_000, 200_000):
        run = Started(course, workdir, programs)
        resource.prlimit(run.processes[0].pid, resource.RLIMIT_FSIZE, (limit, limit))
        assert_refused(run)
    with disks.read_only(workdir):
        assert_refused(Started(course, workdir, programs))
    finish(course, workdir, programs)
    assert_same(course, workdir, reference)


def assert_refused(run: Started) -> None:
    """A run that cannot write ends with status 1 or 2 and one sentence, or is not disturbed."""
    (status,), log = run.statuses(), run.log()
    assert status in (0, 1, 2), log
    assert "Traceback" not in log
    assert not status or log.count("error: ") == 1, log


def test_a_damaged_checkpoint_is_left_for_the_one_before(
    undisturbed: tuple[Course, Path, Path, float], tmp_path: Path
) -> None:
    course, reference, programs, _ = undisturbed
    draw, workdir = random.Random(20), tmp_path / "run"
    shutil.copytree(reference, workdir)
    newest = workdir / "checkpoints" / "last" / str(course.steps)
    damaged = draw.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    run = Started(course, workdir, programs)
    assert not any(run.statuses()), run.log()
    assert str(damaged.name) in run.log()
    assert "taking step" in run.log()
    assert_same(course, workdir, reference)
