"""The folder of an index: what it says of itself, and the engine that searches it.

The folder has `corpus`, the passages, and a folder for each engine that was built over it. Vectors
lie in `exact`, which the engines scan and faiss can search, too. The `manifest.json` of each is
written last: it says which corpus and encoder the files come from, and how large they are. What
does not fit what it is opened with is refused. This module needs no jax.

When an index grows, all this is written again into a folder within, `version-2` and so on, and the
file `current` then names that one: whoever opens the index has all of one version. The version
before stays until the next change, for those who have it open or are opening it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from qrag_jax.errors import InputError, Rule
from qrag_jax.retrieval.protocol import FusedIndex
from qrag_jax.retrieval.vectors import DTYPES, ScanIndex, check_finite
from qrag_jax.runtime import bounded_json, whole_files
from qrag_jax.runtime.whole_files import check_links, is_plain

CORPUS = "corpus"
# "exact": on jax's devices. "scan": NumPy on the host. "faiss": on processors. Others: servers.
OF_VECTORS = EXACT, SCAN, FAISS, QDRANT, MILVUS = ("exact", "scan", "faiss", "qdrant", "milvus")
# Words; words with AND, OR, NOT and phrases; words and vectors, fused by their ranks.
BM25, BOOLEAN, MILVUS_BM25, HYBRID = "bm25", "boolean", "milvus_bm25", "hybrid"
OF_WORDS = (BM25, BOOLEAN, MILVUS_BM25)
ENGINES = (*OF_VECTORS, *OF_WORDS, HYBRID)
SERVERS = (QDRANT, MILVUS, MILVUS_BM25)
# The folders that engines need, if not their own.
_NEEDS = {SCAN: [EXACT], HYBRID: [EXACT, BM25], BOOLEAN: [BM25]}

FORMAT = 3
NAME = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Manifest:
    engine: str  # or "corpus"
    corpus: str  # its digest
    count: int  # passages
    encoder: str = ""  # a digest of the encoder and its settings; "" for engines that compare words
    width: int = 0  # of a vector; 0 for engines without
    dtype: str = ""  # of the numbers in the files, as NumPy names it; "" for engines without
    # Bytes of every file of the engine, in the engine's order.
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # The engine's own, as JSON has them.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    format: Annotated[int, Rule(FORMAT.__eq__, f"this version reads {FORMAT}")] = FORMAT


def read_manifest(folder: Path, **wanted: str | int | None) -> Manifest:
    """The manifest of a folder that is whole and leads to no file outside of it.

    `wanted`: what fields must be, such as `engine="exact"`; None: any.
    """
    path = folder / NAME
    if not path.is_file():
        raise InputError(f"{folder} lacks {NAME}; finish it, or give another folder.")
    check_links(folder)
    try:
        manifest = bounded_json.typed(Manifest, bounded_json.content(path))
        for name, size in manifest.files.items():
            if not is_plain(name):
                raise ValueError(f"it names {bounded_json.shown(name)}, which is no plain name")
            if (there := (folder / name).stat().st_size) != size:
                raise ValueError(f"{name} has {there:,} bytes instead of {size:,}")
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} is damaged ({error}); restore the folder, or delete it and write it again."
        ) from None
    for name, value in wanted.items():
        if value is not None and (actual := getattr(manifest, name)) != value:
            raise InputError(
                f"{path} has {actual!r:.100} in the field {name}, but {value!r} is asked for; give "
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
    said = dataclasses.asdict(manifest) | {"files": sizes}
    whole_files.write_whole(folder / NAME, json.dumps(said, indent=1) + "\n")


# ---------------------------------------------------------------- versions

CURRENT, VERSION = "current", "version-"


def version(folder: Path) -> Path:
    """The folder in which an index's corpus and engines are now: itself, or one within."""
    path = folder / CURRENT
    if not path.is_file():
        return folder
    name = path.read_text(encoding="utf-8").strip()
    if not is_plain(name):
        raise InputError(f"{path} names no folder; restore it from a backup.")
    return folder / name


def next_version(folder: Path) -> Path:
    """Where the next version is written."""
    now = version(folder)
    number = 1 if now == folder else int(now.name.removeprefix(VERSION))
    return folder / f"{VERSION}{number + 1}"


def delete_others(folder: Path) -> None:
    """Deletes all versions but the current and the next one."""
    now = version(folder)
    older = {*folder.glob(f"{VERSION}*")} - {now, next_version(folder)}
    if now != folder:
        older |= {folder / name for name in (CORPUS, *ENGINES)}
    for path in older:
        shutil.rmtree(path, ignore_errors=True)


