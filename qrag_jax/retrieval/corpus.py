"""A corpus in a folder: passages on disk, read one by one at random.

`passages.jsonl` has one JSON list `[name, title, text, metadata]` a line. `passages.index` has 16
bytes for each: where its line ends, and a hash of its name. The manifest is written last, and a
folder without it is no corpus.

A file of offsets and not ArrayRecord, which grain reads: of a million passages of 600 bytes, 100 at
random took 0.2 ms and not 2 ms, they were written as fast, and such files can be appended to.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.data.sample import letters
from qrag_jax.errors import InputError
from qrag_jax.retrieval.index_folder import CORPUS, NAME, Manifest, read_manifest, write_manifest
from qrag_jax.retrieval.protocol import NONE, Passage, Where
from qrag_jax.runtime import whole_files

LINES, INDEX = "passages.jsonl", "passages.index"
KEEP_EVERY = 100_000  # passages that are made durable together
ENTRY = np.dtype([("end", "<u8"), ("name", "<u8")])  # of `INDEX`
COLUMNS = "columns"
ABSENT = -1  # the code of passages without the field
_AS_JSON = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
).encode
# A field of all passages' metadata: int32 `[passages]`, the code of each passage's value, `ABSENT`
# where it has not the field; the number of codes; and what a value is found by (see `keys_of`) →
# the codes of the values that have it.
Column = tuple[np.ndarray, int, Mapping[str, Sequence[int]]]


class StoredCorpus:
    """The passages of a folder, in the order of their numbers. Several threads may read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = read_manifest(folder, engine=CORPUS)
        self.digest = manifest.corpus  # of all names, titles, texts and metadata, in order
        self._count = manifest.count
        self._lines = os.open(folder / LINES, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._lines)
        self._index = np.memmap(folder / INDEX, ENTRY, "r")
        self._columns: dict[str, Column] = {}
        self._fields: set[str] | None = None  # that passages have; None: unknown

    def __len__(self) -> int:
        return self._count

    def passages(self, numbers: Sequence[int] | np.ndarray) -> list[Passage]:
        return [self._passage(int(number)) for number in numbers]

    def __iter__(self) -> Iterator[Passage]:
        # From the file that is open: the folder may hold another corpus by now.
        return map(self._passage, range(self._count))

    def numbers(self, names: Sequence[str]) -> np.ndarray:
        """int64 `[len(names)]`: the passages' numbers; `NONE` where no passage has the name."""
        hashes, numbers = self._by_hash
        places = np.full(len(names), NONE, np.int64)
        for place, name in enumerate(names):
            wanted = np.uint64(name_hash(name))
            low, high = (np.searchsorted(hashes, wanted, side) for side in ("left", "right"))
            for number in numbers[low:high]:  # several names may have one hash
                if self._passage(int(number)).name == name:
                    places[place] = number
        return places

    @functools.cached_property
    def _by_hash(self) -> tuple[np.ndarray, np.ndarray]:
        return by_hash(self._index)

    def matching(self, where: Where) -> np.ndarray:
        """bool `[passages]`: those whose metadata agree with every field of `where`.

        A field of `where` has one value, or a list, tuple or set of values of which one will do. A
        passage whose own field is a list agrees if one member of it does. The first call for a
        field reads the whole corpus; it keeps what it found in the folder.
        """
        kept = np.ones(self._count, bool)
        for field, wanted in where.items():
            if field not in self._columns:
                self._columns[field] = self._column(field)
            codes, count, codes_of = self._columns[field]
            good = np.zeros(count + 1, bool)  # the last place is that of `ABSENT`
            for key in wanted_keys(wanted):
                good[list(codes_of.get(key, ()))] = True
            kept &= good[codes]
        return kept

    def _passage(self, number: int) -> Passage:
        if not 0 <= number < self._count:
            raise IndexError(f"passage {number} of {self._count}")
        start = int(self._index[number - 1]["end"]) if number else 0
        end = int(self._index[number]["end"])
        name, title, text, metadata = json.loads(os.pread(self._lines, end - start, start))
        return Passage(name, text, title, metadata)

    def _column(self, field: str) -> Column:
        """From the folder; the first time it is made, and kept there if possible."""
        path = self.folder / COLUMNS / f"{name_hash(field):x}.{self.digest[:16]}.npz"
        if path.exists():
            with np.load(path) as kept:
                codes, values = kept["codes"], json.loads(str(kept["values"]))
        else:
            codes, values = self._codes(field)
            if (self.folder / NAME).exists():  # else it was deleted, and would be made again
                with contextlib.suppress(OSError), whole_files.replacing(path) as file:
                    np.savez(file, codes=codes, values=json.dumps(values))
        codes_of: dict[str, list[int]] = {}
        for code, value in enumerate(values):
            for key in keys_of(value):
                codes_of.setdefault(key, []).append(code)
        return codes, len(values), codes_of

    def _codes(self, field: str) -> tuple[np.ndarray, list[Any]]:
        """Reads the corpus. Its fields are known then, so one that no passage has is refused."""
        if self._fields is not None and field not in self._fields:
            raise unknown_field(field, self.folder)
        codes, names = np.full(self._count, ABSENT, np.int32), set[str]()
        known: dict[str, int] = {}
        values: list[Any] = []
        for number, passage in enumerate(self):
            names.update(passage.metadata)
            if field in passage.metadata:
                value = passage.metadata[field]
                code = known.setdefault(_key(value), len(values))
                if code == len(values):
                    values.append(value)
                codes[number] = code
        self._fields = names
        if not values:
            raise unknown_field(field, self.folder)
        return codes, values


