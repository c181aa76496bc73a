"""Vectors of passages on the host, in memory or in mapped files of an index folder.

Each file holds rows of numbers, little-endian, with nothing before them. A folder that is being
filled has a file of vectors for each part that is finished, a note beside it, and `building.json`,
which says what the vectors are made of: what was written stays if the process is killed. The
manifest comes last, and only then is the folder an index; the notes and `building.json` then go. So
the disk holds the vectors once, and no part is ever copied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.index_folder import Manifest, read_manifest, write_manifest
from qrag_jax.retrieval.protocol import Queries
from qrag_jax.runtime import bounded_json, whole_files

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_PIECE = 2**24  # numbers looked at at a time
BUILDING = "building.json"


class Vectors:
    """Vectors `[count, width]` in parts, one behind the other.

    Args:
        parts: `[n, width]` each, of one dtype of `DTYPES`; one at least.
    """

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = parts
        self._starts = np.cumsum([0, *map(len, parts)])
        self.width, self.dtype = int(parts[0].shape[1]), parts[0].dtype

    def __len__(self) -> int:
        return int(self._starts[-1])

    def blocks(self, start: int, stop: int, size: int) -> Iterator[tuple[int, np.ndarray]]:
        """Pairs (number of the first, vectors `[at most size, width]`) from `start` to `stop`."""
        for first, part in zip(self._starts, self._parts, strict=False):
            low, high = max(start, int(first)), min(stop, int(first) + len(part))
            for at in range(low, high, size):
                yield at, part[at - int(first) : min(at + size, high) - int(first)]

    def rows(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """float32 `[len(numbers), width]`: the vectors of these numbers."""
        wanted = check_numbers(numbers, len(self))
        found = np.empty((len(wanted), self.width), np.float32)
        of_part = np.searchsorted(self._starts, wanted, side="right") - 1
        for part in np.unique(of_part):
            here = of_part == part
            found[here] = self._parts[part][wanted[here] - self._starts[part]]
        return found


def checked(vectors: Any, what: str, width: int | None = None) -> np.ndarray:
    """The vectors as an array `[n, width]` of a dtype of `DTYPES`; other floats become float32.

    Args:
        width: theirs; None: any.
    """
    array = np.asarray(vectors)
    if array.dtype not in DTYPES.values() and array.dtype.kind in "fiu":
        array = array.astype(np.float32)
    shaped = array.ndim == 2 and width in (None, array.shape[1])
    if not shaped or array.dtype not in DTYPES.values():
        raise InputError(
            f"{what}: the vectors are of {array.dtype} and have the shape {list(array.shape)}, not "
            f"[number, {width or 'width'}] of float32; give those of the encoder that the index is "
            "for."
        )
    check_finite(array, what)
    return array


def check_finite(vectors: np.ndarray, what: str, first: int = 0) -> None:
    size = max(_PIECE // max(vectors.shape[1], 1), 1)
    for start in range(0, len(vectors), size):
        finite = np.isfinite(vectors[start : start + size]).all(axis=1)
        if not finite.all():
            number = first + start + int(finite.argmin())
            raise InputError(
                f"{what}: the vector {number}, counted from 0, holds NaN or an infinite number; "
                "embed its text again, and look at the encoder."
            )


def of_passages(vectors: np.ndarray | Vectors, passages: int) -> Vectors:
    """The vectors of a corpus of so many passages, checked unless they are mapped from files."""
    if not isinstance(vectors, Vectors):
        vectors = Vectors([checked(vectors, "the index")])
    if len(vectors) != passages:
        raise InputError(
            f"there are {len(vectors)} vectors for {passages} passages; embed all passages, each "
            "once and in order."
        )
    return vectors


def check_numbers(numbers: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """int64 `[len(numbers)]`: numbers of vectors; an `IndexError` if one is not below `count`."""
    wanted = np.asarray(numbers, np.int64)
    if wanted.size and not (wanted.min() >= 0 and wanted.max() < count):
        raise IndexError(f"vectors {wanted.min()} to {wanted.max()} of {count}")
    return wanted


def query_vectors(queries: Queries, width: int) -> np.ndarray:
    """float32 `[queries, width]`, checked."""
    count = "no" if queries.vectors is None else len(queries.vectors)
    if count != len(queries):
        raise InputError(
            f"there are {count} vectors for {len(queries)} queries; this engine searches by them, "
            "so embed the queries, one vector each."
        )
    return checked(queries.vectors, "the queries", width).astype(np.float32)


class Stored(NamedTuple):
    manifest: Manifest
    vectors: Vectors


def open_vectors(folder: Path, **wanted: str | int | None) -> Stored:
    manifest = read_manifest(folder, **wanted)
    dtype, width = DTYPES[manifest.dtype], manifest.width
    parts = [
        np.memmap(folder / name, dtype, "r").reshape(-1, width)
        for name, size in manifest.files.items()
        if size
    ]
    return Stored(manifest, Vectors(parts or [np.zeros((0, width), dtype)]))


class PartNote(NamedTuple):
    passages: int  # number of them
    tokens: int  # of all rows, special ones included
    cut: int  # number of passages that were longer than a row


@dataclasses.dataclass(frozen=True)
class VectorParts:
    """The parts of a folder.

    Attributes:
        made_of: what the vectors depend on; a folder begun with other values is refused.
    """

    folder: Path
    made_of: Mapping[str, str]
    count: int
    part: int  # passages of a part; the last one has the rest
    width: int
    dtype: str

    @property
    def numbers(self) -> range:
        return range(-(-self.count // self.part))

    def passages(self, number: int) -> range:
        """The numbers of the passages of a part; none beyond the last part."""
        return range(min(number * self.part, self.count), min((number + 1) * self.part, self.count))

    def begin(self) -> None:
        """Makes the folder, or goes on with one that was begun."""
        path, sizes = self.folder / BUILDING, {"passages": self.count, "part": self.part}
        wanted = {**self.made_of, **sizes, "width": self.width, "dtype": self.dtype}
        if not path.exists():
            whole_files.write_whole(path, json.dumps(wanted, indent=1) + "\n")
            return
        begun = bounded_json.load(path)
        if others := [name for name in wanted if begun.get(name) != wanted[name]]:
            raise InputError(
                f"{path} has another {' and another '.join(others)} than is asked for now; go on "
                "with what it was begun with, or delete the folder to begin again."
            )

    def finished(self) -> dict[int, PartNote]:
        found = {}
        for number in self.numbers:
            with contextlib.suppress(OSError, ValueError):  # missing, or torn
                note = PartNote(**bounded_json.load(self._note(number)))
                if self._path(number).stat().st_size == self._size(number):
                    found[number] = note
        return found

    def write(self, number: int, vectors: np.ndarray, note: PartNote) -> None:
        """Writes the vectors `[passages of the part, width]` of a part, then its note."""
        check_finite(vectors, str(self.folder), self.passages(number).start)
        with whole_files.replacing(self._path(number)) as file:
            file.write(np.ascontiguousarray(vectors.astype(DTYPES[self.dtype])).view(np.uint8).data)
        whole_files.write_whole(self._note(number), json.dumps(note._asdict()) + "\n")

    def finish(self, manifest: Manifest) -> None:
        """Writes the manifest, which names the parts in order, and deletes the notes."""
        files = {self._path(number).name: self._size(number) for number in self.numbers}
        size: dict[str, Any] = {"count": self.count, "width": self.width, "dtype": self.dtype}
        write_manifest(self.folder, dataclasses.replace(manifest, files=files, **size))
        self.tidy()

    def tidy(self) -> None:
        for number in self.numbers:
            self._note(number).unlink(missing_ok=True)
        (self.folder / BUILDING).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"vectors.{number}.{self.dtype}"

    def _note(self, number: int) -> Path:
        return self._path(number).with_suffix(f".{self.dtype}.json")

    def _size(self, number: int) -> int:
        return len(self.passages(number)) * self.width * DTYPES[self.dtype].itemsize
