"""Weights that stay in their safetensors files until a part of them is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from qrag_jax.errors import InputError

# The format's names of dtypes (github.com/huggingface/safetensors) that it gives as NumPy's.
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """One tensor of a safetensors file: its bytes are mapped, and let go, at every look."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    def __getitem__(self, index: Any) -> np.ndarray:
        """A copy of the part that a slice per dimension names."""
        with safe_open(self.path, framework="numpy") as file:
            if index == () or 0 in self.shape:
                return np.asarray(file.get_tensor(self.name)[index], self.dtype)
            return file.get_slice(self.name)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[()].astype(dtype or self.dtype, copy=False)


Tensor = FileTensor | np.ndarray


def open_safetensors(path: Path) -> dict[str, FileTensor]:
    """Every tensor of one file, by its header alone.

    Raises:
        InputError: the file is missing, broken, or holds a dtype that NumPy cannot.
    """
    found = {}
    try:
        with safe_open(path, framework="numpy") as file:  # refuses what is broken or cut short
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
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: not a readable safetensors file ({error}); download it again."
        ) from error


@dataclasses.dataclass(frozen=True, eq=False)
class StoredLeaf:
    """A leaf of a tree of stacked parameters, of which nothing is in memory yet.

    Attributes:
        tensors: one per layer for a leaf that is `stacked`, else the one.
        transposed: a kernel: (out, in) in the file, (in, out) in memory.
        dtype: of the parts that are read, whatever the file has.
    """

    tensors: Sequence[Tensor]
    stacked: bool
    transposed: bool
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensors[0].shape[:: -1 if self.transposed else 1]
        return (len(self.tensors), *shape) if self.stacked else shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one of its tensors in `dtype`."""
        return int(np.prod(self.tensors[0].shape, dtype=np.int64)) * self.dtype.itemsize

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """The part that one slice per dimension names, a new array in `dtype`."""
        if not self.stacked:
            own = isinstance(self.tensors[0], FileTensor)  # a copy already
            return self._part(self.tensors[0], index).astype(self.dtype, order="C", copy=not own)
        layers = self.tensors[index[0]]
        sizes = [
            len(range(*s.indices(size))) for s, size in zip(index[1:], self.shape[1:], strict=True)
        ]
        stack = np.empty((len(layers), *sizes), self.dtype)
        for place, tensor in zip(stack, layers, strict=True):
            place[...] = self._part(tensor, index[1:])
        return stack

    def layers(self, start: int, stop: int) -> StoredLeaf:
        """The leaf of some of its layers."""
        return dataclasses.replace(self, tensors=self.tensors[start:stop])

    def as_stored(self) -> StoredLeaf:
        """The same in the dtype of the file."""
        return dataclasses.replace(self, dtype=self.tensors[0].dtype)

    def _part(self, tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
        return tensor[index[::-1]].T if self.transposed else tensor[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read((slice(None),) * self.ndim).astype(dtype or self.dtype, copy=False)
