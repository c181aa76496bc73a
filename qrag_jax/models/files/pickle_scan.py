"""Checks the operations of a pickle before it is loaded: their kinds, and how much they ask for.

A small file can contain huge numbers, nest tuples until hashing them overflows the stack, or share
objects so that a walk over them never ends. So the scan follows the operations on a stack that
holds only sizes. A dictionary of tensors is far from every limit.
"""

from __future__ import annotations

import dataclasses
import pickletools
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, cast

from qrag_jax.errors import InputError

MAX_BYTES = 256 * 2**20  # of one pickle; a pickle of 10,000 tensors has 2 MiB
MAX_OPERATIONS = 5_000_000  # a tensor takes about 30
MAX_DEPTH = 64
MAX_OBJECTS = 10_000_000  # in one object; a shared object counts each time it occurs

# Operations that `torch.save` writes, protocols 2 to 4. Left out on purpose: INST, OBJ, NEWOBJ
# (other ways to call), EXT (names from a registry), BYTEARRAY8 (allocates before it reads).
# fmt: off
ATOMS = frozenset({
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINSTRING", "SHORT_BINSTRING", "GLOBAL",
})
EMPTY = frozenset({"EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"})
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
ALLOWED_OPERATIONS = ATOMS | EMPTY | TUPLES.keys() | {
    "PROTO", "FRAME", "STOP", "MARK", "STACK_GLOBAL", "REDUCE", "BUILD", "BINPERSID", "TUPLE",
    "APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
    "MEMOIZE",
}
# fmt: on


@dataclasses.dataclass(slots=True)
class _Size:
    """Size of an object; the stack and the memo hold the same one, so it grows in both.

    Attributes:
        depth: how deep objects are nested in it; 0 if it holds no others.
        objects: how many objects it consists of, itself included.
        is_used: whether it was taken from the memo. Then others may hold it, and count its size.
    """

    depth: int
    objects: int
    is_used: bool = False


class TooMuch(Exception):
    """A pickle exceeds a limit; the message says which."""


class _Bounded:
    """A file that can be read up to `MAX_BYTES`, then raises `TooMuch`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left = file, MAX_BYTES

    def read(self, size: int) -> bytes:
        return self._spend(self._file.read(max(min(size, self._left + 1), 0)))

    def readline(self) -> bytes:
        return self._spend(self._file.readline(self._left + 1))

    def tell(self) -> int:
        return self._file.tell()

    def _spend(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise TooMuch(f"has more than {MAX_BYTES >> 20} MiB")
        return data


class _Stack:
    """The stack and memo of the pickle machine, with sizes in the place of objects."""

    def __init__(self) -> None:
        self.stack: list[_Size] = []
        self.marks: list[int] = []
        self.memo: dict[int, _Size] = {}

    def follow(self, name: str, argument: Any) -> None:
        """Applies one operation; raises IndexError or KeyError if stack or memo lack an operand."""
        if name in ATOMS:
            self.stack.append(_atom())
        elif name in EMPTY:
            self.stack.append(_Size(1, 1))
        elif name == "MARK":
            self.marks.append(len(self.stack))
        elif name == "TUPLE":
            self.stack.append(_holding(self._from_mark()))
        elif name in TUPLES:
            self.stack.append(_holding(self._pop(TUPLES[name])))
        elif name in ("APPEND", "APPENDS"):
            self._grow(self._pop(1) if name == "APPEND" else self._from_mark())
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop(2) if name == "SETITEM" else self._from_mark()
            if any(key.depth for key in items[::2]):
                raise TooMuch("has a dictionary whose keys are not plain")
            self._grow(items)
        elif name in ("BINPERSID", "STACK_GLOBAL"):
            self._pop(1 if name == "BINPERSID" else 2)
            self.stack.append(_atom())
        elif name == "REDUCE":
            self.stack.append(_holding(self._pop(2)))
        elif name == "BUILD":
            self._pop(1)
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.memo[argument].is_used = True
            self.stack.append(self.memo[argument])

    def _pop(self, count: int) -> list[_Size]:
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < count:
            raise IndexError
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def _from_mark(self) -> list[_Size]:
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def _grow(self, items: list[_Size]) -> None:
        """Adds the items to the object on top of the stack.

        Raises:
            TooMuch: others may hold the object already, and have counted it without these items.
        """
        own, added = self.stack[-1], _holding(items)
        if own.is_used:
            raise TooMuch("fills an object that it has used already")
        whole = _checked(max(own.depth, added.depth), own.objects + added.objects - 1)
        own.depth, own.objects = whole.depth, whole.objects


def _atom() -> _Size:
    return _Size(0, 1)


def _holding(items: list[_Size]) -> _Size:
    """The size of a new object that holds these items."""
    depth = 1 + max((item.depth for item in items), default=0)
    return _checked(depth, 1 + sum(item.objects for item in items))


def _checked(depth: int, objects: int) -> _Size:
    if depth > MAX_DEPTH:
        raise TooMuch(f"nests its objects more than {MAX_DEPTH} deep")
    if objects > MAX_OBJECTS:
        raise TooMuch(f"holds more than {MAX_OBJECTS} objects")
    return _Size(depth, objects)


def scan(file: BinaryIO, path: Path) -> None:
    """Checks the pickle that starts at the current position of `file`; `path` names it in errors.

    Raises:
        UnpicklingError, ValueError: the pickle is broken.
    """
    stack = _Stack()
    try:
        bounded = cast(BinaryIO, _Bounded(file))  # has all methods that genops uses
        for count, (operation, argument, _) in enumerate(pickletools.genops(bounded)):
            name = operation.name
            if name not in ALLOWED_OPERATIONS:
                raise InputError(
                    f"{path}: refused, since its pickle uses the operation {name}, which a "
                    "dictionary of tensors has no need of; convert the weights to safetensors."
                )
            # Writers number the memo densely. For a huge number the unpickler would allocate as
            # many entries.
            if name.endswith("BINPUT") and cast(int, argument) > count:
                raise UnpicklingError("a memo number out of order")
            if count >= MAX_OPERATIONS:
                raise TooMuch(f"has more than {MAX_OPERATIONS} operations")
            stack.follow(name, argument)
    except (IndexError, KeyError):
        raise UnpicklingError("an operation lacks what it works on") from None
    except TooMuch as error:
        raise InputError(
            f"{path}: refused, since its pickle {error}, which a dictionary of tensors has no need "
            "of; convert the weights to safetensors."
        ) from None
