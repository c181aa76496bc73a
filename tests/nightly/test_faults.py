"""Kills at random moments and full disks, over short runs of every system: `make nightly`.

After each disturbance the same command is given again. The run must end with the parameters, the
optimizer's state, the key and the log of a run that was never disturbed, to the last bit, and no
process may be left behind.
"""

from __future__ import annotations

import contextlib
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
from typing import NamedTuple

import pytest

from tests import entry_points
from tests.entry_points import ROOT, assert_same_run, free_address, losses

pytestmark = pytest.mark.nightly

KILLS = 6  # of each course
PATIENCE, ORPHANS = 600.0, 30.0  # seconds for a run to end; for what a killed one leaves behind


class Course(NamedTuple):
    """The short run of a system, of one host or several."""

    system: str
    hosts: int = 1
    victim: int = 0  # the host that is killed; -1: a data worker of the first one

    @property
    def fields(self) -> tuple[str, ...]:
        workers = ("--config.data.workers=1",) if self.victim < 0 else ()
        return (*entry_points.COURSES[self.system].fields, *workers)

    @property
    def steps(self) -> int:
        return entry_points.COURSES[self.system].steps


COURSES = [Course(system) for system in entry_points.COURSES]
COURSES += [Course("q_rag", victim=-1), Course("q_rag", 2, 0), Course("q_rag", 2, 1)]


class Started:
    """The processes of a run, one for each host, each the leader of a session."""

    def __init__(self, course: Course, workdir: Path, programs: Path) -> None:
        self.began, self.course = time.monotonic(), course
        self._log, address = workdir.with_suffix(".log"), free_address()
        command = [sys.executable, "-m", "qrag_jax.train", *course.fields, f"--workdir={workdir}"]
        own = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(programs)}
        alone = course.hosts == 1
        hosts = [f"--hosts={address},{course.hosts},{number}" for number in range(course.hosts)]
        with self._log.open("wb") as file:
            self.processes = [
                subprocess.Popen(
                    command if alone else [*command, of_host],
                    cwd=ROOT,
                    env=os.environ | own,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that what it leaves behind can be found
                )
                for of_host in hosts
            ]

    def statuses(self) -> list[int]:
        try:
            return [process.wait(PATIENCE) for process in self.processes]
        finally:
            self.end()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> bool:
        """Kills the victim; whether it was alive."""
        pid = self.processes[max(self.course.victim, 0)].pid
        alive = session(pid)
        if self.course.victim < 0:
            pid = max((each for each in alive if each != pid), default=0)
        if pid not in alive:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True

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


def finish(course: Course, workdir: Path, programs: Path) -> float:
    """Runs a course to its end; its seconds."""
    run = Started(course, workdir, programs)
    assert not any(run.statuses()), run.log()
    return time.monotonic() - run.began


@pytest.fixture(scope="module", params=COURSES, ids=str)
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Course, Path, Path, float]:
    """A course, its run that nothing disturbed, its compiled programs, and its seconds."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(request.param, folder / "first", folder / "programs")
    # Now all programs are compiled, as when a run goes on.
    seconds = finish(request.param, folder / "run", folder / "programs")
    return request.param, folder / "run", folder / "programs", seconds


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

            def is_there(workdir: Path = workdir, step: int = step, run: Started = run) -> bool:
                done = any(logged >= step for logged, _ in losses(workdir))
                return done or run.processes[0].poll() is not None

            wait_until(is_there, PATIENCE)
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
        assert_same_run(workdir, reference, course.steps)
        shutil.rmtree(workdir)


def test_a_run_on_a_full_disk_ends_in_a_sentence_and_goes_on(
    undisturbed: tuple[Course, Path, Path, float], tmp_path: Path
) -> None:
    """Files that may grow to a limit, where a write fails as on a full disk."""
    course, reference, programs, _ = undisturbed
    if course not in (Course("q_rag"), Course("rlvr")):
        pytest.skip("files are written in the same way")
    workdir = tmp_path / "run"
    for limit in (2_000, 20_000, 200_000):
        run = Started(course, workdir, programs)
        resource.prlimit(run.processes[0].pid, resource.RLIMIT_FSIZE, (limit, limit))
        (status,), log = run.statuses(), run.log()
        assert status in (0, 1, 2), log  # 0: it wrote no file of this size
        assert "Traceback" not in log
        assert not status or log.count("error: ") == 1, log
    finish(course, workdir, programs)
    assert_same_run(workdir, reference, course.steps)
