"""A corpus in a folder: passages on disk, read one by one at random.

Four plain files. `passages.jsonl` has one JSON list `[name, title, text, metadata]` a line.
`passages.index` has 16 bytes for each: where its line ends, and a hash of its name. `names.hashes`
has the hashes in order, `names.numbers` the passages that they belong to. `corpus.json` says how
large these are; it is written last, and a folder without it is no corpus (see `corpus_writer`).

A file of offsets and not ArrayRecord, which grain reads: of a million passages of 600 bytes, 100 at
random took 0.2 ms and not 2 ms, they were written as fast, and such files can be appended to.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.columns import Columns
from qrag_jax.retrieval.protocol import NONE, Passage, Where
from qrag_jax.runtime import bounded_json, whole_files
from qrag_jax.runtime.file_names import check_links, is_plain
from qrag_jax.runtime.typed_json import made

FORMAT = 1  # of all files of the folder
LINES, INDEX = "passages.jsonl", "passages.index"
HASHES, NUMBERS = "names.hashes", "names.numbers"
NAME = "corpus.json"
ENTRY = np.dtype([("end", "<u8"), ("name", "<u8")])  # of `INDEX`
HASH, NUMBER = np.dtype("<u8"), np.dtype("<i8")
_PIECE = 2**24
_AGAIN = "restore the file from a backup, or write the corpus again"


class StoredCorpus:
    """The passages of a folder; see `protocol.Corpus`.

    Nothing grows with their number but maps of files. Several threads may read.

    Args:
        folder: as `corpus_writer.CorpusWriter` has finished it.

    Attributes:
        digest: SHA-256 of `passages.jsonl`, in hex.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        said = _read_manifest(folder)
        self.digest: str = said["digest"]
        self._count: int = said["count"]
        self._lines = os.open(folder / LINES, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._lines)
        self._size: int = said["files"][LINES]
        self._index = _mapped(folder / INDEX, ENTRY)
        self._hashes = _mapped(folder / HASHES, HASH)
        self._numbers = _mapped(folder / NUMBERS, NUMBER)
        self._columns = Columns(folder, self.digest, self._count)

    def __len__(self) -> int:
        return self._count

    def passages(self, numbers: Sequence[int] | np.ndarray) -> list[Passage]:
        """The passages with these numbers.

        Raises:
            IndexError: there is no passage of such a number.
        """
        return [self._passage(int(number)) for number in numbers]

    def __iter__(self) -> Iterator[Passage]:
        # From the file that is open: the folder may hold another corpus by now.
        return map(self._passage, range(self._count))

    def numbers(self, names: Sequence[str]) -> np.ndarray:
        """int64 `[len(names)]`: the passages' numbers; `NONE` where no passage has the name."""
        wanted = np.array([name_hash(name) for name in names], HASH)
        found = np.full(len(names), NONE, np.int64)
        for place, first in enumerate(np.searchsorted(self._hashes, wanted)):
            at = int(first)
            while at < self._count and self._hashes[at] == wanted[place]:
                number = int(self._numbers[at])
                if not 0 <= number < self._count:
                    raise InputError(f"{self.folder / NUMBERS} is damaged; {_AGAIN}.")
                if self._passage(number).name == names[place]:
                    found[place] = number
                    break
                at += 1  # two names with one hash
        return found

    def matching(self, where: Where) -> np.ndarray:
        """bool `[passages]`: those whose metadata agree with every field of `where`.

        A field of `where` has one value, or a list, tuple or set of values of which one will do. A
        passage whose own field is a list agrees if one member of it does. The first call for a
        field reads the whole corpus; it keeps what it found in the folder.
        """
        kept = np.ones(self._count, bool)
        for field, values in where.items():
            kept &= self._columns.matching(field, values, (p.metadata for p in self))
        return kept

    def check_content(self) -> None:
        """Reads the whole corpus and compares it with its digest."""
        if sha256_of(self.folder / LINES).hexdigest() != self.digest:
            raise InputError(
                f"{self.folder / LINES} is not what {NAME} was written for (field digest); "
                "restore it from a backup, or write the corpus again."
            )

    def _passage(self, number: int) -> Passage:
        if not 0 <= number < self._count:
            raise IndexError(f"passage {number} of {self._count}")
        start = int(self._index[number - 1]["end"]) if number else 0
        end = int(self._index[number]["end"])
        if not start <= end <= self._size:
            raise InputError(f"{self.folder / INDEX}, passage {number}, is damaged; {_AGAIN}.")
        return self._parsed(number, os.pread(self._lines, end - start, start))

    def _parsed(self, number: int, line: bytes) -> Passage:
        try:
            name, title, text, metadata = json.loads(line)
            sound = all(type(each) is str for each in (name, title, text))
            sound = sound and type(metadata) is dict
        except (ValueError, TypeError, RecursionError):
            sound = False
        if not sound:
            raise InputError(f"{self.folder / LINES}, passage {number}, is damaged; {_AGAIN}.")
        return Passage(name, text, title, metadata)


def name_hash(name: str) -> int:
    """64 bits that tell most names apart."""
    data = name.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def sha256_of(path: Path) -> Any:
    """The hash of a file so far, as hashlib has it, to be continued."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest


def write_manifest(folder: Path, count: int, digest: str) -> None:
    """Makes the folder's files, which must be on disk, a corpus."""
    sizes = {name: (folder / name).stat().st_size for name in (LINES, INDEX, HASHES, NUMBERS)}
    said = {"format": FORMAT, "count": count, "digest": digest, "files": sizes}
    whole_files.write_whole(folder / NAME, json.dumps(said, indent=1) + "\n")


def _read_manifest(folder: Path) -> Mapping[str, Any]:
    path = folder / NAME
    again = "write the corpus again"
    try:
        said = bounded_json.load(path)
        form, sizes = said["format"], made(dict[str, int], said["files"])
        made(int, said["count"])
        made(str, said["digest"])
    except OSError:
        raise InputError(
            f"{folder} holds no finished corpus: {NAME} is missing; finish writing it, or give a "
            "folder that has one."
        ) from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} is damaged; restore it from a backup, or {again}.") from None
    if form != FORMAT:
        raise InputError(
            f"{path} has the format {form!r} (field format), but this version reads {FORMAT}; "
            f"{again} with it."
        )
    check_links(folder)
    check_sizes(folder, sizes, f"restore it from a backup, or {again}")
    counted = {INDEX: ENTRY, HASHES: HASH, NUMBERS: NUMBER}
    if any(sizes.get(n) != said["count"] * kind.itemsize for n, kind in counted.items()):
        raise InputError(
            f"{path} counts {said['count']} passages (field count), which is not what its files "
            f"hold; restore it from a backup, or {again}."
        )
    return said


def check_sizes(folder: Path, sizes: Mapping[str, int], fix: str) -> None:
    """Compares the files of a folder with their sizes in bytes.

    Args:
        fix: says in the error what the user can do.
    """
    for name, size in sizes.items():
        if not is_plain(name):
            raise InputError(
                f"{folder} has a manifest that names the file {bounded_json.shown(name)}, which is "
                f"no plain name of a file in this folder; {fix}."
            )
        path = folder / name
        try:
            found = path.stat().st_size
        except OSError:
            raise InputError(f"{path} is missing; {fix}.") from None
        if found != size:
            kind = "cut short: it has" if found < size else "not as it was written: it has"
            raise InputError(f"{path} is {kind} {found:,} bytes instead of {size:,}; {fix}.")


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    # An empty file cannot be mapped.
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r")
