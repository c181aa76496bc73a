"""Vectors in an index folder: plain files that are never changed, and a manifest that names them.

Each file holds rows of numbers, little-endian, with nothing before them. What is added or replaced
goes into new files; then the manifest is switched to them, with the next version. So a reader has
the vectors of one version, whatever a writer does meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.manifest import Manifest, check_files, read_manifest, write_manifest
from qrag_jax.retrieval.vectors import DTYPES, Vectors, checked
from qrag_jax.runtime import locks, whole_files

PREFIX = "vectors."
PART_BYTES = 2**30  # of a file at most; a file is written anew where one of its rows is replaced
_TRIES = 20


class Stored(NamedTuple):
    """The vectors of a folder, mapped, and what the folder says of them."""

    manifest: Manifest
    vectors: Vectors


def create_vectors(folder: Path, manifest: Manifest) -> None:
    """Begins an index folder without a vector; `manifest` says whose and of which dtype they are.

    Raises:
        InputError: the width or the dtype is none, or the folder holds an index already.
    """
    if manifest.dtype not in DTYPES or manifest.width < 1:
        raise InputError(
            f"{folder}: vectors of width {manifest.width} and dtype {manifest.dtype!r}; give a "
            f"width of 1 at least, and one of {', '.join(DTYPES)}."
        )
    with _writing(folder):
        if (folder / "manifest.json").exists():
            raise InputError(f"{folder} holds an index already; give another folder, or delete it.")
        write_manifest(folder, dataclasses.replace(manifest, count=0, version=0, files={}))


def append_vectors(folder: Path, vectors: np.ndarray) -> Manifest:
    """Adds vectors `[n, width]` behind the others; returns the new manifest.

    Few large pieces are better than many small ones: each becomes a file.

    Raises:
        InputError: they do not fit, or hold NaN or an infinite number.
        OSError: they cannot be written.
    """
    with _writing(folder):
        old = read_manifest(folder)
        rows = checked(vectors, str(folder), old.width).astype(DTYPES[old.dtype])
        size = max(PART_BYTES // (old.width * rows.itemsize), 1)
        pieces = [rows[start : start + size] for start in range(0, len(rows), size)]
        files = dict(old.files) | _write(folder, old, pieces)
        return _switch(folder, old, files, old.count + len(rows))


def replace_vectors(folder: Path, start: int, vectors: np.ndarray) -> Manifest:
    """Puts vectors `[n, width]` in the place of those from `start` on; returns the new manifest.

    Raises:
        InputError: they do not fit, or hold NaN or an infinite number.
        OSError: they cannot be written.
    """
    with _writing(folder):
        old, kept = open_vectors(folder)
        rows = checked(vectors, str(folder), old.width).astype(DTYPES[old.dtype])
        if not 0 <= start <= start + len(rows) <= old.count:
            raise InputError(
                f"{folder} has {old.count} vectors, but {start} to {start + len(rows)} are to be "
                "replaced; append those beyond."
            )
        files: dict[str, int] = {}
        first = 0
        for name, size in old.files.items():
            count = size // (old.width * rows.itemsize)
            low, high = max(start, first), min(start + len(rows), first + count)
            if low < high:
                new = np.empty((count, old.width), rows.dtype)
                for at, piece in kept.blocks(first, first + count, count):
                    new[at - first : at - first + len(piece)] = piece
                new[low - first : high - first] = rows[low - start : high - start]
                files |= _write(folder, old, [new], len(files))
            else:
                files[name] = size
            first += count
        return _switch(folder, old, files, old.count)


def open_vectors(folder: Path, **wanted: str | int) -> Stored:
    """The vectors of a folder, all of one version.

    Args:
        wanted: as `manifest.read_manifest` has them.

    Raises:
        InputError: the manifest does not fit, or a file is missing or cut short.
    """
    for attempt in range(_TRIES):
        manifest = read_manifest(folder, **wanted)
        try:
            check_files(folder, manifest)
            return Stored(manifest, _mapped(folder, manifest))
        except (InputError, FileNotFoundError):
            # A writer may have switched to other files, and deleted these.
            if attempt + 1 == _TRIES or read_manifest(folder).version == manifest.version:
                raise
    raise AssertionError("the last try returns or raises")


def write_vectors(folder: Path, manifest: Manifest, vectors: Vectors) -> None:
    """Writes an index folder with these vectors; see `create_vectors`."""
    create_vectors(folder, manifest)
    size = max(PART_BYTES // (vectors.width * vectors.dtype.itemsize), 1)
    for _, block in vectors.blocks(0, len(vectors), size):
        append_vectors(folder, block)


def set_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Replaces the engine's settings in the manifest of a folder."""
    with _writing(folder):
        write_manifest(folder, dataclasses.replace(read_manifest(folder), settings=settings))


def _mapped(folder: Path, manifest: Manifest) -> Vectors:
    if manifest.dtype not in DTYPES or manifest.width < 1:
        raise InputError(
            f"{folder / 'manifest.json'} has vectors of width {manifest.width} and dtype "
            f"{manifest.dtype!r:.60}; restore it from a backup, or build the index again."
        )
    dtype, width = DTYPES[manifest.dtype], manifest.width
    if manifest.count * width * dtype.itemsize != sum(manifest.files.values()):
        raise InputError(
            f"{folder / 'manifest.json'} counts {manifest.count} vectors (field count), which is "
            "not what its files hold; restore it from a backup, or build the index again."
        )
    parts = [
        np.memmap(folder / name, dtype, "r").reshape(-1, width)
        for name, size in manifest.files.items()
        if size
    ]
    return Vectors(parts or [np.zeros((0, width), dtype)])


def _write(
    folder: Path, old: Manifest, pieces: Sequence[np.ndarray], first: int = 0
) -> dict[str, int]:
    """Writes each piece into a file of the next version; returns the files' sizes."""
    files = {}
    for number, piece in enumerate(pieces, first):
        name = f"{PREFIX}{old.version + 1}.{number}.{old.dtype}"
        with whole_files.replacing(folder / name) as file:
            file.write(np.ascontiguousarray(piece).view(np.uint8).data)
        files[name] = piece.nbytes
    return files


def _switch(folder: Path, old: Manifest, files: Mapping[str, int], count: int) -> Manifest:
    new = dataclasses.replace(old, version=old.version + 1, files=files, count=count)
    write_manifest(folder, new)
    for path in folder.glob(f"{PREFIX}*"):
        if path.name not in new.files:
            path.unlink(missing_ok=True)
    return new


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    fix = "wait until it ends, or end it, or give another folder"
    taken = f"the vectors of {folder} are being written"
    with locks.held(folder / ".vectors.lock", taken, fix, "folder"):
        yield
