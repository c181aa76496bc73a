"""One round of the suite `faults`: a short run is disturbed, given again, and compared.

A run must end as if nothing had happened: the same parameters, optimizer state and key to the last
bit, each step once in the log, with the same numbers. After a kill none of its processes is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.entry_points import ROOT, metric_lines, saved_state

PATIENCE = 300.0  # seconds for a run to end
ORPHANS = 30.0  # seconds for the other processes of a killed one to end
TRAINER, WORKER = "trainer", "data worker"
# Rates, and what has been counted since the start of a run that goes on.
OF_START = (
    *("speed/", "searches", "kept_search_share", "turns_per_batch", "failed_episodes"),
    *("failed_tries", "broken_episodes"),
)


@dataclasses.dataclass(frozen=True)
class Course:
    """A short run of a system.

    Attributes:
        name: shown.
        given: the command's words.
        steps: of the whole run.
        hosts: processes that train together.
        victim: which process of which host is killed: "trainer", "data worker", or "host 1".
    """

    name: str
    given: tuple[str, ...]
    steps: int
    hosts: int = 1
    victim: str = TRAINER


class Started:
    """The processes of a run, one for each host.

    Args:
        more: further environment.
    """

    def __init__(
        self, course: Course, workdir: Path, programs: Path, more: Mapping[str, str] | None = None
    ) -> None:
        self.began = time.monotonic()
        self._logs = [workdir.with_suffix(f".{n}.log") for n in range(course.hosts)]
        words = [sys.executable, "-m", "qrag_jax.train", *course.given, f"--workdir={workdir}"]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(programs),
            **(more or {}),
        }
        address = _free_address()
        self.processes = []
        for number, log in enumerate(self._logs):
            hosts = [f"--hosts={address},{course.hosts},{number}"] if course.hosts > 1 else []
            with log.open("wb") as file:
                self.processes.append(
                    subprocess.Popen(  # noqa: S603
                        [*words, *hosts],
                        cwd=ROOT,
                        env=environment,
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

    def said(self) -> str:
        """The last lines of all logs."""
        return "\n".join(log.read_text(errors="replace")[-2000:] for log in self._logs)

    def kill(self, victim: str) -> bool:
        """Kills a process; whether there was one."""
        number = int(victim.split()[1]) if victim.startswith("host ") else 0
        pid = self.processes[number].pid
        if self.processes[number].poll() is not None:
            return False
        if victim == WORKER:
            workers = [each for each in _session(pid) if each != pid]
            if not workers:
                return False
            pid = max(workers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    def orphans(self) -> int:
        """Processes that are left behind, after a while."""
        until = time.monotonic() + ORPHANS
        while left := [each for process in self.processes for each in _session(process.pid)]:
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        return len(left)

    def end(self) -> None:
        """Ends all that is left."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def whole(course: Course, workdir: Path, programs: Path) -> tuple[str, float]:
    """Runs a course to its end; what went wrong, or "", and its seconds."""
    run = Started(course, workdir, programs)
    statuses = run.statuses()
    seconds = time.monotonic() - run.began
    return ("" if not any(statuses) else f"status {statuses}: {run.said()}"), seconds


class Moment(NamedTuple):
    """When a process is killed.

    Attributes:
        step: after the log has this step; 0: before the first one.
        seconds: since then, or since the start.
    """

    step: int
    seconds: float


def killed(course: Course, workdir: Path, programs: Path, moment: Moment) -> tuple[str, str] | None:
    """Kills a run at a moment.

    Returns:
        What went wrong, or ""; where the run was. None: the run had ended before.
    """
    run = Started(course, workdir, programs)
    while moment.step > max(_steps(workdir), default=0) and run.processes[0].poll() is None:
        time.sleep(0.01)
    time.sleep(moment.seconds)
    if not run.kill(course.victim):
        statuses = run.statuses()
        return None if not any(statuses) else (f"status {statuses}: {run.said()}", "")
    # The others of a killed process end by themselves.
    until, ended = time.monotonic() + ORPHANS + PATIENCE, False
    while not (ended := all(p.poll() is not None for p in run.processes)):
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    wrong = "" if ended else "a process hangs"
    if ended and (left := run.orphans()):
        wrong = f"{left} processes are left behind"
    run.end()
    steps = _steps(workdir)
    return wrong, f"after step {steps[-1]}" if steps else "before the first step"


def _steps(workdir: Path) -> list[int]:
    return [line["step"] for line in metric_lines(workdir) if "train/loss" in line]


def differs(course: Course, workdir: Path, reference: Path) -> str:
    """What differs between two runs that have ended; "" if nothing does."""
    state, wanted = saved_state(workdir, course.steps), saved_state(reference, course.steps)
    if state.keys() != wanted.keys():
        return "other arrays"
    for name, array in wanted.items():
        if state[name].dtype != array.dtype or not np.array_equal(state[name], array):
            return f"{name} has other numbers"
    mine, theirs = (_lines(each) for each in (workdir, reference))
    if [line["step"] for line in mine] != [line["step"] for line in theirs]:
        return f"steps {[line['step'] for line in mine]} in the log"
    for one, other in zip(mine, theirs, strict=True):
        for name in one.keys() | other.keys():
            if not name.startswith(OF_START) and one.get(name) != other.get(name):
                return f"step {one['step']}: {name} is {one.get(name)}, not {other.get(name)}"
    return ""


def _lines(workdir: Path) -> Sequence[Mapping[str, float]]:
    found = metric_lines(workdir)
    return [line for line in found if "speed/time_to_first_step" not in line]


def _session(leader: int) -> list[int]:
    """The processes of a session that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # After the name, which may hold blanks: state, parent, group, session.
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and state not in "ZX":
                    found.append(int(entry.name))
    return found


def _free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"
