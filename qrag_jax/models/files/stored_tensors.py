"""Weights that stay in their safetensors files until a part is read, and shards of them written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from qrag_jax.errors import InputError
from qrag_jax.runtime.whole_files import write_json

# The format's dtype names (github.com/huggingface/safetensors) → NumPy's dtypes.
DTYPES = {
    f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}")
    for kind, sizes in (("F", (2, 4, 8)), ("I", (1, 2, 4, 8)), ("U", (1, 2, 4, 8)))
    for size in sizes
} | {"BF16": np.dtype(ml_dtypes.bfloat16), "BOOL": np.dtype(np.bool_)}
WHOLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9  # as in Hugging Face's libraries


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """One tensor of a safetensors file; each access maps the bytes and unmaps them afterwards."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    def __getitem__(self, index: Any) -> np.ndarray:
        """A copy of the part that `index` selects: one slice per dimension, or () for all."""
        with safe_open(self.path, framework="numpy") as file:
            if index == () or 0 in self.shape:
                return np.asarray(file.get_tensor(self.name)[index], self.dtype)
            return file.get_slice(self.name)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[()].astype(dtype or self.dtype, copy=False)


Tensor = FileTensor | np.ndarray


def open_safetensors(path: Path) -> dict[str, FileTensor]:
    """Every tensor of one file; reads only the header."""
    found = {}
    try:
        with safe_open(path, framework="numpy") as file:  # refuses broken or truncated files
            for name in file.keys():  # noqa: SIM118  (no dictionary)
                part = file.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    raise InputError(
                        f"{path}: {name} has the dtype {part.get_dtype()}, which is not computed "
                        f"with here; store it as one of {', '.join(DTYPES)}."
                    )
                shape = tuple(part.get_shape())
                found[name] = FileTensor(path, name, DTYPES[part.get_dtype()], shape)
        return found
    except (SafetensorError, OSError, MemoryError) as error:  # the last: it cannot be mapped
        raise InputError(
            f"{path}: not a readable safetensors file ({error}); download it again."
        ) from error


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Reads every tensor of one file."""
    return {name: np.asarray(tensor) for name, tensor in open_safetensors(path).items()}


def write_shards(
    folder: Path, tensors: Mapping[str, Any], max_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes weights as Hugging Face's libraries do: `model.safetensors`, or shards and an index.

    A tensor has a shape and a dtype, and is read by `np.asarray`; those of one shard are in memory
    at a time. Files are renamed into place at the end, so the tensors may be in those replaced.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    plan = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.dtype.itemsize * int(np.prod(tensor.shape)),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    parts = {name: folder / f".{name}.part" for name in plan.filename_to_tensors}
    try:
        for name, part in parts.items():
            shard = {n: np.asarray(tensors[n], order="C") for n in plan.filename_to_tensors[name]}
            save_file(shard, part, metadata={"format": "pt"})
            del shard  # before the next one is read
        for old in [*folder.glob("model-*-of-*.safetensors"), folder / WHOLE_FILE]:
            old.unlink(missing_ok=True)
        (folder / INDEX_FILE).unlink(missing_ok=True)
        for name, part in parts.items():
            part.replace(folder / name)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(folder / INDEX_FILE, index)


@dataclasses.dataclass(frozen=True, eq=False)
class StoredLeaf:
    """A float32 leaf in a tree of stacked parameters that is read only when needed."""

    tensors: Sequence[Tensor]  # one a layer if `stacked`, else a single one, of any float dtype
    stacked: bool  # whether the leaf has a leading axis of layers
    transposed: bool  # whether it is a kernel: (out, in) in the file, (in, out) in memory

    dtype: ClassVar[np.dtype] = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensors[0].shape[:: -1 if self.transposed else 1]
        return (len(self.tensors), *shape) if self.stacked else shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one tensor in float32."""
        return int(np.prod(self.tensors[0].shape, dtype=np.int64)) * self.dtype.itemsize

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Reads the part that `index`, one slice per dimension or (), selects; a new array."""
        if not self.stacked:
            own = isinstance(self.tensors[0], FileTensor)  # a copy already
            return self._part(self.tensors[0], index).astype(self.dtype, order="C", copy=not own)
        index = index or (slice(None),) * self.ndim
        layers = self.tensors[index[0]]
        sizes = (len(range(*s.indices(n))) for s, n in zip(index[1:], self.shape[1:], strict=True))
        stack = np.empty((len(layers), *sizes), self.dtype)
        for place, tensor in zip(stack, layers, strict=True):  # one in memory at a time
            place[...] = self._part(tensor, index[1:])
        return stack

    def layers(self, start: int, stop: int) -> StoredLeaf:
        """The leaf with the layers `start` to `stop - 1` only."""
        return dataclasses.replace(self, tensors=self.tensors[start:stop])

    def _part(self, tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
        return tensor[index[::-1]].T if self.transposed else tensor[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read(()).astype(dtype or self.dtype, copy=False)
