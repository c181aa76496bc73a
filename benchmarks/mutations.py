"""Damages small sound inputs in many ways: bytes, lines, JSON values, and files as a whole.

Everything depends on the generator of random numbers alone, so that a fault can be had again.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

DEEP = 100_000  # brackets in one another
HUGE = 2**34  # bytes of a file with a hole in it, which takes no place on the disk
_BOMB_PART, _BOMB_PARTS = 2**24, 64  # a gzip file of a megabyte that unpacks to one of 2**30 bytes
_LONG_LINE = 2**20
_MARK = "\x7fhere\x7f"  # stands where a value that `json.dumps` does not write is put

# What stands in the place of a value, as it is written in JSON; some of it is not JSON.
VALUES = (
    *("null", "true", "false", "0", "1", "-1", "0.5", "-0.0", "1e308", "1e999", "-1e999"),
    *("NaN", "Infinity", "-Infinity", "123456789012345678901234567890", "9" * 5000, "1.0"),
    *('""', '" "', '"x"', '"\\u0000"', '"\\ud800"', '"\\n"', '"../../etc/passwd"', '"/etc/passwd"'),
    *("[]", "{}", "[[]]", "[null]", '[""]', "[0]", "[-1]", "[1e999]", "[[0, 1]]", '{"a": 1}'),
    *('{"": null}', '{"a": {"a": []}}', "[" * 500 + "]" * 500, "[" * DEEP, "(1,)", "'x'", "nul"),
    *("[" + "1," * 9_999 + "1]", '"' + "y" * 9_999 + '"', "0x10", "01", "1_000", "undefined"),
)


class Mutant(NamedTuple):
    """An input that may be broken.

    Attributes:
        how: what was done, in a few words.
        data: its bytes.
    """

    how: str
    data: bytes


def mutants(data: bytes, draw: random.Random, count: int, name: str = "") -> Iterator[Mutant]:
    """Yields `count` mutants of an input.

    Args:
        data: the sound input.
        name: of its file, whose ending tells what is in it: `.json` and `.jsonl` have their values
            replaced, too; what ends in `.gz` is unpacked before and packed afterwards.
    """
    if name.endswith(".gz"):
        inner = mutants(gzip.decompress(data), draw, count, name.removesuffix(".gz"))
        for number, mutant in enumerate(inner):
            if number % 3 == 2:  # the packed bytes themselves
                yield _of_bytes(data, draw)
            else:
                yield Mutant(mutant.how, gzip.compress(mutant.data, compresslevel=1, mtime=0))
        return
    of_json = _of_lines if name.endswith(".jsonl") else _of_json if name.endswith(".json") else None
    for number in range(count):
        if of_json is not None and number % 3:
            yield of_json(data, draw)
        else:
            yield _of_bytes(data, draw)


def texts(text: str, draw: random.Random, count: int) -> Iterator[str]:
    """Mutants of a text that is no file: bytes that are not UTF-8 become other characters."""
    for mutant in mutants(text.encode(), draw, count):
        yield mutant.data.decode("utf-8", "replace")


def values_at(data: bytes, draw: random.Random, count: int) -> Iterator[Mutant]:
    """Yields mutants of a JSON document, each with another value at one of its places."""
    for _ in range(count):
        yield _of_json(data, draw)


# ---------------------------------------------------------------- files as a whole

FileMutation = Callable[[Path], None]


def _as_folder(path: Path) -> None:
    path.mkdir()


def _as_loop(path: Path) -> None:
    path.symlink_to(path.name)


def _as_dangling(path: Path) -> None:
    path.symlink_to("there-is-no-such-file")


def _as_empty(path: Path) -> None:
    path.write_bytes(b"")


def _as_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


def _as_bomb(path: Path) -> None:
    part = gzip.compress(bytes(_BOMB_PART), compresslevel=9, mtime=0)
    with path.open("wb") as file:
        for _ in range(_BOMB_PARTS):
            file.write(part)


FILE_MUTATIONS: dict[str, FileMutation] = {
    "missing": lambda path: None,
    "a folder": _as_folder,
    "a link to itself": _as_loop,
    "a link to nothing": _as_dangling,
    "empty": _as_empty,
    f"{HUGE >> 30} GiB of zeros": _as_huge,
    "a gzip bomb": _as_bomb,
}


def remove(path: Path) -> None:
    """Removes what is at a path: a file, a link, a folder, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


# ---------------------------------------------------------------- bytes


def _place(data: bytes, draw: random.Random) -> int:
    return draw.randrange(len(data) + 1)


def _flipped(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 4, 32))):
        if found:
            found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return bytes(found)


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: _place(data, draw)]


def _dropped(data: bytes, draw: random.Random) -> bytes:
    start = _place(data, draw)
    return data[:start] + data[start + draw.choice((1, 2, 8, 64)) :]


def _doubled(data: bytes, draw: random.Random) -> bytes:
    start, end = sorted((_place(data, draw), _place(data, draw)))
    return data[:end] + data[start:]


