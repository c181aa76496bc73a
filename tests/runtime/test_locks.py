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
from qrag_jax.runtime import leftovers, locks

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


# ---------------------------------------------------------------------- what killed processes left


def test_a_run_is_cleaned_of_what_is_half_made(tmp_path: Path) -> None:
    made = ["encoder", "checkpoints/last/4", "checkpoints/best/2"]
    half = [".encoder-1a2b", "checkpoints/last/8.orbax-checkpoint-tmp"]
    for name in (*made, *half):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".config.json.123.partial").write_text("{")
    told: list[str] = []
    leftovers.clean_run(tmp_path, told.append)
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {"config.json", *(f"{name}/file" for name in made)}
    assert len(told) == 3


PUBLISH = """
import pathlib, sys
from qrag_jax.llm.server.publish import Publisher
publisher = Publisher("http://127.0.0.1:1/v1", "m", folder=pathlib.Path(sys.argv[1]))
(publisher._folder / "model.safetensors").write_bytes(bytes(100))
print("made", flush=True)
sys.stdin.read()
"""


def test_weights_of_a_killed_process_are_deleted_and_no_others(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    processes = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", PUBLISH, str(memory)],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        processes.append((process, set(memory.iterdir())))
    (living, first), (killed, both) = processes
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert set(memory.iterdir()) == both
    (memory / "qrag-weights-not-ours").mkdir()  # without a lock: nobody knows whose it is
    told: list[str] = []
    leftovers.clean_weights(memory, told.append)
    assert set(memory.iterdir()) == first | {memory / "qrag-weights-not-ours"}
    assert len(told) == 1
    with leftovers.weights_folder(memory) as folder:
        leftovers.clean_weights(memory, told.append)
        assert folder.is_dir()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    living.communicate(timeout=60)
