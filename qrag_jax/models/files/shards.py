"""Writes safetensors files tensor by tensor, in shards of bounded size, in Hugging Face's layout.

The library's `save_file` needs all tensors of a file in memory, and copies them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from qrag_jax.models.files.stored_tensors import DTYPES
from qrag_jax.runtime.whole_files import write_whole

WHOLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
MAX_SHARD_BYTES = 5 * 10**9  # as in Hugging Face's libraries
LENGTH_BYTES = 8  # a file begins with the length of its header, little-endian
NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


class Size(NamedTuple):
    """Shape and dtype of a tensor, as in the header."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def write_shards(
    folder: Path,
    sizes: Mapping[str, Size],
    arrays: Iterable[tuple[str, np.ndarray]],
    max_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes weights: one `model.safetensors`, or shards and their index.

    The files are renamed into place at the end, so the arrays may come from the files that are
    replaced. Safetensors weights that `folder` had in another layout are removed.

    Args:
        folder: to write to.
        sizes: shape and dtype of every tensor, by name, in the order in which shards take them.
        arrays: each tensor once, in any order; one is in memory at a time.
        max_bytes: limit of the tensors in one shard; a larger tensor gets a separate shard.

    Raises:
        ValueError: an array has another shape or dtype than in `sizes`, or is missing.
    """
    shards = _shards(sizes, max_bytes)
    names = [WHOLE_FILE] if len(shards) == 1 else _shard_names(len(shards))
    hidden = [folder / f".{name}.part" for name in names]
    files: list[BinaryIO] = []
    try:
        places: dict[str, tuple[BinaryIO, int]] = {}
        for path, shard in zip(hidden, shards, strict=True):
            files.append(path.open("wb"))
            places |= {n: (files[-1], start) for n, start in _begin(files[-1], shard).items()}
        for name, array in arrays:
            file, start = places.pop(name)
            if Size(array.shape, array.dtype) != sizes[name]:
                raise ValueError(f"{name} is {array.dtype}{array.shape}, not {sizes[name]}")
            file.seek(start)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        if places:
            raise ValueError(f"no array came for {', '.join(places)}")
        for file in files:
            file.close()
        for old in [*folder.glob(SHARDS), folder / WHOLE_FILE, folder / INDEX_FILE]:
            old.unlink(missing_ok=True)
        for path, name in zip(hidden, names, strict=True):
            os.replace(path, folder / name)
    finally:
        for file in files:
            file.close()
        for path in hidden:
            path.unlink(missing_ok=True)
    if len(shards) > 1:
        _write_index(folder, dict(zip(names, shards, strict=True)))


def _shards(sizes: Mapping[str, Size], max_bytes: int) -> list[dict[str, Size]]:
    shards: list[dict[str, Size]] = [{}]
    total = 0
    for name, size in sizes.items():
        if shards[-1] and total + size.bytes > max_bytes:
            shards.append({})
            total = 0
        shards[-1][name] = size
        total += size.bytes
    return shards


def _shard_names(count: int) -> list[str]:
    return [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def _begin(file: BinaryIO, shard: Mapping[str, Size]) -> dict[str, int]:
    """Writes the header, byte for byte as `save_file`; returns where each tensor's bytes begin."""
    order = sorted(shard, key=lambda name: (-shard[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name in order:
        size = shard[name]
        starts[name], end = end, end + size.bytes
        header[name] = {
            "dtype": NAMES_OF_DTYPES[size.dtype],
            "shape": list(size.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # aligns the first tensor
    file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    begin = file.tell()
    file.truncate(begin + end)
    return {name: begin + start for name, start in starts.items()}


def _write_index(folder: Path, shards: Mapping[str, Mapping[str, Size]]) -> None:
    total = sum(size.bytes for shard in shards.values() for size in shard.values())
    weight_map = {name: file for file, shard in shards.items() for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_whole(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
