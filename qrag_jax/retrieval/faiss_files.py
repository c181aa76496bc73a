"""Flat index files of faiss: other programs' are read, and ours are written for them.

The library is optional (`pip install 'qrag_jax[faiss]'`) and imported when it is first used.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.libraries import engine_library
from qrag_jax.retrieval.vectors import checked
from qrag_jax.runtime import whole_files

# How files begin, and bytes before the vectors: kind, width, count, two fillers, metric and a mark.
_FLAT, _MAPS = (b"IxFI", b"IxF2", b"IxFl"), (b"IxMp", b"IxM2")
_HEADER = 4 + 4 + 8 + 8 + 8 + 1 + 4
_KINDS = "write an IndexFlatIP, alone or in an IndexIDMap"


def library() -> Any:
    """The module `faiss`.

    Raises:
        InputError: it is not installed.
    """
    return engine_library("faiss", "faiss", "faiss")


@dataclasses.dataclass(frozen=True)
class FlatFile:
    """What a flat index file holds.

    Attributes:
        index: faiss' own IndexFlat, whose rows are numbered from 0.
        ids: int64 `[rows]`, the ids that an IndexIDMap gives them; None without one.
        whole: the index of the file, without which an IndexFlat in an IndexIDMap has no memory.
    """

    index: Any
    ids: np.ndarray | None
    whole: Any

    @property
    def vectors(self) -> np.ndarray:
        """float32 `[rows, width]`, a copy."""
        return self.index.reconstruct_n(0, self.index.ntotal)


def flat_index(vectors: np.ndarray) -> Any:
    """faiss' IndexFlatIP of vectors `[n, width]`.

    Raises:
        InputError: faiss is not installed, or the vectors hold NaN or an infinite number.
    """
    rows = checked(vectors, "the index of faiss").astype(np.float32)
    index = library().IndexFlatIP(rows.shape[1])
    index.add(np.ascontiguousarray(rows))
    return index


def write_flat(path: Path, vectors: np.ndarray, ids: np.ndarray | None = None) -> None:
    """Writes an IndexFlatIP, in an IndexIDMap if there are ids; the file appears whole.

    Args:
        vectors: `[n, width]`.
        ids: int64 `[n]`.

    Raises:
        InputError: as `flat_index`, or the ids are not as many as the vectors.
        OSError: the file cannot be written.
    """
    index = flat_index(vectors)
    if ids is not None:
        if len(ids) != index.ntotal:
            raise InputError(f"{path}: {len(ids)} ids for {index.ntotal} vectors; give one each.")
        rows = index.reconstruct_n(0, index.ntotal)
        index.reset()
        index = library().IndexIDMap(index)
        index.add_with_ids(rows, np.asarray(ids, np.int64))
    write_index(path, index)


def write_index(path: Path, index: Any) -> None:
    """Writes an index of faiss; the file appears whole.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}{whole_files.PARTIAL}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        library().write_index(index, str(partial))
        partial.replace(path)
    except RuntimeError as error:  # faiss has no other
        raise OSError(f"{path} cannot be written: {whole_files.reason(error)}") from None
    finally:
        partial.unlink(missing_ok=True)
    whole_files.sync_folder(path.parent)


def read_flat(path: Path) -> FlatFile:
    """Reads an IndexFlatIP, alone or in an IndexIDMap (or IndexIDMap2).

    Raises:
        InputError: faiss is not installed; the file is missing or damaged; or the index is of
            another kind, ranks by distance, or holds NaN or an infinite number.
    """
    faiss = library()
    if not path.is_file():
        raise InputError(f"{path} does not exist; give an index file of faiss.")
    try:
        _check_sizes(path)
        index = faiss.read_index(str(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); write it again.") from None
    except (RuntimeError, MemoryError) as error:
        lines = str(error).strip().splitlines() or [""]
        why = lines[-1].partition("Error: ")[2] or "no reason given"
        raise InputError(
            f"{path} is no index of faiss, or cut short ({why[:120]}); write it again."
        ) from None
    whole, ids = index, None
    if isinstance(index, faiss.IndexIDMap):
        ids = faiss.vector_to_array(index.id_map)
        index = faiss.downcast_index(index.index)
    if not isinstance(index, faiss.IndexFlat):
        raise InputError(
            f"{path} holds an index of the kind {type(index).__name__}; vectors cannot be read "
            f"from it exactly: {_KINDS}."
        )
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise InputError(
            f"{path} ranks by L2 distance (field metric_type), but scores here are inner products: "
            f"{_KINDS}; where all vectors have the length 1, both rank alike."
        )
    if index.ntotal:
        checked(index.reconstruct_n(0, index.ntotal), str(path))
    return FlatFile(index, ids, whole)


def _check_sizes(path: Path) -> None:
    """Refuses a flat index that says it has more vectors or ids than the file has bytes.

    faiss makes room for as many as the file says, before it reads them.

    Raises:
        InputError: the file is cut short or damaged.
        OSError: it cannot be read.
    """
    whole, at = path.stat().st_size, 0
    with path.open("rb") as file:
        kind = file.read(4)
        at = _HEADER if kind in _MAPS else 0
        file.seek(at)
        if file.read(4) not in _FLAT:  # faiss itself looks after the sizes of other kinds
            return
        for width in (4, 8) if kind in _MAPS else (4,):  # vectors, then ids
            at += _HEADER if width == 4 else 0
            file.seek(at)
            count = int.from_bytes(file.read(8), "little")
            at += 8 + count * width
            if at > whole:
                raise InputError(
                    f"{path} is no index of faiss, or cut short (it has {whole:,} bytes instead of "
                    f"{at:,}); write it again."
                )
