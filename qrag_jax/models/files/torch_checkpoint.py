"""Reads the tensors of a `pytorch_model.bin` without torch and without running code from it.

Such a file is a pickle, and a pickle is a program. Three barriers make reading it safe. Only the
operations of pickles that a state dict needs are allowed (`OPERATIONS`). Only the names in
`_Reader.find_class` resolve, and they resolve to the inert classes of this module. Bytes become
arrays after the pickle is loaded, and never more bytes than the file has.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from qrag_jax.errors import InputError

DTYPES: dict[str, np.dtype] = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "DoubleStorage": np.dtype(np.float64),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
WRAPPERS = ("state_dict", "model")
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
# Operations that `torch.save` writes, protocols 2 to 4. Left out on purpose: INST, OBJ, NEWOBJ
# (other ways to call), EXT (names from a registry), BYTEARRAY8 (allocates before it reads).
# fmt: off
OPERATIONS = (
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINSTRING", "SHORT_BINSTRING", "GLOBAL", "STACK_GLOBAL",
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "MARK",
    "APPEND", "APPENDS", "SETITEM", "SETITEMS", "REDUCE", "BUILD", "BINPERSID", "PROTO", "FRAME",
    "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "MEMOIZE", "STOP",
)
# fmt: on

MOST_ITEMS = 10_000_000  # of dictionaries that are made from lists, in one file
MOST_COPIES = 4  # most bytes of tensors beyond their storages, in multiples of the file's size
MAX_REASON = 200  # characters of a library's error in a message


def read_torch_file(path: str | Path) -> dict[str, np.ndarray]:
    """Reads the state dict that `torch.save` wrote to `path`, in the zip or the older format.

    If the file holds a state dict under the key "state_dict" or "model", that one is read. Entries
    that are not tensors are left out.

    Returns:
        Name to array, in the file's order; dtypes as stored (bfloat16 by `ml_dtypes`), row-major.
        Arrays may be read-only, and tied tensors may share memory.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
            file.seek(0)
            found, storages = (_read_zip if is_zip else _read_legacy)(file, path)
        if isinstance(found, dict):
            wrapped = (found[w] for w in WRAPPERS if isinstance(found.get(w), dict))
            found = next(wrapped, found)
            tensors = {n: t for n, t in found.items() if isinstance(t, _Tensor)}
            if tensors:
                views = {str(n): _view(str(n), t, storages, path) for n, t in tensors.items()}
                return _row_major(views, path)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except Exception as error:  # a broken pickle may fail with nearly any exception
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:MAX_REASON]
        raise InputError(
            f"{path}: not readable as a PyTorch weight file ({reason}); download it again, or "
            "convert the weights to safetensors."
        ) from error
    raise InputError(f"{path}: holds no tensors by name (a state dict); save model.state_dict().")


class _Storage(NamedTuple):
    """A run of `numel` elements, named by `key` within the file; the bytes are read later."""

    key: str
    dtype: np.dtype
    numel: int


