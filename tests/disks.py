"""Folders on disks that are full, or that may only be read."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def mount(*arguments: str) -> None:
    """Mounts, or skips the test where that is not allowed."""
    try:
        subprocess.run(["mount", *arguments], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("file systems cannot be mounted here")


def unmount(folder: Path) -> None:
    """Takes away what `mount` put there, also if it is in use."""
    command = ["umount", "--lazy", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "1m") -> Iterator[Path]:
    """A file system in memory at `folder`, of a size as `mount` takes it."""
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        unmount(folder)


def fill(disk: Path) -> Path:
    """Writes a file until nothing more goes onto the disk; returns it."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return filler


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """While the block runs, the folder may only be read, by root too."""
    mount("--bind", str(folder), str(folder))
    try:
        mount("-o", "remount,bind,ro", str(folder))
        yield folder
    finally:
        unmount(folder)
