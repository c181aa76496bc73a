"""Folders on full disks and on read-only disks."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


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