def switch(folder: Path, following: Path) -> None:
    """Makes a version that is whole the current one."""
    whole_files.write_whole(folder / CURRENT, f"{following.name}\n")


# ---------------------------------------------------------------- vectors
# One file holds rows of numbers, little-endian, with nothing before them. In a folder that is being
# filled, each part of it that is finished has a note, and `BUILDING` says what the vectors are made
# of: what was written stays if the process is killed. The manifest comes last, and only then is the
# folder an index; the notes and `BUILDING` then go.

BUILDING = "building.json"


def open_vectors(folder: Path, **wanted: str | int | None) -> tuple[Manifest, np.ndarray]:
    """The vectors `[passages, width]`, mapped."""
    manifest = read_manifest(folder, **wanted)
    (name,) = manifest.files
    shape = manifest.count, manifest.width
    return manifest, np.memmap(folder / name, DTYPES[manifest.dtype], "r", shape=shape)


@dataclasses.dataclass(frozen=True)
class VectorParts:
    """The vectors of a folder, which are written part by part."""

    folder: Path
    about: Manifest  # of the index that they become; a folder begun with other values is refused
    part: int  # passages of a part; the last one has the rest
    first: int = 0  # the first part's first passage; the vectors before it are there already

    @property
    def numbers(self) -> range:
        return range(-(-(self.about.count - self.first) // self.part))

    def passages(self, number: int) -> range:
        """The numbers of the passages of a part; none beyond the last part."""
        start, count = self.first + number * self.part, self.about.count
        return range(min(start, count), min(start + self.part, count))

    def begin(self, there: Iterable[np.ndarray] = ()) -> None:
        """Makes the folder, or goes on with one that was begun.

        `there`: the vectors before `first`, block by block.
        """
        path, about = self.folder / BUILDING, self.about
        wanted = {name: getattr(about, name) for name in ("corpus", "encoder", "width", "dtype")}
        wanted |= {"passages": about.count, "part": self.part}
        if not path.exists():
            whole_files.write_whole(path, json.dumps(wanted, indent=1) + "\n")
        begun = json.loads(path.read_text())
        for name, value in wanted.items():
            if begun.get(name) != value:
                raise InputError(
                    f"{path} was begun with {name} {begun.get(name)!r:.100}, and now {name} is "
                    f"{value!r}; give the value from before, or delete {self.folder} to begin "
                    "again."
                )
        size = about.count * about.width * self._dtype.itemsize
        if not self._file.exists() or self._file.stat().st_size != size:
            for number in self.numbers:
                self._note(number).unlink(missing_ok=True)
            with whole_files.replacing(self._file) as file:
                for rows in there:
                    file.write(rows.astype(self._dtype).tobytes())
                file.truncate(size)

    def finished(self) -> dict[int, int]:
        """The parts that are finished, with the number of passages that were cut."""
        paths = {number: self._note(number) for number in self.numbers}
        there = {number: path for number, path in paths.items() if path.exists()}
        return {number: json.loads(path.read_text())["cut"] for number, path in there.items()}

    def write(self, number: int, vectors: np.ndarray, cut: int) -> None:
        """Writes the vectors `[passages of the part, width]` of a part, then its note."""
        check_finite(vectors, str(self.folder), self.passages(number).start)
        rows = vectors.astype(self._dtype)
        with self._file.open("r+b") as file:  # hosts may write other parts at the same time
            file.seek(self.passages(number).start * self.about.width * rows.itemsize)
            file.write(rows.tobytes())
            file.flush()
            os.fsync(file.fileno())
        whole_files.write_whole(self._note(number), json.dumps({"cut": cut}) + "\n")

    def finish(self) -> None:
        """Writes the manifest and deletes the notes."""
        write_manifest(self.folder, self.about, [self._file])
        self.tidy()

    def tidy(self) -> None:
        for number in self.numbers:
            self._note(number).unlink(missing_ok=True)
        (self.folder / BUILDING).unlink(missing_ok=True)

    @property
    def _dtype(self) -> np.dtype:
        return DTYPES[self.about.dtype]

    @property
    def _file(self) -> Path:
        return self.folder / f"vectors.{self.about.dtype}"

    def _note(self, number: int) -> Path:
        return self.folder / f"vectors.{number}.json"


# ---------------------------------------------------------------- opening


@dataclasses.dataclass(frozen=True)
class IndexAt:
    """An index, and what shall search it."""

    folder: Path  # of the index, whose current version it becomes
    engine: str = ""  # one of `ENGINES`; "": the first that the asker prefers and the folder has
    url: str = ""  # of the engine's server; "": as when it was built
    storage: str = ""  # numbers on jax's devices, see `exact.STORAGES`; "": as when it was built

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", version(self.folder))
        if self.url and self.engine not in SERVERS:
            raise InputError(
                f"the URL of a server is for the engines {', '.join(SERVERS)}, not for "
                f"{self.engine or 'the usual one'}; give --engine, or leave the URL out."
            )
        if self.engine not in ("", *ENGINES):
            raise InputError(f"engine is {self.engine!r}; use one of {', '.join(ENGINES)}.")

    def settled(self, usable: Sequence[str], otherwise: str) -> IndexAt:
        """The same with an engine that the folder has and that is `usable`, the first of them.

        `otherwise` is what can be done where the folder has none of them.
        """
        there = [name for name in ENGINES if not self._missing(name)]
        preferred = [name for name in usable if name in there]
        engine = self.engine or [*preferred, *there, *usable][0]
        if engine not in usable:
            compares = "words" if engine in OF_WORDS else "vectors"
            raise InputError(f"engine {engine} of {self.folder} compares {compares}; {otherwise}.")
        if engine not in there:
            missing, others = " and ".join(self._missing(engine)), ", ".join(there)
            raise InputError(
                f"{self.folder} holds no finished index of {missing}; build it there with qrag "
                f"index, or give another --index or --engine ({others or 'none is there'})."
            )
        return dataclasses.replace(self, engine=engine)

    @property
    def encoder(self) -> str:
        """The digest of what embedded the vectors."""
        has_engine = self.engine not in (SCAN, HYBRID) and self._has(self.engine)
        return read_manifest(self.folder / (self.engine if has_engine else EXACT)).encoder

    def open(self) -> Any:
        """Opens the engine, which is settled: a `protocol.Index`, of vectors a `VectorIndex`."""
        from qrag_jax.retrieval.corpus import StoredCorpus

        at, corpus = self.folder, StoredCorpus(self.folder / CORPUS)
        # Further engines over the vectors must be of their encoder.
        further = self.engine in (FAISS, QDRANT, MILVUS) and self._has(EXACT)
        by = read_manifest(at / EXACT).encoder if further else None
        if self.engine == EXACT:
            from qrag_jax.retrieval.exact import ExactIndex  # needs jax

            return ExactIndex.open(at / EXACT, corpus, storage=self.storage)
        if self.engine in SERVERS:
            from qrag_jax.retrieval.server_index import server_engine

            kind = server_engine(self.engine)
            return kind.open(at / self.engine, corpus, url=self.url, encoder=by)
        if self.engine == HYBRID:
            return FusedIndex(
                *(dataclasses.replace(self, engine=name).open() for name in (EXACT, BM25))
            )
        about: dict[str, Any] = {"engine": EXACT, "corpus": corpus.digest}
        if self.engine == SCAN:
            return ScanIndex(corpus, open_vectors(at / EXACT, **about)[1])
        if self.engine == FAISS:
            from qrag_jax.retrieval.faiss_index import FaissIndex

            vectors = open_vectors(at / EXACT, **about)[1] if self._has(EXACT) else None
            if self._has(FAISS):
                return FaissIndex.open(at / FAISS, corpus, vectors, encoder=by)
            assert vectors is not None  # it is settled
            return FaissIndex.build(corpus, vectors)
        from qrag_jax.retrieval.bm25 import BM25Index
        from qrag_jax.retrieval.boolean_search import BooleanIndex

        words = BM25Index.open(at / BM25, corpus)
        if self.engine == BM25:
            return words
        # A search writes nothing into an index, which may be another user's.
        key = hashlib.sha256(f"{corpus.digest} {words.config}".encode()).hexdigest()[:16]
        return BooleanIndex(words, whole_files.default_cache() / BOOLEAN / key)

    def _missing(self, engine: str) -> list[str]:
        """The indexes that the folder lacks for an engine."""
        needs = _NEEDS.get(engine, [engine])
        if engine == FAISS and not self._has(FAISS):
            needs = [EXACT]  # it is made in memory
        return [name for name in needs if not self._has(name)]

    def _has(self, name: str) -> bool:
        return (self.folder / name / NAME).is_file()
