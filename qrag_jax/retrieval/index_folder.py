"""The folder of an index: what it says of itself, and the engine that searches it.

The folder has `corpus`, the passages, and a folder for each engine that was built over it. Vectors
lie in `exact`, which the engines scan and faiss can search, too. The `manifest.json` of an engine
is written last: it says which corpus and encoder the files come from, and how large they are. An
index that does not fit what it is opened with is refused. This module needs no jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.protocol import Corpus, FusedIndex, Index, VectorIndex
from qrag_jax.retrieval.vectors import DTYPES, FaissIndex, ScanIndex, Vectors, check_finite, faiss
from qrag_jax.runtime import bounded_json, whole_files
from qrag_jax.runtime.whole_files import check_links, is_plain

CORPUS = "corpus"
# "exact": on jax's devices. "scan": NumPy on the host. "faiss": on processors. "qdrant": a server.
EXACT, SCAN, FAISS, QDRANT = OF_VECTORS = ("exact", "scan", "faiss", "qdrant")
# Words; words and vectors, fused by their ranks; words with AND, OR, NOT and phrases.
BM25, HYBRID, BOOLEAN = "bm25", "hybrid", "boolean"
OF_WORDS = (BM25, BOOLEAN)
ENGINES = (*OF_VECTORS, BM25, HYBRID, BOOLEAN)
# The folders that engines need, and from which they are else made in memory.
_NEEDS = {SCAN: [EXACT], HYBRID: [EXACT, BM25]}
_INSTEAD = {FAISS: EXACT, BOOLEAN: BM25}

FORMAT = 2
NAME = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Manifest:
    engine: str
    corpus: str  # its digest
    count: int  # passages
    encoder: str = ""  # a digest of the encoder and its settings; "" for engines that compare words
    width: int = 0  # of a vector; 0 for engines without
    dtype: str = ""  # of the numbers in the files, as NumPy names it; "" for engines without
    # Bytes of every file of the engine, in the engine's order.
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # The engine's own, as JSON has them.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read_said(path: Path, form: int, what: str) -> dict[str, Any]:
    """What a folder's manifest says, if the folder is whole and leads to no file outside of it."""
    folder = path.parent
    if not path.is_file():
        raise InputError(
            f"{folder} holds no finished {what}: {path.name} is missing; finish writing it, or "
            "give another folder."
        )
    check_links(folder)
    try:
        said = bounded_json.load(path)
        if (found := said.pop("format")) != form:
            raise ValueError(f"its format is {found!r:.60}, but this version reads {form}")
        for name, size in said["files"].items():
            if not is_plain(name):
                raise ValueError(f"it names {bounded_json.shown(name)}, which is no plain name")
            if (found := (folder / name).stat().st_size) != size:
                raise ValueError(f"{name} has {found:,} bytes instead of {size:,}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is damaged, or not that of the files ({error}); restore the folder from a "
            "backup, or delete it and write it again."
        ) from None
    return said


def read_manifest(folder: Path, **wanted: str | int | None) -> Manifest:
    """The folder's manifest. `wanted`: what fields must be, such as `engine="exact"`; None: any."""
    path = folder / NAME
    said = read_said(path, FORMAT, "index")
    said.pop("metric", None)  # of earlier versions; the engine says it
    manifest = Manifest(**said)
    for name, value in wanted.items():
        if value is not None and (found := getattr(manifest, name)) != value:
            raise InputError(
                f"{path} has {found!r:.100} in the field {name}, but {value!r} is asked for; give "
                "the corpus, the encoder and the engine that the index was built with, or build "
                "one of these."
            )
    return manifest


