"""What a machine may lack: mounts of file systems, real data, a Python with verifiers."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The Python that has verifiers, if there is one: `make verifiers`.
PACKAGES = Path(__file__).parent / "environments" / "verifiers_packages"
PYTHON = os.environ.get("QRAG_VERIFIERS_PYTHON", str(ROOT / ".venv-verifiers" / "bin" / "python"))
needs_verifiers = pytest.mark.skipif(
    not Path(PYTHON).exists(), reason=f"no verifiers at {PYTHON}: make verifiers"
)


def real(name: str) -> Path:
    """A path in QRAG_DATA, by default shared/data by the checkout; or skips the test."""
    path = ROOT / os.environ.get("QRAG_DATA", "../shared/data") / name
    if not path.exists():
        pytest.skip(f"no real data at {path}; set QRAG_DATA")
    return path


def mount(*arguments: str) -> None:
    """Mounts a file system; skips the test if that is not allowed."""
    try:
        subprocess.run(["mount", *arguments], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("file systems cannot be mounted here")


def unmount(folder: Path) -> None:
    """Unmounts a folder, even if it is in use."""
    command = ["umount", "--lazy", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """Makes the folder read-only while the block runs, even for root."""
    mount("--bind", str(folder), str(folder))
    try:
        mount("-o", "remount,bind,ro", str(folder))
        yield folder
    finally:
        unmount(folder)
