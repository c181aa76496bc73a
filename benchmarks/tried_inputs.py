"""Tries a reader on damaged inputs, within limits of time and memory, and tells what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import resource
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.mutations import FILE_MUTATIONS, HUGE, Mutant, mutants, remove
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure

SECONDS = 5.0  # of the processor, for one input
BLOCKED = 60.0  # seconds until a reader that uses no processor counts as one that waits for ever
MEMORY = 2**30  # bytes of address space beyond what the process has
_LONGEST = 4_000  # characters of a sentence
ACCEPTED, REFUSED, FAULT = OUTCOMES = ("accepted", "refused", "fault")


@dataclasses.dataclass(frozen=True)
class FileReader:
    """A reader of files.

    Attributes:
        name: of what it reads.
        make: writes a small sound sample into a new folder; returns the files that are damaged.
        read: reads what is in that folder, and uses what it read as the programs do.
        refusals: errors other than InputError that the reader documents for its callers.
        whole: whether the files as a whole are damaged, too: missing, a folder, huge, and so on.
        mapped: whether its files are mapped, which takes addresses and no memory.
    """

    name: str
    make: Callable[[Path], Sequence[Path]]
    read: Callable[[Path], Any]
    refusals: tuple[type[Exception], ...] = ()
    whole: bool = True
    mapped: bool = False


@dataclasses.dataclass(frozen=True)
class TextReader:
    """A reader of texts: answers of servers, bodies of requests, what a model wrote.

    Attributes:
        name: of what it reads.
        samples: sound texts; those that are JSON have their values replaced, too.
        read: reads one; a `Failure` in return counts as a refusal.
        refusals: as in a `FileReader`.
    """

    name: str
    samples: Sequence[str]
    read: Callable[[str], Any]
    refusals: tuple[type[Exception], ...] = ()


Reader = FileReader | TextReader


class Fault(NamedTuple):
    """An input that the reader should have refused in one sentence.

    Attributes:
        reader: its name.
        how: what was done to the input.
        what: what the reader did, in one line.
        example: the input, or its beginning.
        size: bytes of the input.
    """

    reader: str
    how: str
    what: str
    example: str
    size: int


@dataclasses.dataclass
class Tried:
    """What came of one reader's inputs.

    Attributes:
        counts: inputs of each of `OUTCOMES`.
        faults: in the order in which they were found.
        slowest: seconds of the slowest input.
    """

    counts: dict[str, int]
    faults: list[Fault]

    def note(self, outcome: str) -> None:
        """Counts an input."""
        self.counts[outcome] += 1

    @property
    def inputs(self) -> int:
        """How many inputs were tried."""
        return sum(self.counts.values())

    def smallest(self) -> list[Fault]:
        """The smallest example of each different fault."""
        found: dict[str, Fault] = {}
        for fault in self.faults:
            if fault.what not in found or fault.size < found[fault.what].size:
                found[fault.what] = fault
        return [*found.values()]


def try_reader(reader: Reader, folder: Path, count: int, seed: int = 0) -> Tried:
    """Tries a reader on about `count` inputs.

    Args:
        folder: a folder for its files; made if it is not there.
        seed: of the inputs.
    """
    draw = random.Random(f"{seed} {reader.name}")
    if isinstance(reader, TextReader):
        return _try_texts(reader, draw, count)
    return _try_files(reader, folder, draw, count)


def _try_texts(reader: TextReader, draw: random.Random, count: int) -> Tried:
    tried = _nothing_tried()
    for text in reader.samples:
        outcome, what = _outcome(reader, partial(reader.read, text), limited=False)
        if outcome != ACCEPTED:
            raise AssertionError(f"{reader.name}: the sound text is not accepted: {what}: {text}")
    each = -(-count // len(reader.samples))
    with _limited_memory():
        for text in reader.samples:
            name = "sample.json" if text.startswith(("{", "[")) else ""
            for mutant in mutants(text.encode(), draw, each, name):
                given = mutant.data.decode("utf-8", "replace")
                outcome, what = _outcome(reader, partial(reader.read, given))
                _note(tried, reader, mutant, outcome=outcome, what=what)
    return tried


def _try_files(reader: FileReader, folder: Path, draw: random.Random, count: int) -> Tried:
    tried = _nothing_tried()
    folder.mkdir(parents=True, exist_ok=True)
    files = [*reader.make(folder)]
    kept = {path: path.read_bytes() for path in _all_files(folder)}
    outcome, what = _outcome(reader, lambda: reader.read(folder), limited=False)
    if outcome != ACCEPTED:
        raise AssertionError(f"{reader.name}: the sound files are not accepted: {what}")
    _restore(folder, kept)
    # What is imported at the first reading is in memory by now.
    with _limited_memory(HUGE if reader.mapped else 0):
        _damage(tried, reader, folder, kept, draw=draw, files=files, count=count)
    return tried


def _damage(
    tried: Tried,
    reader: FileReader,
    folder: Path,
    kept: dict[Path, bytes],
    *,
    draw: random.Random,
    files: Sequence[Path],
    count: int,
) -> None:
    each = -(-count // len(files))
    for path in files:
        for mutant in mutants(kept[path], draw, each, path.name):
            path.write_bytes(mutant.data)
            outcome, what = _outcome(reader, lambda: reader.read(folder))
            _note(tried, reader, mutant, outcome=outcome, what=what)
            _restore(folder, kept)
        for how, damage in FILE_MUTATIONS.items() if reader.whole else ():
            remove(path)
            damage(path)
            outcome, what = _outcome(reader, lambda: reader.read(folder))
            _note(tried, reader, Mutant(f"{path.name} is {how}", b""), outcome=outcome, what=what)
            remove(path)
            _restore(folder, kept)


def _nothing_tried() -> Tried:
    return Tried(dict.fromkeys(OUTCOMES, 0), [])


def _all_files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _restore(folder: Path, kept: dict[Path, bytes]) -> None:
    """The files as they were made; others, which a reader may have written, are removed."""
    for path in [*folder.rglob("*")]:
        if (path.is_file() or path.is_symlink()) and path not in kept:
            path.unlink()
    for path, data in kept.items():
        if path.is_symlink() or not path.is_file() or path.read_bytes() != data:
            remove(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def _note(tried: Tried, reader: Reader, mutant: Mutant, *, outcome: str, what: str) -> None:
    tried.note(outcome)
    if outcome == FAULT:
        example = repr(mutant.data[:300])
        tried.faults.append(Fault(reader.name, mutant.how, what, example, len(mutant.data)))


def _outcome(reader: Reader, read: Callable[[], Any], *, limited: bool = True) -> tuple[str, str]:
    """What a reader does with one input: one of `OUTCOMES`, and a line about it.

    Args:
        limited: whether time is; not of the first reading, which imports.
    """
    try:
        with _limited_time() if limited else contextlib.nullcontext():
            found = read()
    except InputError as error:
        wrong = _wrong_with(str(error))
        return (FAULT, f"{wrong}: {str(error)[:200]!r}") if wrong else (REFUSED, str(error))
    except reader.refusals as error:
        return REFUSED, str(error)
    except _TooLongError:
        return FAULT, f"more than {SECONDS:.0f} s"
    except BaseException as error:  # of Rust's panics, too
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        last = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in last if "qrag_jax" in frame.filename]
        at = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
        return FAULT, f"{type(error).__name__} at {at}: {str(error)[:120]}"
    return (REFUSED, found.message) if isinstance(found, Failure) else (ACCEPTED, "")


def _wrong_with(sentence: str) -> str:
    if not sentence.strip():
        return "an empty sentence"
    if any(mark in sentence for mark in "\n\r\x00"):
        return "more than one line"
    if len(sentence) > _LONGEST:
        return f"a sentence of {len(sentence)} characters"
    return ""


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