def emptied(folder: Path) -> Path:
    """The folder, without the files of an index that was there: no index until all are written.

    Files that are mapped stay what they were for those who map them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).unlink(missing_ok=True)
    for path in filter(Path.is_file, folder.iterdir()):
        path.unlink()
    return folder


def write_manifest(folder: Path, manifest: Manifest, files: Iterable[Path] = ()) -> None:
    """Makes the folder an index, of these files if there are any, which it waits for."""
    sizes = dict(manifest.files)
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sizes[path.name] = path.stat().st_size
    said = {"format": FORMAT} | dataclasses.asdict(manifest) | {"files": sizes}
    whole_files.write_whole(folder / NAME, json.dumps(said, indent=1) + "\n")


# ---------------------------------------------------------------- vectors
# Each file holds rows of numbers, little-endian, with nothing before them. A folder that is being
# filled has a file of vectors for each part that is finished, a note beside it, and `BUILDING`,
# which says what the vectors are made of: what was written stays if the process is killed. The
# manifest comes last, and only then is the folder an index; the notes and `BUILDING` then go. So
# the disk holds the vectors once, and no part is ever copied.

BUILDING, FAISS_FILE = "building.json", "index.faiss"


class Stored(NamedTuple):
    manifest: Manifest
    vectors: Vectors


def open_vectors(folder: Path, **wanted: str | int | None) -> Stored:
    manifest = read_manifest(folder, **wanted)
    dtype, width = DTYPES[manifest.dtype], manifest.width
    parts = [
        np.memmap(folder / name, dtype, "r").reshape(-1, width)
        for name, size in manifest.files.items()
        if size
    ]
    return Stored(manifest, Vectors(parts or [np.zeros((0, width), dtype)]))


class PartNote(NamedTuple):
    passages: int  # number of them
    tokens: int  # of all rows, special ones included
    cut: int  # number of passages that were longer than a row


@dataclasses.dataclass(frozen=True)
class VectorParts:
    """The parts of a folder.

    Attributes:
        made_of: what the vectors depend on; a folder begun with other values is refused.
    """

    folder: Path
    made_of: Mapping[str, str]
    count: int
    part: int  # passages of a part; the last one has the rest
    width: int
    dtype: str

    @property
    def numbers(self) -> range:
        return range(-(-self.count // self.part))

    def passages(self, number: int) -> range:
        """The numbers of the passages of a part; none beyond the last part."""
        return range(min(number * self.part, self.count), min((number + 1) * self.part, self.count))

    def begin(self) -> None:
        """Makes the folder, or goes on with one that was begun."""
        path, sizes = self.folder / BUILDING, {"passages": self.count, "part": self.part}
        wanted = {**self.made_of, **sizes, "width": self.width, "dtype": self.dtype}
        if not path.exists():
            whole_files.write_whole(path, json.dumps(wanted, indent=1) + "\n")
            return
        begun = bounded_json.load(path)
        if others := [name for name in wanted if begun.get(name) != wanted[name]]:
            raise InputError(
                f"{path} has another {' and another '.join(others)} than is asked for now; go on "
                "with what it was begun with, or delete the folder to begin again."
            )

    def finished(self) -> dict[int, PartNote]:
        found = {}
        for number in self.numbers:
            with contextlib.suppress(OSError, ValueError):  # missing, or torn
                note = PartNote(**bounded_json.load(self._note(number)))
                if self._path(number).stat().st_size == self._size(number):
                    found[number] = note
        return found

    def write(self, number: int, vectors: np.ndarray, note: PartNote) -> None:
        """Writes the vectors `[passages of the part, width]` of a part, then its note."""
        check_finite(vectors, str(self.folder), self.passages(number).start)
        with whole_files.replacing(self._path(number)) as file:
            file.write(np.ascontiguousarray(vectors.astype(DTYPES[self.dtype])).view(np.uint8).data)
        whole_files.write_whole(self._note(number), json.dumps(note._asdict()) + "\n")

    def finish(self, manifest: Manifest) -> None:
        """Writes the manifest, which names the parts in order, and deletes the notes."""
        files = {self._path(number).name: self._size(number) for number in self.numbers}
        size: dict[str, Any] = {"count": self.count, "width": self.width, "dtype": self.dtype}
        write_manifest(self.folder, dataclasses.replace(manifest, files=files, **size))
        self.tidy()

    def tidy(self) -> None:
        for number in self.numbers:
            self._note(number).unlink(missing_ok=True)
        (self.folder / BUILDING).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"vectors.{number}.{self.dtype}"

    def _note(self, number: int) -> Path:
        return self._path(number).with_suffix(f".{self.dtype}.json")

    def _size(self, number: int) -> int:
        return len(self.passages(number)) * self.width * DTYPES[self.dtype].itemsize


def write_faiss(
    folder: Path, corpus: Corpus, vectors: np.ndarray | Vectors, encoder: str = ""
) -> None:
    """Writes a further engine over vectors: an index as faiss has it."""
    index, path = FaissIndex(corpus, vectors).index, emptied(folder) / FAISS_FILE
    try:
        faiss().write_index(index, str(path))
    except RuntimeError as error:  # faiss has no other
        raise OSError(f"{path} cannot be written: {whole_files.reason(error)}") from None
    about = corpus.digest, len(corpus), encoder, index.d, "float32"
    write_manifest(folder, Manifest(FAISS, *about), [path])


# ---------------------------------------------------------------- opening


@dataclasses.dataclass(frozen=True)
class IndexAt:
    """An index, and what shall search it.

    Attributes:
        engine: one of `ENGINES`; "": the first one that the asker prefers and the folder has.
        url: of the Qdrant server, whose engine it asks for; "": where it was when the index was
            built.
    """

    folder: Path
    engine: str = ""
    url: str = ""

    def __post_init__(self) -> None:
        if self.url and self.engine not in ("", QDRANT):
            raise InputError(
                f"the URL of a Qdrant server is for the engine {QDRANT}, not for {self.engine}; "
                "leave one of them out."
            )
        if self.url:
            from qrag_jax.retrieval.qdrant import QdrantSettings

            QdrantSettings(self.url)  # refused before anything is loaded
            object.__setattr__(self, "engine", QDRANT)
        if self.engine not in ("", *ENGINES):
            raise InputError(f"engine is {self.engine!r}; use one of {', '.join(ENGINES)}.")

    def settled(self, usable: Sequence[str], otherwise: str) -> IndexAt:
        """The same with an engine that there is, and that the asker can use.

        Args:
            usable: the engines that the asker can use, the preferred one first.
            otherwise: what can be done where the folder has none of them.
        """
        there = [name for name in ENGINES if not self._missing(name)]
        if not there:
            raise InputError(
                f"{self.folder} holds no finished index; build one there with qrag index, or give "
                "another --index."
            )
        engine = self.engine or next((name for name in usable if name in there), there[0])
        if engine not in usable:
            compares = "words" if engine in OF_WORDS else "vectors"
            raise InputError(
                f"the engine {engine} of {self.folder} compares {compares}; {otherwise}."
            )
        if engine not in there:
            missing = " and ".join(self._missing(engine))
            raise InputError(
                f"{self.folder} holds no finished index of {missing}; build it there with qrag "
                f"index --engine=…, or give another --index or --engine ({', '.join(there)})."
            )
        return dataclasses.replace(self, engine=engine)

    @property
    def encoder(self) -> str:
        """The digest of what embedded the vectors."""
        own = self.engine not in (SCAN, HYBRID) and self._has(self.engine)
        return read_manifest(self.folder / (self.engine if own else EXACT)).encoder

    def open(self) -> Index:
        """Opens it; the engine is settled."""
        from qrag_jax.retrieval.corpus import StoredCorpus

        at, corpus = self.folder, StoredCorpus(self.folder / CORPUS)
        # Further engines over the vectors must be of their encoder.
        further = self.engine in (FAISS, QDRANT) and self._has(EXACT)
        by = read_manifest(at / EXACT).encoder if further else None
        match self.engine:
            case "exact":
                from qrag_jax.retrieval.exact import ExactIndex  # needs jax

                return ExactIndex.open(at / EXACT, corpus)
            case "scan":
                stored = open_vectors(at / EXACT, engine=EXACT, corpus=corpus.digest)
                return ScanIndex(corpus, stored.vectors)
            case "faiss":
                if self._has(FAISS):
                    read_manifest(at / FAISS, engine=FAISS, corpus=corpus.digest, encoder=by)
                    return FaissIndex(corpus, faiss().read_index(str(at / FAISS / FAISS_FILE)))
                stored = open_vectors(at / EXACT, engine=EXACT, corpus=corpus.digest)
                return FaissIndex(corpus, stored.vectors)
            case "qdrant":
                from qrag_jax.retrieval.qdrant import QdrantIndex

                return QdrantIndex.open(at / QDRANT, corpus, url=self.url, encoder=by)
            case "hybrid":
                return FusedIndex([IndexAt(at, BM25).open(), IndexAt(at, EXACT).open()])
        from qrag_jax.retrieval.bm25 import BM25Index
        from qrag_jax.retrieval.boolean_search import BooleanIndex

        if self.engine == BOOLEAN and self._has(BOOLEAN):
            return BooleanIndex.open(at / BOOLEAN, corpus)
        words = BM25Index.open(at / BM25, corpus)
        return words if self.engine == BM25 else BooleanIndex.over(words)

    def open_vectors(self) -> VectorIndex:
        return cast(VectorIndex, self.open())

    def _missing(self, engine: str) -> list[str]:
        """The indexes that the folder lacks for an engine."""
        needs = _NEEDS.get(engine, [engine])
        if engine in _INSTEAD and not self._has(engine):
            needs = [_INSTEAD[engine]]
        return [name for name in needs if not self._has(name)]

    def _has(self, name: str) -> bool:
        return (self.folder / name / NAME).is_file()
