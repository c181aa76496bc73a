"""Reads the tensors of a `pytorch_model.bin` without torch and without running code from it.

Such a file is a pickle, and a pickle is a program. Names in it resolve only to what `_Reader` makes
of the few that a dictionary of tensors needs; the file is refused at any other name.
"""

from __future__ import annotations

import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from qrag_jax.errors import InputError

_KINDS = {"Float": "f4", "Half": "f2", "Double": "f8", "Bool": "?", "Byte": "u1"}
_KINDS |= {"Long": "i8", "Int": "i4", "Short": "i2", "Char": "i1"}
DTYPES = {f"{name}Storage": np.dtype(kind) for name, kind in _KINDS.items()}
DTYPES["BFloat16Storage"] = np.dtype(ml_dtypes.bfloat16)
WRAPPERS = ("state_dict", "model")
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
MAX_REASON = 200  # characters of a library's error in a message


def read_torch_file(path: Path) -> dict[str, np.ndarray]:
    """Reads the state dict that `torch.save` wrote to `path`, in the zip or the older format.

    If the file holds a state dict under the key "state_dict" or "model", that one is read. Entries
    that are not tensors are left out.

    Returns:
        Name to array, in the file's order; dtypes as stored (bfloat16 by `ml_dtypes`), row-major.
        Arrays may be read-only, and tied tensors may share memory.
    """
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
            file.seek(0)
            arrays = (_read_zip if is_zip else _read_legacy)(file)
        arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except Exception as error:  # a broken pickle may fail with nearly any exception
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:MAX_REASON]
        raise InputError(
            f"{path}: not readable as PyTorch's weights ({reason}); convert it to safetensors."
        ) from error
    if not arrays:
        raise InputError(f"{path}: holds no tensors by name; save model.state_dict().")
    return arrays


_StorageOf = Callable[[str, np.dtype, int], np.ndarray]  # by key, dtype and number of elements


class _Reader(pickle.Unpickler):
    """An unpickler that knows tensors and nothing else; `storages`: all that are named, by key."""

    def __init__(self, file: IO[bytes], storage_of: _StorageOf) -> None:
        super().__init__(file, encoding="utf-8")
        self.storages: dict[str, np.ndarray] = {}
        self._storage_of = storage_of

    def find_class(self, module: str, name: str) -> Any:
        # Functions are new at each call: a pickle can set attributes on what it gets.
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *args: _view(*args[:4])  # then requires_grad, hooks, metadata
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *rest: tensor
        if module in ("torch", "torch.cuda") and name in DTYPES:
            return name
        raise pickle.UnpicklingError(
            f"refused, since the file asks for {f'{module}.{name}':.100}, which could run code"
        )

    def persistent_load(self, pid: Any) -> np.ndarray:
        """pid: ("storage", kind, key, device, numel) and, in the older format, a view."""
        if any(pid[5:]):
            raise pickle.UnpicklingError("a view of a storage, as before torch 0.4")
        kind, key, numel = pid[1], pid[2], pid[4]
        if key not in self.storages:
            self.storages[key] = self._storage_of(key, DTYPES[kind], numel)
        return self.storages[key]


def _view(storage: Any, offset: Any, size: Any, stride: Any) -> np.ndarray:
    """A tensor of a storage's elements, which offset and strides count; none lie outside of it."""
    if not all(type(n) is int and n >= 0 for n in (offset, *size, *stride)):
        raise ValueError("a tensor has a size or stride that is no number")
    numel = math.prod(size)
    if numel == 0:
        return np.empty(size, storage.dtype)
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    # More elements than the storage has: of stride 0, they could take any amount of memory.
    if last >= len(storage) or numel > len(storage):
        raise ValueError("a tensor reaches outside of its storage")
    strides = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, strides)


def _tensors(loaded: Any) -> dict[str, np.ndarray]:
    """The tensors of a state dict, or of the one that a training's checkpoint holds."""
    if not isinstance(loaded, dict):
        return {}
    wrapped = (loaded[name] for name in WRAPPERS if isinstance(loaded.get(name), dict))
    items = next(wrapped, loaded).items()
    return {str(name): value for name, value in items if isinstance(value, np.ndarray)}


def _read_zip(file: IO[bytes]) -> dict[str, np.ndarray]:
    """The format since torch 1.6: a zip of `data.pkl` and one entry per storage."""
    with zipfile.ZipFile(file) as archive:
        (pickled,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        root = pickled.removesuffix("data.pkl")
        if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") == b"big":
            raise ValueError("it is from a big-endian machine")

        def storage_of(key: str, dtype: np.dtype, numel: int) -> np.ndarray:
            return np.frombuffer(archive.read(f"{root}data/{key}"), dtype, numel)

        with archive.open(pickled) as data:
            return _tensors(_Reader(data, storage_of).load())


def _no_storage(key: str, dtype: np.dtype, numel: int) -> np.ndarray:
    raise pickle.UnpicklingError(f"a storage {key!r:.100} outside of the tensors")


def _read_legacy(file: IO[bytes]) -> dict[str, np.ndarray]:
    """The format before torch 1.6: five pickles (magic, version, machine, dict, keys), then bytes.

    The bytes hold, in the order of the keys, each storage's size (int64) and elements.
    """
    magic, version, machine = (_Reader(file, _no_storage).load() for _ in range(3))
    if (magic, version) != (LEGACY_MAGIC, LEGACY_PROTOCOL) or not machine["little_endian"]:
        raise ValueError("not a file of torch.save, or one from a big-endian machine")
    reader = _Reader(file, lambda key, dtype, numel: np.empty(numel, dtype))
    tensors, keys = _tensors(reader.load()), _Reader(file, _no_storage).load()
    if reader.storages.keys() - set(keys):
        raise ValueError("it lacks the elements of a tensor")
    for key in keys:
        storage = reader.storages[key]  # the tensors are views of it
        (written,) = struct.unpack("<q", file.read(8))
        data = file.read(written * storage.itemsize)
        storage[:] = np.frombuffer(data, storage.dtype, len(storage))
    return tensors
