"""Damages small sound inputs, and checks that a reader reads or refuses each in one sentence.

Everything depends on the generator of random numbers alone, so that a fault can be had again.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import gzip
import json
import os
import random
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure

SECONDS = 5.0  # of the processor, for one input
BLOCKED = 60.0  # seconds until a reader that uses no processor counts as one that waits for ever
MEMORY = 2**30  # bytes of address space beyond what the process has
DEEP = 100_000  # brackets in one another
HUGE = 2**34  # bytes of a file with a hole in it, which takes no place on the disk
LONGEST = 4_000  # characters of a sentence
_BOMB = 2**24, 64  # a gzip file of a megabyte that unpacks to one of 2**30 bytes
_MARK = "\x7fhere\x7f"  # stands where a value that `json.dumps` does not write is put
# What stands in the place of a value, as it is written in JSON; some of it is not JSON.
VALUES = (
    *("null", "true", "0", "1", "-1", "0.5", "-0.0", "1e308", "1e999", "-1e999", "NaN", "Infinity"),
    *("123456789012345678901234567890", "9" * 5000, '""', '" "', '"x"', '"\\u0000"', '"\\ud800"'),
    *('"\\n"', '"../../etc/passwd"', "[]", "{}", "[[]]", "[null]", '[""]', "[-1]", "[[0, 1]]"),
    *('{"a": 1}', '{"": null}', "[" * 500 + "]" * 500, "[" * DEEP, "(1,)", "nul", "01", "0x10"),
    *("[" + "1," * 9_999 + "1]", '"' + "y" * 9_999 + '"'),
)


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader of files or of texts.

    Attributes:
        name: of what it reads.
        make: writes a small sound sample into a new folder; returns the files that are damaged. Of
            texts: the sound texts.
        read: reads what is in that folder, or a text, and uses it as the programs do; a `Failure`
            in return counts as a refusal.
        refusals: errors other than InputError that the reader documents for its callers.
        mapped: whether its files are mapped, which takes addresses and no memory.
    """

    name: str
    make: Callable[[Path], Sequence[Path]] | tuple[str, ...]
    read: Callable[[Any], Any]
    refusals: tuple[type[Exception], ...] = ()
    mapped: bool = False


def faults(reader: Reader, folder: Path, count: int) -> list[str]:
    """Tries a reader on `count` inputs of each sample; one line for each fault.

    Raises:
        AssertionError: the sound sample is not accepted.
    """
    draw, found = random.Random(reader.name), []
    if isinstance(reader.make, tuple):
        for text in reader.make:
            assert _fault(reader, text, limited=False) == "", f"{reader.name}: {text} is refused"
        with _limited_memory():
            for text in reader.make:
                name = "sample.json" if text.startswith(("{", "[")) else ""
                for how, data in mutants(text.encode(), draw, count, name):
                    if wrong := _fault(reader, data.decode("utf-8", "replace")):
                        found.append(f"{how}: {wrong}; {data[:300]!r}")
        return found
    folder.mkdir(parents=True, exist_ok=True)
    files = [*reader.make(folder)]
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert _fault(reader, folder, limited=False) == "", f"{reader.name}: sound files are refused"
    # What is imported at the first reading is in memory by now.
    with _limited_memory(HUGE if reader.mapped else 0):
        for path in files:
            drawn = mutants(kept[path], draw, count, path.name)
            changes = [(how, partial(path.write_bytes, data)) for how, data in drawn]
            changes += [(how, partial(damage, path)) for how, damage in FILE_MUTATIONS.items()]
            for how, change in changes:
                _restore(folder, kept)
                _remove(path)
                change()
                if wrong := _fault(reader, folder):
                    found.append(f"{path.name}, {how}: {wrong}")
                _remove(path)
    return found


def _fault(reader: Reader, given: Any, *, limited: bool = True) -> str | None:
    """What a reader does wrong with an input; "": it is read; None: it is refused as it should."""
    try:
        with _limited_time() if limited else contextlib.nullcontext():
            found = reader.read(given)
    except InputError as error:
        return _wrong_with(str(error)) or None
    except reader.refusals:
        return None
    except _TooLongError:
        return f"more than {SECONDS:.0f} s"
    except BaseException as error:  # of Rust's panics, too
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "qrag_jax" in f.filename]
        at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        return f"{type(error).__name__} at {at}: {str(error)[:120]}"
    return None if isinstance(found, Failure) else ""