def _put(*given: bytes) -> Callable[[bytes, random.Random], bytes]:
    def put(data: bytes, draw: random.Random) -> bytes:
        at = draw.choice((0, len(data), _place(data, draw), _place(data, draw)))
        return data[:at] + draw.choice(given) + data[at:]

    return put


def _random_bytes(data: bytes, draw: random.Random) -> bytes:
    at = _place(data, draw)
    return data[:at] + draw.randbytes(draw.choice((1, 4, 100))) + data[at:]


def _numbers_changed(data: bytes, draw: random.Random) -> bytes:
    """Another number in the place of one that is written with digits."""
    places = [at for at, byte in enumerate(data) if 48 <= byte <= 57]
    if not places:
        return data
    at = draw.choice(places)
    given = draw.choice((b"-", b"99999999999999999999", b"1e999", b"0.5", b"", b"NaN", b"\xd9\xa3"))
    return data[:at] + given + data[at + 1 :]


def _recoded(data: bytes, draw: random.Random) -> bytes:
    text = data.decode("utf-8", "replace")
    return text.encode(draw.choice(("utf-16", "utf-32", "utf-16-le", "utf-8-sig")))


_BYTE_MUTATIONS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bits flipped": _flipped,
    "cut short": _cut,
    "bytes dropped": _dropped,
    "bytes doubled": _doubled,
    "whole doubled": lambda data, draw: data + data,
    "random bytes": _random_bytes,
    "another number": _numbers_changed,
    "NUL bytes": _put(b"\x00", b"\x00" * 100),
    "not UTF-8": _put(b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"),
    "odd characters": _put(*map(str.encode, ("\u2028", "\x1c", "\x85", "\u202e", "\ufeff"))),
    "line ends": _put(b"\n", b"\r", b"\r\n\r\n", b"\n" * 50),
    "brackets": _put(b"[" * DEEP, b'{"a":' * DEEP, b"(" * DEEP, b"}", b"]", b'"', b"<", b">"),
    "a long line": _put(b"y" * _LONG_LINE, b"9" * 5_000, b" " * _LONG_LINE),
    "another encoding": _recoded,
    "begins with a mark": lambda data, draw: codecs.BOM_UTF8 + data,
    "nothing": lambda data, draw: b"",
    "white space": lambda data, draw: draw.choice((b" ", b"\n\n", b"\t\n \n")),
    "lines in another order": lambda data, draw: b"".join(
        draw.sample(lines := data.splitlines(keepends=True), len(lines))
    ),
    "noise": lambda data, draw: draw.randbytes(draw.choice((1, 16, 1_000))),
}


def _of_bytes(data: bytes, draw: random.Random) -> Mutant:
    how = draw.choice(tuple(_BYTE_MUTATIONS))
    return Mutant(how, _BYTE_MUTATIONS[how](data, draw))


# ---------------------------------------------------------------- JSON


def _of_lines(data: bytes, draw: random.Random) -> Mutant:
    lines = data.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    how, line = _of_json(lines[at], draw)
    lines[at] = line + b"\n"
    return Mutant(how, b"".join(lines))


def _of_json(data: bytes, draw: random.Random) -> Mutant:
    value = json.loads(data)
    places = [*_places(value)]
    place = draw.choice(places)
    kind = draw.random()
    told = "/".join(map(str, place)) or "the whole"
    if kind < 0.75 or not place:
        given = draw.choice(VALUES)
        text = _written(_replaced(value, place, _MARK)).replace(json.dumps(_MARK), given)
        return Mutant(f"{told} = {given[:30]}", text.encode())
    inside, key = _at(value, place[:-1]), place[-1]
    if isinstance(inside, list):
        if kind < 0.9:
            del inside[key]
            return Mutant(f"{told} dropped", _written(value).encode())
        inside.append(inside[key])
        return Mutant(f"{told} twice", _written(value).encode())
    if kind < 0.83:
        del inside[key]
        return Mutant(f"{told} dropped", _written(value).encode())
    if kind < 0.9:
        inside["unknown"] = inside[key]
        return Mutant(f"an unknown key beside {told}", _written(value).encode())
    # The same key a second time: an unknown one is renamed in the text.
    inside[_MARK] = draw.choice((None, 0, "x", [], inside[key]))
    text = _written(value).replace(json.dumps(_MARK), json.dumps(key))
    return Mutant(f"the key {told} twice", text.encode())


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True)


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    inside: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inside = [*value.items()]
    elif isinstance(value, list):
        inside = [*enumerate(value[:20])]
    for key, each in inside:
        yield from _places(each, (*place, key))


def _at(value: Any, place: Sequence[Any]) -> Any:
    for key in place:
        value = value[key]
    return value


def _replaced(value: Any, place: Sequence[Any], new: Any) -> Any:
    if not place:
        return new
    _at(value, place[:-1])[place[-1]] = new
    return value
