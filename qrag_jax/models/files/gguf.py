"""Reads GGUF, the model files of llama.cpp (github.com/ggml-org/ggml/blob/master/docs/gguf.md).

The reader is that of the makers, the package `gguf`. It maps the file into memory and knows every
quantisation, but it trusts the file: one of 44 bytes that names an array of 2**40 numbers keeps it
busy until the memory is full. So only a file whose digest the caller knows is given to it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.runtime import digests

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """A GGUF file whose tensors stay in it until they are read.

    Attributes:
        path: named in errors.
        fields: the metadata; arrays are lists.
        stored: the tensors, quantised, by the names in the file.
    """

    path: Path
    fields: Mapping[str, Any]
    stored: Mapping[str, Any]

    def field(self, name: str, kind: type[_T]) -> _T:
        """A value of the metadata."""
        value = self.fields.get(name)
        if not isinstance(value, kind):
            raise InputError(
                f"{self.path}: the field {name}, of type {kind.__name__}, is missing or of another "
                "type; take a file that llama.cpp's converter wrote."
            )
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in NumPy's order: that of a linear map is `(out, in)`."""
        return tuple(int(size) for size in reversed(self.stored[name].shape))

    def tensor(self, name: str) -> np.ndarray:
        """A tensor, dequantised to float32."""
        import gguf

        found = self.stored[name]
        try:
            return gguf.quants.dequantize(found.data, found.tensor_type).astype(np.float32)
        except NotImplementedError:
            raise InputError(
                f"{self.path}: {name} is stored as {found.tensor_type.name}, which cannot be "
                "dequantised; take a file of another quantisation."
            ) from None


def check_installed() -> None:
    """Raises InputError if the package `gguf` is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise InputError(
            "reading GGUF files needs the package gguf: run pip install 'qrag_jax[llm]'."
        )


def read_gguf(path: Path, sha256: str) -> GGUFFile:
    """Opens a GGUF file of a known digest; nothing of another file is looked at.

    Args:
        path: of the file.
        sha256: its digest, in hex.
    """
    try:
        found = digests.sha256(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from None
    if found != sha256:
        raise InputError(
            f"{path}: refused, its sha256 is {found} and not {sha256}; download it again."
        )
    check_installed()
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the library's errors share no base class
        raise InputError(
            f"{path}: not a readable GGUF file ({str(error) or type(error).__name__})."
        ) from None
    return GGUFFile(path, fields, {tensor.name: tensor for tensor in reader.tensors})
