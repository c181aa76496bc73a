"""Small files written whole: on a full disk, killed midway, seen by others as the umask says."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from qrag_jax.runtime import whole_files
from tests.disks import fill

ROOT = Path(__file__).resolve().parents[2]


def test_the_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "config.json"
    whole_files.write_whole(path, "one é")
    whole_files.write_whole(path, "two é")
    assert path.read_bytes() == "two é".encode()
    assert [p.name for p in path.parent.iterdir()] == ["config.json"]


def test_a_full_disk_leaves_the_old_file(full_disk: Path) -> None:
    path = full_disk / "config.json"
    whole_files.write_whole(path, "old")
    fill(full_disk)
    with pytest.raises(OSError) as error:
        whole_files.write_whole(path, "new" * 10_000)
    assert whole_files.disk_is_full(error.value)
    assert path.read_text() == "old"
    assert sorted(p.name for p in full_disk.iterdir()) == ["config.json", "filler"]


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
    assert left.name.startswith(".config.json.")
    assert left.name.endswith(whole_files.PARTIAL)


# ---------------------------------------------------------------------- what a full disk says


def by_numpy(disk: Path) -> None:
    np.save(disk / "array.npy", np.zeros(10**6))  # an OSError without a number


def by_safetensors(disk: Path) -> None:
    save_file({"a": np.zeros(10**6)}, disk / "model.safetensors")


def by_sqlite(disk: Path) -> None:
    connection = sqlite3.connect(disk / "answers.sqlite")
    try:
        connection.execute("CREATE TABLE answers (answer BLOB)")
        connection.execute("INSERT INTO answers VALUES (?)", (bytes(4 << 20),))
        connection.commit()
    finally:
        connection.close()


def by_tensorstore(disk: Path) -> None:
    import tensorstore

    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(disk / "array")}}
    made = tensorstore.open(spec, create=True, dtype=tensorstore.float32, shape=[10**6]).result()
    made.write(np.random.default_rng(0).normal(size=10**6).astype(np.float32)).result()


@pytest.mark.parametrize("write", [by_numpy, by_safetensors, by_sqlite, by_tensorstore])
def test_a_full_disk_is_told_from_other_errors(write, full_disk: Path) -> None:
    with pytest.raises(Exception) as error:
        write(full_disk)
    assert getattr(error.value, "errno", None) is None
    assert whole_files.disk_is_full(error.value)
    assert "\n" not in whole_files.reason(error.value)
