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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.columns import Columns
from qrag_jax.retrieval.manifest import read_said
from qrag_jax.retrieval.protocol import NONE, Passage, Where
from qrag_jax.runtime import whole_files

FORMAT = 1  # of all files of the folder
LINES, INDEX = "passages.jsonl", "passages.index"
HASHES, NUMBERS = "names.hashes", "names.numbers"
NAME = "corpus.json"
ENTRY = np.dtype([("end", "<u8"), ("name", "<u8")])  # of `INDEX`
HASH, NUMBER = np.dtype("<u8"), np.dtype("<i8")
_PIECE = 2**24


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
        said = read_said(folder / NAME, FORMAT, "corpus")
        self.digest: str = said["digest"]
        self._count: int = said["count"]
        self._lines = os.open(folder / LINES, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._lines)
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
                if self._passage(int(self._numbers[at])).name == names[place]:
                    found[place] = self._numbers[at]
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
        name, title, text, metadata = json.loads(os.pread(self._lines, end - start, start))
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


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    # An empty file cannot be mapped.
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r")
