"""Files written whole, read within limits, locked, and cleaned after a kill; kept vectors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from qrag_jax.data.records import read_text
from qrag_jax.errors import InputError
from qrag_jax.learners.state import encoder_key
from qrag_jax.metrics.row_log import RETRIEVALS
from qrag_jax.runtime import whole_files
from qrag_jax.runtime.whole_files import check_links
from tests.entry_points import ROOT

MIB = 2**20


def test_a_full_disk_leaves_the_old_file(full_disk: Path) -> None:
    path = full_disk / "new" / "config.json"
    for text in ("one é", "two é"):
        whole_files.write_whole(path, text)
    with contextlib.suppress(OSError), (full_disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    with pytest.raises(OSError) as error:
        whole_files.write_whole(path, "new" * 10_000)
    assert whole_files.disk_is_full(error.value)
    assert path.read_bytes() == "two é".encode()
    assert [p.name for p in path.parent.iterdir()] == ["config.json"]


def test_a_kill_midway_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    whole_files.write_whole(path, "old")
    code = (
        "import os, pathlib, signal, sys; from qrag_jax.runtime import whole_files as files\n"
        "with files.replacing(pathlib.Path(sys.argv[1])) as file:\n"
        "    file.write(b'half of the new'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    (left,) = (p for p in tmp_path.iterdir() if p != path)
    assert re.fullmatch(rf"\.config\.json\..*{re.escape(whole_files.PARTIAL)}", left.name)


# ---------------------------------------------------------------------- what a full disk says


def by_safetensors(disk: Path) -> None:
    save_file({"a": np.zeros(10**6)}, disk / "model.safetensors")


def by_sqlite(disk: Path) -> None:
    with contextlib.closing(sqlite3.connect(disk / "answers.sqlite")) as connection:
        connection.execute("CREATE TABLE answers (answer BLOB)")
        connection.execute("INSERT INTO answers VALUES (?)", (bytes(4 << 20),))
        connection.commit()


@pytest.mark.parametrize("write", [by_safetensors, by_sqlite])
def test_a_full_disk_is_recognised(write, full_disk: Path) -> None:
    with pytest.raises(Exception) as error:
        write(full_disk)
    assert getattr(error.value, "errno", None) is None
    assert whole_files.disk_is_full(error.value)
    assert "\n" not in whole_files.reason(error.value)


# ---------------------------------------------------------------------- foreign files


@pytest.mark.parametrize("name", ["a.txt.gz", "log"])
def test_what_has_no_end_is_refused_and_a_part_is_read(name: str, tmp_path: Path) -> None:
    """The real limits; of records: tests/test_mutated_inputs.py."""
    path = tmp_path / name
    if name == "log":
        with path.open("wb") as file:
            file.truncate(300 * MIB)  # zeros that take no room on the disk
    else:
        path.write_bytes(gzip.compress(b" " * MIB) * 150)
    read = RETRIEVALS.read_partial if name == "log" else read_text
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="64 MiB"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 200 * MIB
    finally:
        tracemalloc.stop()


def test_links_out_of_a_folder_are_refused_and_others_followed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for path in ("folder/a", "folder/inner/b", "folder-of-another/secret"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("text")
    (folder / "b").symlink_to("a")
    (folder / "c").symlink_to(folder / "a")
    (tmp_path / "link").symlink_to(folder)
    check_links(folder)
    check_links(tmp_path / "link")
    for name, target in (
        ("passages.jsonl", "../folder-of-another/secret"),  # begins like the folder's own name
        ("inner/deep", "/etc"),
        ("circle", "circle"),
    ):
        (folder / name).symlink_to(target)
        with pytest.raises(InputError, match=name):
            check_links(folder)
        (folder / name).unlink()


# ---------------------------------------------------------------------- locks


def test_a_run_and_its_logs_are_locked_each_by_itself(tmp_path: Path) -> None:
    log = tmp_path / "run" / "eval" / "log.jsonl"
    with whole_files.run_lock(tmp_path / "run"):
        holding = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(InputError, match=holding), whole_files.run_lock(tmp_path / "run"):
            pass
        # Scoring meanwhile is possible.
        with whole_files.log_locks(log, log.with_name("single_step_log.jsonl")):
            with pytest.raises(InputError, match="--out"), whole_files.log_locks(log):
                pass
            with whole_files.log_locks(log.with_name("other.jsonl")):
                pass
            assert not log.exists()
    with whole_files.run_lock(tmp_path / "run"), whole_files.log_locks(log):
        pass
    assert (tmp_path / "run" / ".lock").read_bytes() == b""  # nothing that changes is left


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)  # as an NFS mounted with "nolock" may do
    with whole_files.run_lock(tmp_path):
        assert "no locks" in capsys.readouterr().out


# ---------------------------------------------------------------------- what killed processes left


DIES = """
import os, pathlib, signal, sys
from qrag_jax.runtime.whole_files import weights_folder
with weights_folder(pathlib.Path(sys.argv[1])) as folder:
    (folder / "model.safetensors").write_bytes(bytes(100))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_weights_of_a_killed_process_are_deleted_and_no_others(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    done = subprocess.run([sys.executable, "-c", DIES, str(memory)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert len([*memory.iterdir()]) == 1
    (memory / "qrag-weights-not-ours").mkdir()  # without a lock: nobody knows whose it is
    with whole_files.weights_folder(memory) as living:
        whole_files.clean_weights(memory)
        assert {*memory.iterdir()} == {living, memory / "qrag-weights-not-ours"}
        assert living.stat().st_mode & 0o777 == 0o700
    assert not living.exists()


def test_encoder_key_differs_between_encoders() -> None:
    kernel = np.arange(6, dtype=np.float32)
    usual = ("kernel", (2, 3), 1.0, 10)
    others = [("bias", *usual[1:]), ("kernel", (3, 2), 1.0, 10), ("kernel", (2, 3), 2.0, 10)]
    keys = {
        encoder_key({"layer": {name: scale * kernel.reshape(shape)}}, {"row_tokens": tokens})
        for name, shape, scale, tokens in (usual, usual, *others, (*usual[:3], 11))
    }
    assert len(keys) == 5
