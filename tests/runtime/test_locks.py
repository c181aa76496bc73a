"""Locks: one process at a time, told who it is, and none left by a kill."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime import locks

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import pathlib, sys
from qrag_jax.runtime import locks
with locks.run_lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    """Another process that holds a lock until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with holder(run) as process:
        holding = f"process {process.pid} on {socket.gethostname()}"
        with pytest.raises(InputError, match=holding), locks.run_lock(run):
            pass
        with locks.log_locks(run / "eval" / "log.jsonl"):  # scoring meanwhile is possible
            pass
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        with locks.run_lock(run):
            assert locks.is_held(run / ".lock")
    assert not locks.is_held(run / ".lock")
    assert (run / ".lock").read_bytes() == b""  # nothing that changes is left in a run's folder


def test_a_log_is_locked_and_others_are_not(tmp_path: Path) -> None:
    log = tmp_path / "eval" / "log.jsonl"
    with locks.log_locks(log, log.with_name("single_step_log.jsonl")):
        with pytest.raises(InputError, match="--out"), locks.log_locks(log):
            pass
        with locks.log_locks(log.with_name("other.jsonl")):
            pass
        assert not log.exists()
    with locks.log_locks(log):
        pass


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)  # as an NFS mounted with "nolock" may do
    with locks.run_lock(tmp_path):
        told = capsys.readouterr().out
    assert "has no locks" in told
