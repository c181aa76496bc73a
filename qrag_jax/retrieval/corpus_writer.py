"""Writes a corpus passage by passage; a writer that was killed goes on where it was."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.corpus import (
    ENTRY,
    HASH,
    HASHES,
    INDEX,
    LINES,
    NAME,
    NUMBER,
    NUMBERS,
    StoredCorpus,
    name_hash,
    sha256_of,
    write_manifest,
)
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.runtime import bounded_json, locks, whole_files

PROGRESS = "progress.json"  # how much of the files is known to be on disk
KEEP_EVERY = 100_000  # passages from one note of the progress to the next


class CorpusWriter:
    """Appends passages to a corpus that is not finished.

    Use as a context manager. Passages are durable every `KEEP_EVERY` and when the block ends; a
    later writer in the same folder goes on after the last durable one, and `len` says how many
    there are. `finish` makes the folder a corpus.

    Args:
        folder: made if absent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with contextlib.ExitStack() as stack:
            fix = "wait until it ends, or end it, or give another folder"
            lock = locks.held(folder / ".lock", f"{folder} is being written", fix, "folder")
            stack.enter_context(lock)
            if (folder / NAME).exists():
                raise InputError(
                    f"{folder} holds a finished corpus ({NAME}); give another folder, or delete it."
                )
            self._count, self._end = self._durable()
            for name, size in ((LINES, self._end), (INDEX, self._count * ENTRY.itemsize)):
                with (folder / name).open("ab") as file:
                    if file.tell() < size:
                        raise InputError(
                            f"{folder / name} is cut short: {PROGRESS} says it has {size:,} bytes; "
                            "delete the folder and write it again."
                        )
                    file.truncate(size)
            self._digest = sha256_of(folder / LINES)
            self._lines = stack.enter_context((folder / LINES).open("ab"))
            self._index = stack.enter_context((folder / INDEX).open("ab"))
            self._entries: list[tuple[int, int]] = []
            self._open = stack.pop_all()

    def __len__(self) -> int:
        return self._count

    def add(self, passage: Passage, where: str = "") -> int:
        """Appends a passage; returns its number.

        Args:
            where: names its place in the file that it comes from, for errors.
        """
        where = where or f"{self.folder}, passage {self._count}"
        if not isinstance(passage.name, str) or not passage.name.strip():
            raise InputError(f"{where}, has no id; give every passage one of its own.")
        if not isinstance(passage.text, str) or not isinstance(passage.title, str):
            raise InputError(
                f"{where}, with the id {passage.name!r}, has a title or text that is no text; give "
                "texts between quotes."
            )
        if not passage.whole:
            raise InputError(
                f"{where}, with the id {passage.name!r}, has no text; give it one, or leave it out."
            )
        try:
            line = _line([passage.name, passage.title, passage.text, dict(passage.metadata)])
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{where}, with the id {passage.name!r}, has metadata that JSON cannot hold "
                f"({error}); give numbers, texts, true, false, null, lists or objects of these."
            ) from None
        self._lines.write(line)
        self._digest.update(line)
        self._end += len(line)
        self._entries.append((self._end, name_hash(passage.name)))
        self._count += 1
        if self._count % KEEP_EVERY == 0:
            self._keep()
        return self._count - 1

    def finish(
        self, places: Callable[[Sequence[int]], Sequence[str]] | None = None
    ) -> StoredCorpus:
        """Makes the folder a corpus, and opens it.

        Args:
            places: names the places that passages come from, for errors; None: by their numbers.
        """
        if not self._count:
            raise InputError(f"{self.folder} has no passage; a corpus holds one at least.")
        self._keep()
        index = np.memmap(self.folder / INDEX, ENTRY, "r")
        hashes = np.array(index["name"])
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        twice = self._duplicates(index["end"], hashes, order)
        if twice is not None:
            name, *numbers = twice
            told = f"{self.folder}: the passages {numbers[0]} and {numbers[1]}, counted from 0,"
            raise InputError(
                f"{' and '.join(places(numbers)) if places else told} both have the id {name!r}; "
                "give each its own, or leave one out, and write the corpus again"
                f"{'' if places else ' into an empty folder'}."
            )
        for name, array in ((HASHES, hashes.astype(HASH)), (NUMBERS, order.astype(NUMBER))):
            with whole_files.replacing(self.folder / name) as file:
                file.write(array.data)
        write_manifest(self.folder, self._count, self._digest.hexdigest())
        (self.folder / PROGRESS).unlink(missing_ok=True)
        return StoredCorpus(self.folder)

    def close(self) -> None:
        """Makes what was added durable; the corpus need not be finished."""
        with self._open:
            if not (self.folder / NAME).exists():
                self._keep()

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _durable(self) -> tuple[int, int]:
        if not (self.folder / PROGRESS).exists():
            return 0, 0
        said = bounded_json.load(self.folder / PROGRESS)
        return said["count"], said["bytes"]

    def _keep(self) -> None:
        self._index.write(np.array(self._entries, ENTRY).tobytes())
        self._entries.clear()
        for file in (self._lines, self._index):
            file.flush()
            os.fsync(file.fileno())
        said = {"count": self._count, "bytes": self._end}
        whole_files.write_whole(self.folder / PROGRESS, json.dumps(said))

    def _duplicates(
        self, ends: np.ndarray, hashes: np.ndarray, order: np.ndarray
    ) -> tuple[str, int, int] | None:
        """A name that two passages have, and their numbers; None: there is none."""
        last = len(hashes) - 1
        for at in np.flatnonzero(hashes[:-1] == hashes[1:]):
            name = self._name(ends, order[at])
            # Names with one hash may be different. They stand in the order of their numbers.
            other = at + 1
            while other <= last and hashes[other] == hashes[at]:
                if self._name(ends, order[other]) == name:
                    return name, int(order[at]), int(order[other])
                other += 1
        return None

    def _name(self, ends: np.ndarray, number: int) -> str:
        start = int(ends[number - 1]) if number else 0
        with (self.folder / LINES).open("rb") as file:
            file.seek(start)
            return json.loads(file.read(int(ends[number]) - start))[0]


def write_corpus(folder: Path, passages: Iterable[Passage]) -> StoredCorpus:
    """Writes a whole corpus at once; see `CorpusWriter`."""
    with CorpusWriter(folder) as writer:
        for passage in passages:
            writer.add(passage)
        return writer.finish()


def _line(fields: list[object]) -> bytes:
    def dumped(ascii_only: bool) -> bytes:
        text = json.dumps(
            fields,
            ensure_ascii=ascii_only,
            allow_nan=False,
            sort_keys=True,
            separators=(",", ":"),
        )
        return text.encode() + b"\n"

    try:
        return dumped(ascii_only=False)
    except UnicodeEncodeError:  # half of a pair of surrogates, which UTF-8 has not
        return dumped(ascii_only=True)