def by_hash(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of all names in order, and the numbers of their passages."""
    hashes = np.array(index["name"])
    order = np.argsort(hashes, kind="stable")
    return hashes[order], order


def name_hash(name: str) -> int:
    """64 bits that tell most names apart."""
    data = name.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class CorpusWriter:
    """Appends passages to a corpus that is not finished.

    Passages are durable every `KEEP_EVERY` and when the `with` block ends; a later writer in the
    same folder goes on after the last durable one, and `len` says how many there are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with contextlib.ExitStack() as stack:
            stack.enter_context(whole_files.file_lock(folder / whole_files.LOCK, folder, "folder"))
            if (folder / NAME).exists():
                raise InputError(f"{folder} holds a corpus ({NAME}); give another, or delete it.")
            self._lines, self._index = (
                stack.enter_context((folder / name).open("ab+")) for name in (LINES, INDEX)
            )
            self._count, self._end = self._index.tell() // ENTRY.itemsize, 0
            self._index.truncate(self._count * ENTRY.itemsize)
            if self._count:
                self._index.seek(-ENTRY.itemsize, os.SEEK_END)
                self._end = int(np.frombuffer(self._index.read(), ENTRY)["end"][0])
            self._lines.truncate(self._end)
            self._lines.seek(0)
            self._digest = hashlib.file_digest(self._lines, "sha256")
            self._entries: list[tuple[int, int]] = []
            self._open = stack.pop_all()

    def __len__(self) -> int:
        return self._count

    def add(self, passage: Passage, where: str = "") -> int:
        name, text, title, metadata = passage
        at = f"{where or f'{self.folder}, passage {self._count}'}, with the id {name!r},"
        texts = all(isinstance(part, str) for part in (name, text, title))
        if not texts or not name.strip() or not passage.whole:
            raise InputError(f"{at} has no text or id; give both, in quotes, or leave it out.")
        try:
            said = _AS_JSON([name, title, text, dict(metadata)])
        except (TypeError, ValueError) as error:
            raise InputError(f"{at}: JSON cannot hold its metadata ({error}).") from None
        # A text may have half of a pair of surrogates, which UTF-8 has not.
        line = said.encode("utf-8", "surrogatepass") + b"\n"
        self._lines.write(line)
        self._digest.update(line)
        self._end += len(line)
        self._entries.append((self._end, name_hash(name)))
        self._count += 1
        if self._count % KEEP_EVERY == 0:
            self._keep()
        return self._count - 1

    def finish(
        self, places: Callable[[Sequence[int]], Sequence[str]] | None = None
    ) -> StoredCorpus:
        """Makes the folder a corpus, and opens it; `places` says where passages come from."""
        if not self._count:
            raise InputError(f"{self.folder} has no passage; a corpus holds one at least.")
        self._keep()
        index = np.memmap(self.folder / INDEX, ENTRY, "r")
        hashes, order = by_hash(index)
        same = np.flatnonzero(hashes[1:] == hashes[:-1])
        seen: dict[str, int] = {}
        with (self.folder / LINES).open("rb") as lines:
            # Of names with one hash, which may be different, in the order of their numbers.
            for number in order[np.union1d(same, same + 1)].tolist():
                lines.seek(int(index["end"][number - 1]) if number else 0)
                name = json.loads(lines.readline())[0]
                both = [seen.setdefault(name, number), number]
                if both[0] != number:
                    where = f"{self.folder}: the passages {both[0]} and {both[1]}, counted from 0,"
                    raise InputError(
                        f"{' and '.join(places(both)) if places else where} both have the id "
                        f"{name!r}; give each its own, and write the corpus from its beginning."
                    )
        manifest = Manifest(CORPUS, self._digest.hexdigest(), self._count)
        write_manifest(self.folder, manifest, [self.folder / LINES, self.folder / INDEX])
        return StoredCorpus(self.folder)

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(self, *error: object) -> None:
        with self._open:
            if not (self.folder / NAME).exists():  # it is not finished
                self._keep()

    def _keep(self) -> None:
        """Waits for the lines, and only then for the index, which says how far they are whole."""
        self._lines.flush()
        os.fsync(self._lines.fileno())
        self._index.write(np.array(self._entries, ENTRY).tobytes())
        self._entries.clear()
        self._index.flush()
        os.fsync(self._index.fileno())


def write_corpus(folder: Path, passages: Iterable[Passage]) -> StoredCorpus:
    """Writes a whole corpus at once; see `CorpusWriter`."""
    with CorpusWriter(folder) as writer:
        for passage in passages:
            writer.add(passage)
        return writer.finish()


def unknown_field(field: str, where: object) -> InputError:
    """The error for a field that no passage of a corpus has; `where` names the corpus."""
    return InputError(
        f"where: no passage of {where} has the field {field!r} in its metadata; name another."
    )


def _key(value: Any) -> str:
    """Equal for values that are equal as JSON has them; 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True, default=str)


def keys_of(value: Any) -> set[str]:
    """What a passage's field is found by: its key, or those of its members if it is a list."""
    return {_key(member) for member in value} if isinstance(value, list) else {_key(value)}


def wanted_keys(wanted: Any) -> set[str]:
    """The keys of which a passage must have one; `wanted` as in `matching`."""
    several = isinstance(wanted, list | tuple | set | frozenset)
    return {_key(value) for value in (wanted if several else (wanted,))}


# ---------------------------------------------------------------------- passages by their text

_WORD = re.compile(r"\w+")
_LONGEST = 40  # letters of an id before the hash
_DIGITS = 8  # of the hash, in hex


def names_of(corpus: Iterable[Passage], texts: Iterable[str]) -> dict[str, str]:
    """The ids of the passages that have these texts, by text; the others are left out.

    Data sets write one passage in several ways ("Title. Text", "Title Text"), so letters and digits
    alone are compared. Of passages with the same ones the first counts. All passages are read.
    """
    wanted: dict[str, list[str]] = {}
    for text in set(texts):
        wanted.setdefault(letters(text), []).append(text)
    names: dict[str, str] = {}
    for passage in corpus if wanted else ():
        for text in wanted.pop(letters(passage.whole), ()):
            names[text] = passage.name
        if not wanted:
            break
    return names


def pooled(passages: Iterable[Passage]) -> list[Passage]:
    """The different passages, in the order in which they come, with ids of their content."""
    by_text: dict[tuple[str, str], Passage] = {}
    for passage in passages:
        title, text = passage.title, passage.text
        # A passage without letters is distinguished from others by its marks.
        key = (letters(title), letters(text)) if letters(passage.whole) else (title, text)
        if key in by_text:
            continue
        words = "-".join(_WORD.findall((title or text).casefold()))[:_LONGEST]
        digest = hashlib.blake2b(f"{title}\0{text}".encode(), digest_size=_DIGITS // 2)
        by_text[key] = Passage(f"{words.rstrip('-')}-{digest.hexdigest()}".lstrip("-"), text, title)
    return [*by_text.values()]