def _wrong_with(sentence: str) -> str:
    if not sentence.strip():
        return "an empty sentence"
    if any(mark in sentence for mark in "\n\r\x00"):
        return f"more than one line: {sentence[:200]!r}"
    return f"a sentence of {len(sentence)} characters" if len(sentence) > LONGEST else ""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def _restore(folder: Path, kept: dict[Path, bytes]) -> None:
    """The files as they were made; others, which a reader may have written, are removed."""
    for path in [*folder.rglob("*")]:
        if (path.is_file() or path.is_symlink()) and path not in kept:
            path.unlink()
    for path, data in kept.items():
        if path.is_symlink() or not path.is_file() or path.read_bytes() != data:
            _remove(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


class _TooLongError(BaseException):
    """One input took too long; no reader catches this."""


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise _TooLongError

    clocks = (
        (signal.SIGPROF, signal.ITIMER_PROF, SECONDS),
        (signal.SIGALRM, signal.ITIMER_REAL, BLOCKED),
    )
    before = {number: signal.signal(number, ring) for number, _, _ in clocks}
    for _, clock, seconds in clocks:
        signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        for number, clock, _ in clocks:
            signal.setitimer(clock, 0)
            signal.signal(number, before[number])


@contextlib.contextmanager
def _limited_memory(further: int = 0) -> Iterator[None]:
    """A reader that wants more than `MEMORY` gets a MemoryError, which is a fault."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY + further
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# ---------------------------------------------------------------- mutations


def mutants(
    data: bytes, draw: random.Random, count: int, name: str = ""
) -> Iterator[tuple[str, bytes]]:
    """Yields `count` mutants of an input: what was done, in a few words, and its bytes.

    Args:
        name: of its file: `.json` and `.jsonl` have their values replaced, too; what ends in `.gz`
            is unpacked before and packed afterwards.
    """
    if name.endswith(".gz"):
        inner = mutants(gzip.decompress(data), draw, count, name.removesuffix(".gz"))
        for number, (how, plain) in enumerate(inner):
            if number % 3 == 2:  # the packed bytes themselves
                yield _of_bytes(data, draw)
            else:
                yield how, gzip.compress(plain, compresslevel=1, mtime=0)
        return
    of_json = _of_lines if name.endswith(".jsonl") else _of_json if name.endswith(".json") else None
    for number in range(count):
        yield of_json(data, draw) if of_json and number % 3 else _of_bytes(data, draw)


def _as_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


def _as_bomb(path: Path) -> None:
    size, parts = _BOMB
    path.write_bytes(gzip.compress(bytes(size), compresslevel=9, mtime=0) * parts)


FILE_MUTATIONS: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("there-is-no-such-file"),
    "empty": lambda path: path.write_bytes(b""),
    f"{HUGE >> 30} GiB of zeros": _as_huge,
    "a gzip bomb": _as_bomb,
}


def _flipped(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 4, 32)) if data else 0):
        found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return bytes(found)


def _cut(data: bytes, draw: random.Random) -> bytes:
    start, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return draw.choice((data[:start], data[:start] + data[end:], data[:end] + data[start:]))


def _put(*pieces: bytes) -> Callable[[bytes, random.Random], bytes]:
    def put(data: bytes, draw: random.Random) -> bytes:
        at = draw.choice((0, len(data), draw.randrange(len(data) + 1)))
        return data[:at] + draw.choice(pieces) + data[at:]

    return put


def _numbers_changed(data: bytes, draw: random.Random) -> bytes:
    """Another number in the place of one that is written with digits."""
    places = [at for at, byte in enumerate(data) if 48 <= byte <= 57]
    if not places:
        return data
    at = draw.choice(places)
    other = (b"-", b"99999999999999999999", b"1e999", b"0.5", b"", b"NaN", b"\xd9\xa3")
    return data[:at] + draw.choice(other) + data[at + 1 :]


def _recoded(data: bytes, draw: random.Random) -> bytes:
    text = data.decode("utf-8", "replace")
    return text.encode(draw.choice(("utf-16", "utf-32", "utf-16-le", "utf-8-sig")))


_BYTE_MUTATIONS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bits flipped": _flipped,
    "cut": _cut,
    "whole doubled": lambda data, draw: data + data,
    "another number": _numbers_changed,
    "NUL bytes": _put(b"\x00", b"\x00" * 100),
    "not UTF-8": _put(b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"),
    "odd characters": _put(*map(str.encode, ("\u2028", "\x1c", "\x85", "\u202e", "\ufeff"))),
    "line ends": _put(b"\n", b"\r", b"\r\n\r\n", b"\n" * 50),
    "brackets": _put(b"[" * DEEP, b'{"a":' * DEEP, b"(" * DEEP, b"}", b"]", b'"', b"<", b">"),
    "a long line": _put(b"y" * 2**20, b"9" * 5_000, b" " * 2**20),
    "another encoding": _recoded,
    "begins with a mark": lambda data, draw: codecs.BOM_UTF8 + data,
    "nothing": lambda data, draw: draw.choice((b"", b" ", b"\n\n", b"\t\n \n")),
    "lines in another order": lambda data, draw: b"".join(
        draw.sample(lines := data.splitlines(keepends=True), len(lines))
    ),
    "noise": lambda data, draw: draw.randbytes(draw.choice((1, 16, 1_000))),
}


def _of_bytes(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    how = draw.choice(tuple(_BYTE_MUTATIONS))
    return how, _BYTE_MUTATIONS[how](data, draw)


def _of_lines(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    lines = data.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    how, line = _of_json(lines[at], draw)
    lines[at] = line + b"\n"
    return how, b"".join(lines)


def _of_json(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Another value at one place, or a field that is dropped, renamed or there twice."""
    value = json.loads(data)
    place = draw.choice([*_places(value)])
    shown = "/".join(map(str, place)) or "the whole"
    if not place:
        return "another value", draw.choice(VALUES).encode()
    inside, key = value, place[-1]
    for step in place[:-1]:
        inside = inside[step]
    kind = draw.choice(("other", "other", "other", "dropped", "again"))
    if kind == "dropped":
        del inside[key]
    elif kind == "again" and isinstance(inside, list):
        inside.append(inside[key])
    elif kind == "again":
        inside[draw.choice(("unknown", _MARK))] = draw.choice((None, 0, "x", [], inside[key]))
        text = json.dumps(value).replace(json.dumps(_MARK), json.dumps(key))
        return f"{shown} twice, or an unknown key beside", text.encode()
    else:
        inside[key] = _MARK
    text = json.dumps(value).replace(json.dumps(_MARK), draw.choice(VALUES))
    return f"{shown} {kind}", text.encode()


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    inside: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inside = [*value.items()]
    elif isinstance(value, list):
        inside = [*enumerate(value[:20])]
    for key, each in inside:
        yield from _places(each, (*place, key))
