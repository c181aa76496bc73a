"""Runs a server and stops it when the trainer ends: python -I watchdog.py GRACE COMMAND …

It starts COMMAND. When standard input ends or the parent process is gone, for any reason, it stops
COMMAND and every process that COMMAND started. It runs in a separate process and uses only the
standard library, so that an error of the trainer does not affect it. It must lead a process group
(`start_new_session`), and COMMAND must stay in this group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

# prctl(2)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
LOOK_EVERY = 0.2  # seconds


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _reap(child: subprocess.Popen[bytes]) -> bool:
    """Waits for those that have ended, also for the command; whether any process is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)


def _stop(child: subprocess.Popen[bytes], grace: float) -> None:
    """Sends SIGTERM to all; if any is left after `grace` seconds, SIGKILL, also to itself."""
    os.killpg(0, signal.SIGTERM)
    end = time.monotonic() + grace
    while _reap(child):
        if time.monotonic() > end:
            print(f"watchdog: not stopped within {grace:g} s; killed", flush=True)
            os.killpg(0, signal.SIGKILL)
        time.sleep(LOOK_EVERY / 4)


def main(argv: list[str]) -> int:
    """Runs the command; returns its status if it ends, 0 if it has to be stopped."""
    grace, command, parent = float(argv[1]), argv[2:], os.getppid()
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: asked.append(number))
    # Orphans of the command become children of this process, so that it can wait for all.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(  # noqa: S603  (a list, no shell)
        command,
        stdin=subprocess.DEVNULL,
        # If this process is killed, its child is too. `preexec_fn` is safe without threads.
        preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    while _reap(child) and child.returncode is None:
        # A fork of the trainer may keep standard input open, so the parent is checked as well.
        ended = bool(select.select([0], [], [], LOOK_EVERY)[0])
        if ended or asked or os.getppid() != parent:
            _stop(child, grace)
            return 0
    print(f"watchdog: the server ended with status {child.returncode}", flush=True)
    _stop(child, min(grace, 5.0))  # processes that the command left behind
    status = child.returncode or 0
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv))
