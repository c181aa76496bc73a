"""Locks: one process at a time, told who it is, and none left by a kill."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime import locks
from qrag_jax.runtime.locks import run_lock
from tests.disks import fill

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import pathlib, sys
from qrag_jax.runtime import locks
with getattr(locks, sys.argv[1])(pathlib.Path(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(kind: str, path: Path) -> subprocess.Popen[str]:
    """Another process that holds a lock until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, kind, str(path)],
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
    with holder("run_lock", run) as process:
        with pytest.raises(InputError) as error, locks.run_lock(run):
            pass
        assert str(error.value) == (
            f"{run} is being trained by process {process.pid} on {socket.gethostname()}; wait "
            f"until it ends, or end it, or give another --workdir than {run}."
        )
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
        with (
            pytest.raises(
                InputError, match=r"log.jsonl is being written by process \d+ on"
            ) as error,
            locks.log_locks(log),
        ):
            pass
        assert "give another --out." in str(error.value)
        with locks.log_locks(log.with_name("other.jsonl")):
            pass
        assert not log.exists()
    with locks.log_locks(log):
        pass


def test_on_a_full_disk_the_lock_holds_unsigned(full_disk: Path) -> None:
    run = full_disk / "run"
    run.mkdir()
    (run / ".lock").touch()
    fill(full_disk)
    with (
        locks.run_lock(run),
        pytest.raises(InputError, match="trained by another process;"),
        run_lock(run),
    ):
        pass


def test_a_child_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A language model's server may outlive the training that started it."""
    with locks.run_lock(tmp_path):
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False
        )
    with child:
        deadline = time.monotonic() + 20  # the kernel closes its copy soon after its start
        while locks.is_held(tmp_path / ".lock") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert child.poll() is None
        assert not locks.is_held(tmp_path / ".lock")
        child.kill()


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)  # as an NFS mounted with "nolock" may do
    with locks.run_lock(tmp_path):
        told = capsys.readouterr().out
    assert told == (
        f"note: the file system of {tmp_path} has no locks (No locks available); see to it that "
        "no second process writes there\n"
    )


def test_a_folder_that_cannot_be_written_is_told_with_the_flag(read_only: Path) -> None:
    with pytest.raises(InputError) as error, locks.run_lock(read_only):
        pass
    assert str(error.value) == (
        f"{read_only} cannot be written (Read-only file system); give another --workdir."
    )
    with pytest.raises(InputError, match=r"cannot be written .*; give another --out\."):
        locks.log_locks(read_only / "eval" / "log.jsonl").__enter__()