class _Tensor(NamedTuple):
    """A strided view of a storage; offset and strides count elements, as in torch."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Mapping(dict):
    """Stands for `dict` and `OrderedDict`; attributes that are set on it (`_metadata`) are dropped.

    Keys are plain: hashing a deeply nested tuple would overflow the stack.
    """

    def __setitem__(self, key: object, value: object) -> None:
        if not isinstance(key, str | int):
            raise pickle.UnpicklingError("a dictionary whose keys are not plain")
        super().__setitem__(key, value)

    def __setstate__(self, state: object) -> None:
        del state


class _Name:
    """What an allowed name in the pickle becomes: a storage kind or a function of this module."""

    __slots__ = ("call", "dtype")

    def __init__(self, call: Callable[..., Any] | None = None, dtype: np.dtype | None = None):
        self.call = call
        self.dtype = dtype

    def __call__(self, *args: Any) -> Any:
        if self.call is None:
            raise pickle.UnpicklingError("a storage kind is called")
        return self.call(*args)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a name is given a state")


def _tensor_v2(
    storage: object, offset: object, size: object, stride: object, *rest: object
) -> _Tensor:
    """Stands for `torch._utils._rebuild_tensor_v2`; `rest`: requires_grad, hooks, metadata."""
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    if len(rest) > 2 and rest[2]:
        raise pickle.UnpicklingError("conjugated or negated tensors are not supported")
    if not isinstance(size, tuple) or not isinstance(stride, tuple) or len(size) != len(stride):
        raise pickle.UnpicklingError("a tensor whose size and stride do not fit together")
    for number in (offset, *size, *stride):
        if type(number) is not int or number < 0:
            what = number if type(number) is int else type(number).__name__
            raise pickle.UnpicklingError(f"a tensor with {what} in its size or stride")
    assert isinstance(offset, int)
    return _Tensor(storage, offset, size, stride)


def _parameter(tensor: object, *rest: object) -> _Tensor:
    """Stands for `torch._utils._rebuild_parameter`; `rest`: requires_grad, hooks."""
    if not isinstance(tensor, _Tensor):
        raise pickle.UnpicklingError("a parameter without a tensor")
    return tensor


class _Operations(dict):
    """The operations by their codes."""

    def __missing__(self, code: int) -> Any:
        raise pickle.UnpicklingError(f"the operation {chr(code)!r}, which no tensors need")


class _Reader(pickle._Unpickler):
    """An unpickler that knows tensors and nothing else.

    The one in Python, not that in C, for its operations can be chosen.

    Attributes:
        storages: all storages that the pickle names, by key.
    """

    dispatch = _Operations(
        (getattr(pickle, name)[0], pickle._Unpickler.dispatch[getattr(pickle, name)[0]])
        for name in OPERATIONS
    )
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(_Mapping())

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file, encoding="utf-8")
        self.path = path
        self.storages: dict[str, _Storage] = {}
        self._items = 0

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _Name(self._ordered_dict)
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Name(_tensor_v2)
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _Name(_parameter)
        if module in ("torch", "torch.cuda") and name in DTYPES:
            return _Name(dtype=DTYPES[name])
        raise InputError(
            f"{self.path}: refused, since the file asks for {f'{module}.{name}':.200}, which is "
            "not part of a dictionary of tensors and could run code; convert the weights to "
            "safetensors."
        )

    def _ordered_dict(self, items: Any = ()) -> _Mapping:
        """An `OrderedDict`; pickles written by Python 2 pass the items, maybe the same often."""
        found = _Mapping()
        for key, value in items:
            found[key] = value
            self._items += 1
            if self._items > MOST_ITEMS:
                raise pickle.UnpicklingError(f"more than {MOST_ITEMS} items of dictionaries")
        return found

    def persistent_load(self, pid: Any) -> _Storage:
        """pid: ("storage", kind, key, device, numel) and, in the older format, a view."""
        kind, key, numel, view = pid[1], pid[2], pid[4], pid[5:]
        if pid[0] != "storage" or not isinstance(kind, _Name) or kind.dtype is None or any(view):
            raise pickle.UnpicklingError("a storage of an unknown kind")
        if not isinstance(key, str) or type(numel) is not int or numel < 0:
            raise pickle.UnpicklingError("a storage without key or size")
        storage = _Storage(key, kind.dtype, numel)
        if self.storages.setdefault(key, storage) != storage:
            # torch.save refuses to write this; each of them would be read separately.
            raise pickle.UnpicklingError("a storage is there with two sizes or dtypes")
        return storage


def _unpickle(file: BinaryIO, path: Path) -> tuple[Any, dict[str, _Storage]]:
    """What the pickle at the position of `file` holds, and the storages that it names, by key."""
    reader = _Reader(file, path)
    return reader.load(), reader.storages


def _read_zip(file: BinaryIO, path: Path) -> tuple[Any, dict[_Storage, np.ndarray]]:
    """The format since torch 1.6: a zip of `data.pkl` and one uncompressed entry per storage."""
    with zipfile.ZipFile(file) as archive:
        names = set(archive.namelist())
        pickles = [n for n in names if n.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise InputError(f"{path}: a zip file without data.pkl is not a PyTorch weight file.")
        root = pickles[0].removesuffix("data.pkl")
        entries = archive.infolist()
        # An uncompressed entry cannot be larger than the file: no decompression bombs.
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise InputError(f"{path}: has compressed entries, which torch.save never writes.")
        if sum(entry.file_size for entry in entries) > file.seek(0, io.SEEK_END):
            raise ValueError("its entries overlap")
        order = archive.read(f"{root}byteorder") if f"{root}byteorder" in names else b"little"
        if order not in (b"little", b"big"):
            raise ValueError(f"the byteorder {order[:20]!r} is not little or big")
        found, _ = _unpickle(io.BytesIO(archive.read(pickles[0])), path)
        storages = {
            each: _elements(archive.read(f"{root}data/{each.key}"), each, big=order == b"big")
            for each in _storages(found)
        }
    return found, storages


def _read_legacy(file: BinaryIO, path: Path) -> tuple[Any, dict[_Storage, np.ndarray]]:
    """The format before torch 1.6: five pickles (magic, version, machine, dict, keys), then bytes.

    The bytes hold, in the order of the keys, each storage's size (int64) and elements. Storages
    that `_storages` leaves out are skipped.
    """
    try:
        magic, _ = _unpickle(file, path)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path}: not a PyTorch weight file.") from error
    if magic != LEGACY_MAGIC:
        raise InputError(f"{path}: not a PyTorch weight file.")
    (version, _), (machine, _) = _unpickle(file, path), _unpickle(file, path)
    if version != LEGACY_PROTOCOL or machine.get("little_endian") is not True:
        raise InputError(
            f"{path}: an old PyTorch file of another version, or one from a big-endian machine;"
            f" load and save it again with a newer torch."
        )
    (found, by_key), (keys, _) = _unpickle(file, path), _unpickle(file, path)
    wanted = set(_storages(found))
    storages: dict[_Storage, np.ndarray] = {}
    for key in keys:
        if not isinstance(key, str):
            raise ValueError("a storage whose key is no text")
        storage = by_key[key]
        (numel,) = struct.unpack("<q", file.read(8))
        if numel != storage.numel:
            raise ValueError(f"storage {key} has {numel} elements, not {storage.numel}")
        size = numel * storage.dtype.itemsize
        _check_left(file, size)
        if storage in wanted:
            storages[storage] = _elements(file.read(size), storage)
        else:  # such as optimizer state, deep in a training checkpoint
            file.seek(size, io.SEEK_CUR)
    return found, storages


def _check_left(file: BinaryIO, size: int) -> None:
    """Refuses a file with fewer than `size` bytes left, so that a false size allocates nothing."""
    here = file.tell()
    left = file.seek(0, io.SEEK_END) - here
    if size > left:
        raise EOFError(f"{size} bytes wanted, {left} left")
    file.seek(here)


def _storages(found: Any) -> list[_Storage]:
    """The distinct storages of the tensors in `found` and in the dictionaries one level below."""
    if not isinstance(found, dict):
        return []
    # Once each: a file may name one dictionary a million times.
    dicts = {id(d): d for d in (found, *found.values()) if isinstance(d, dict)}.values()
    values = (value for each in dicts for value in each.values())
    return list(dict.fromkeys(v.storage for v in values if isinstance(v, _Tensor)))


def _elements(data: bytes, storage: _Storage, big: bool = False) -> np.ndarray:
    """The bytes of a storage as `[numel]` elements in native byte order."""
    width = storage.dtype.itemsize
    if len(data) < storage.numel * width:
        raise EOFError(f"storage {storage.key} is shorter than {storage.numel} elements")
    words = np.frombuffer(data, f"{'>' if big else '<'}u{width}", storage.numel)
    words = words.astype(f"=u{width}", copy=False)
    return words != 0 if storage.dtype == np.bool_ else words.view(storage.dtype)


def _view(
    name: str, tensor: _Tensor, storages: dict[_Storage, np.ndarray], path: Path
) -> np.ndarray:
    """The tensor's elements in their storage; refuses a tensor that reaches outside of it."""
    elements = storages[tensor.storage]
    numel = math.prod(tensor.size)
    if numel == 0:
        return np.empty(tensor.size, elements.dtype)
    last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.size, tensor.stride, strict=True))
    if last >= len(elements):
        raise InputError(
            f"{path}: the tensor {name} reaches element {last} of a storage of {len(elements)}; "
            f"the file is corrupt, download it again."
        )
    if numel > len(elements):  # stride 0: a small file could ask for any amount of memory
        raise InputError(
            f"{path}: the tensor {name} of shape {tensor.size} repeats the {len(elements)} elements"
            f" of its storage; save it with .contiguous()."
        )
    strides = [s * elements.itemsize for s in tensor.stride]
    return np.lib.stride_tricks.as_strided(elements[tensor.offset :], tensor.size, strides)


def _row_major(views: Mapping[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """The views row-major, which may copy them; a small file could have many of one storage."""
    copied = sum(view.nbytes for view in views.values() if not view.flags.c_contiguous)
    if copied > MOST_COPIES * path.stat().st_size:
        raise InputError(
            f"{path}: its tensors would take {copied} bytes as they are looked at, more than "
            f"{MOST_COPIES} times the file; save them with .contiguous()."
        )
    return {name: np.ascontiguousarray(v).reshape(v.shape) for name, v in views.items()}
