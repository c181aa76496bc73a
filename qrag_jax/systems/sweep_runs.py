"""Trains and scores the runs of a sweep, each by the commands `train` and `evaluate`."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_json, locks, typed_json, whole_files
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.runtime.run import log
from qrag_jax.systems.sweep_plan import Plan, PlannedRun

DONE, FAILED = "done", "failed"
_TURN = 0.2  # seconds between looks at a command and at the signals
_TAIL = 65536  # bytes of a log in which its last line is looked for
_SHOWN = 300  # characters of that line
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)


@dataclasses.dataclass(frozen=True)
class RunState:
    """How a run ended.

    Attributes:
        status: `DONE` or `FAILED`.
        command: which one failed: "train" or "evaluate".
        exit: its status; below 0: the number of the signal that killed it.
        line: the last line that it wrote.
    """

    status: str
    command: str = ""
    exit: int = 0
    line: str = ""

    @property
    def told(self) -> str:
        """Why it failed."""
        how = f"exit {self.exit}" if self.exit >= 0 else f"killed by {_signal_name(-self.exit)}"
        return f"{self.command}: {how}: {self.line}"


@dataclasses.dataclass(frozen=True)
class SweepFolder:
    """The folder of a sweep: `sweep.json`, and a folder, a log and a state for each run."""

    path: Path

    def run(self, run: PlannedRun) -> Path:
        """The folder that `train` works in."""
        return self.path / run.name

    def log(self, run: PlannedRun) -> Path:
        """What the commands write, of all starts."""
        return self.path / f"{run.name}.log"

    def state(self, run: PlannedRun) -> RunState | None:
        """How the run ended; None: it has not.

        Raises:
            InputError: the file that says it is damaged.
        """
        path = self._state(run)
        try:
            return typed_json.made(RunState, bounded_json.load(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(
                f"{path} cannot be read ({whole_files.reason(error)}); delete it to run "
                f"{run.name} again."
            ) from None

    def keep(self, run: PlannedRun, state: RunState) -> None:
        """Writes the state."""
        text = json.dumps(dataclasses.asdict(state)) + "\n"
        whole_files.write_whole(self._state(run), text)

    def _state(self, run: PlannedRun) -> Path:
        return self.path / f"{run.name}.state.json"


def run_all(
    plan: Plan, folder: SweepFolder, runs: Sequence[PlannedRun], jobs: int, stop: StopSignal
) -> None:
    """Does the runs that are not done; those that failed are tried again.

    Args:
        jobs: how many are done at a time.

    Raises:
        Stopped: a signal came; runs in progress have saved, and go on from there.
        InputError: a run is being done by another process.
    """
    todo = []
    for run in runs:
        state = folder.state(run)
        if state is not None and state.status == DONE:
            log(f"{run.name}: done already")
        else:
            todo.append(run)
    with concurrent.futures.ThreadPoolExecutor(max(jobs, 1)) as pool:
        waiting = {pool.submit(_run_one, plan, folder, run, stop) for run in todo}
        try:
            while waiting:
                done, waiting = concurrent.futures.wait(
                    waiting, _TURN, concurrent.futures.FIRST_COMPLETED
                )
                for each in done:
                    each.result()
        except BaseException:
            stop.requested = True  # the others end, too, before the pool does
            raise
    stop.check()


def _run_one(plan: Plan, folder: SweepFolder, run: PlannedRun, stop: StopSignal) -> None:
    fix = "wait until it ends, or end it, or give another --out"
    lock = folder.path / f".{run.name}.lock"
    if stop.requested:
        return
    with locks.held(lock, f"{run.name} is being run", fix, "--out"):
        state = folder.state(run)
        if state is not None and state.status == DONE:
            return
        where = f"--workdir={folder.run(run)}"
        scoring = [where, f"--samples={plan.samples}"]
        if plan.checkpoint:
            scoring.append(f"--checkpoint={plan.checkpoint}")
        for command, words in (("train", [*plan.words(run), where]), ("evaluate", scoring)):
            log(f"{run.name}: {command}")
            status, line = _command(command, words, folder.log(run), stop)
            if stop.requested and status in (*_STOPPED, *(-each for each in stop.signals)):
                log(f"{run.name}: stopped; {line}")
                return
            if status:
                state = RunState(FAILED, command, status, line)
                folder.keep(run, state)
                log(f"{run.name}: failed, {state.told}")
                return
        folder.keep(run, RunState(DONE))
        log(f"{run.name}: done")


def _command(
    command: str, words: Sequence[str], log_path: Path, stop: StopSignal
) -> tuple[int, str]:
    """Runs a command to its end; returns its status and its last line.

    A stop is passed on once, as SIGTERM: the command saves and ends.
    """
    with log_path.open("ab") as file:
        begins = file.tell()
        process = subprocess.Popen(  # noqa: S603  a list of arguments, no shell
            [sys.executable, "-m", f"qrag_jax.{command}", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
        )
        told = False
        while True:
            try:
                status = process.wait(_TURN)
                break
            except subprocess.TimeoutExpired:
                if stop.requested and not told:
                    told = True
                    process.send_signal(signal.SIGTERM)
    return status, _last_line(log_path, begins)


def _last_line(path: Path, begins: int) -> str:
    """The last error, or else the last line, of what stands in the file from there on."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(begins, size - _TAIL))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.replace("\r", "\n").split("\n") if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    found = [*lines[-1:], *errors[-1:]]
    return found[-1][:_SHOWN] if found else "it wrote nothing"


def stopped_line(folder: SweepFolder, runs: Sequence[PlannedRun], why: Stopped) -> str:
    """What to do after a stop."""
    states = [folder.state(run) for run in runs]
    done = sum(state is not None and state.status == DONE for state in states)
    return f"{why}: stopped, {done} of {len(runs)} runs are done; give the same command to go on."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
