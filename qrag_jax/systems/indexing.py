"""Builds an index of a corpus: the corpus is stored, its passages are embedded, part by part.

The folder has one part for the corpus and one for each engine over it:

    OUT/corpus       the passages (`retrieval.corpus`)
    OUT/source.json  which files they were read from
    OUT/exact        the vectors and their manifest, which is written last
    OUT/bm25         the index of words
    OUT/faiss, OUT/qdrant: further engines over the same vectors (`make_engine`)

The disk holds the corpus and the vectors, and nothing else that grows. What was killed goes on: the
corpus after its last passages that are known to be on disk, the vectors after their last finished
parts. With several hosts (`runtime.hosts`) the folder is on a disk that all of them see. The first
one stores the corpus, each embeds its share of the parts, and the first one writes the manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from qrag_jax.data.corpora import Columns, Read, corpus_files, read_corpus
from qrag_jax.errors import InputError, Natural, least, one_of
from qrag_jax.retrieval import bm25, corpus, index_folder
from qrag_jax.retrieval.corpus import CorpusWriter, StoredCorpus
from qrag_jax.retrieval.index_folder import (
    BM25,
    CORPUS,
    EXACT,
    FAISS,
    QDRANT,
    Manifest,
    PartNote,
    VectorParts,
    open_vectors,
    read_manifest,
    write_faiss,
)
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.retrieval.qdrant import QdrantIndex, QdrantSettings
from qrag_jax.rollouts.text_table import padded_rows
from qrag_jax.runtime import hosts, whole_files
from qrag_jax.runtime.config_fields import check
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.runtime.mesh import shard_batch
from qrag_jax.runtime.platform import Platform
from qrag_jax.systems.passage_encoder import PassageEncoder, PassageRows, Rows

SOURCE = "source.json"  # in the index's folder: which files the corpus was read from


@dataclasses.dataclass(frozen=True)
class CorpusSource:
    """Files of a corpus, and how they are read; see `IndexSettings` and `corpora.corpus_files`."""

    path: Path
    columns: Columns
    skip_empty: bool

    def about(self) -> dict[str, Any]:
        """What shows that a corpus is the one that was begun with."""
        stats = [(path.name, path.stat()) for path in corpus_files(self.path)]
        files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        columns = dataclasses.asdict(self.columns)
        about = {"files": files, "columns": columns, "skip_empty": self.skip_empty}
        return json.loads(json.dumps(about))

    def read(self) -> Iterator[Read | None]:
        """The records; None for one that is left out."""
        for read in read_corpus(self.path, self.columns):
            empty = self.skip_empty and not Passage(*read.document).whole
            yield None if empty else read

    def places(self, numbers: Sequence[int]) -> list[str]:
        """Where the passages of these numbers are in the files, which are read again."""
        kept = (read.where for read in self.read() if read is not None)
        found = [*itertools.islice(kept, max(numbers) + 1)]
        return [found[number] for number in numbers]


def store_corpus(source: CorpusSource | None, out: Path, stop: StopSignal) -> None:
    """Writes the corpus of an index from its source, or goes on with it; None: it is there."""
    folder, record = out / CORPUS, out / SOURCE
    whole_files.clean_partial(out, print)
    if source is None:
        return
    about = source.about()
    if record.exists() and json.loads(record.read_text(encoding="utf-8")) != about:
        if (folder / corpus.NAME).exists():
            raise InputError(
                f"{out} holds another corpus, or the files or --columns have changed since it was "
                "read; give another --index, or delete the folder."
            )
        shutil.rmtree(folder, ignore_errors=True)  # it is not finished, and has no vectors
    elif not record.exists() and folder.exists():
        raise InputError(
            f"{out} has a folder {CORPUS}, but no {SOURCE}; give another --index, or leave out "
            "--corpus to index the corpus that is there."
        )
    whole_files.write_whole(record, json.dumps(about, indent=1) + "\n")
    if (folder / corpus.NAME).exists():
        return
    bar = tqdm(desc="reading", unit=" passages", unit_scale=True)
    with CorpusWriter(folder) as writer, bar:
        done, skipped = len(writer), 0
        bar.update(done)
        for read in source.read():
            if read is None:
                skipped += 1
            elif done:
                done -= 1
            else:
                writer.add(Passage(*read.document), read.where)
                bar.update()
                stop.check()
        writer.finish(source.places)
    if skipped:
        print(f"{skipped} records without text were left out")


FURTHER = (FAISS, QDRANT)


def make_engine(
    engine: str, out: Path, corpus: StoredCorpus, settings: QdrantSettings, stop: StopSignal
) -> None:
    """Makes one of `FURTHER` in an index's folder, or goes on with it; what is whole stays."""
    about: dict[str, Any] = {"engine": EXACT, "corpus": corpus.digest, "count": len(corpus)}
    manifest, vectors = open_vectors(out / EXACT, **about)
    if engine == FAISS:
        try:
            about |= {"engine": FAISS, "encoder": manifest.encoder}
            read_manifest(out / FAISS, **about)
        except InputError:  # there is none, or one of other vectors
            write_faiss(out / FAISS, corpus, vectors, manifest.encoder)
        return
    with tqdm(total=len(corpus), desc="sending", unit=" passages", unit_scale=True) as bar:

        def report(passages: int) -> None:
            bar.update(passages - bar.n)
            stop.check()

        index = QdrantIndex.build(corpus, vectors, settings, manifest.encoder, report)
    index.save(out / QDRANT)
    print(f"the collection {settings.collection} at {settings.url} is filled")
    print("the server now builds its graph; until it has, searches are slower")


ENGINES = (EXACT, BM25, *FURTHER)
# Of --dtype: the numbers in the files, and those on the devices of a search. What int8 finds is
# scored again by the files.
DTYPES = {
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "int8": ("bfloat16", "int8"),
}
# Passages of a part, which are lost if the process is killed: seconds of work.
CPU_PART, ACCELERATOR_PART = 1024, 16_384
_PART_TOKENS = 2**27  # of a part, all rows as long as the longest: 0.5 GB
_TYPICAL = 2048  # passages by whose lengths blocks are chosen


@dataclasses.dataclass(frozen=True)
class IndexSettings:
    """How an index is built."""

    engine: Annotated[str, one_of(ENGINES)] = EXACT  # one of `ENGINES`
    qdrant: QdrantSettings = dataclasses.field(default_factory=QdrantSettings)
    dtype: Annotated[str, one_of(DTYPES)] = "float32"  # a name of `DTYPES`
    columns: Columns = dataclasses.field(default_factory=Columns)  # of the corpus' records
    language: str = "english"  # of the words, for the engine bm25 (`BM25Config.of_language`)
    skip_empty: bool = False  # passages without title and text are left out; else they are errors
    part: Natural = 0  # passages embedded and written at a time; 0: as many as suit the devices
    # Processes that tokenise; -1: as many as suit the devices; 0: threads do it. A program that
    # uses processes needs the line `if __name__ == "__main__":`
    workers: Annotated[int, least(-1)] = 0

    def __post_init__(self) -> None:
        check(self, "--")
        if self.engine == BM25:
            bm25.BM25Config.of_language(self.language)


class Indexed(NamedTuple):
    """A finished index, and what this call embedded."""

    corpus: StoredCorpus
    folder: Path  # of the engine, which holds the manifest
    embedded: int = 0  # passages
    tokens: int = 0  # of their rows, special ones included
    cut: int | None = None  # passages longer than a row, of all; None: it was finished before
    seconds: float = 0.0  # of embedding, from the first rows to the last file


def index_corpus(
    source: Path | None,
    out: Path,
    encoder: PassageEncoder | None,
    settings: IndexSettings | None = None,
    stop: StopSignal | None = None,
) -> Indexed:
    """Builds an index, or goes on with one that was begun.

    A finished index of the same corpus and encoder is returned as it is. All hosts call this.

    Args:
        source: file or folder of the corpus (see `corpora.corpus_files`); None: `out` has one.
        encoder: of the passages; None: the engine needs none, or the vectors are finished.
    """
    settings, stop = settings or IndexSettings(), stop or StopSignal()
    if settings.engine != BM25 and encoder is None and not vectors_are_finished(out):
        raise InputError(f"the engine {settings.engine} compares vectors; give an encoder.")
    fix = "wait until it ends, or end it, or give another --index"
    lock = whole_files.file_lock(out / ".lock", f"{out} is being written", fix, "--index")
    with lock if jax.process_index() == 0 else contextlib.nullcontext():
        how = settings.columns, settings.skip_empty
        files = None if source is None else CorpusSource(source, *how)
        hosts.first_does(lambda: store_corpus(files, out, stop))
        stored = StoredCorpus(out / CORPUS)
        if settings.engine == BM25:
            return _index_words(stored, out / BM25, settings.language)
        indexed = Indexed(stored, out / EXACT)
        if encoder is not None:
            indexed = _index_vectors(stored, out / EXACT, encoder, settings, stop)
        if settings.engine in FURTHER:
            hosts.first_does(
                lambda: make_engine(settings.engine, out, stored, settings.qdrant, stop)
            )
        return indexed._replace(folder=out / settings.engine)


def vectors_are_finished(out: Path) -> bool:
    """Whether an index's folder has all vectors, so that no encoder is needed."""
    return (out / EXACT / index_folder.NAME).exists()


def _index_words(stored: StoredCorpus, folder: Path, language: str) -> Indexed:
    config = bm25.BM25Config.of_language(language)

    def build() -> None:
        if (folder / index_folder.NAME).exists():
            return
        bm25.BM25Index.build(stored, config).save(folder)

    hosts.first_does(build)
    found = bm25.BM25Index.open(folder, stored)  # it fits, or is refused
    if found.config != config:
        raise InputError(
            f"{folder} holds words of another language than --language={language}, or read by "
            "another rule; give another --index, or delete that folder to index the words again."
        )
    return Indexed(stored, folder)


def _index_vectors(
    stored: StoredCorpus,
    folder: Path,
    encoder: PassageEncoder,
    settings: IndexSettings,
    stop: StopSignal,
) -> Indexed:
    made_of: Any = {"corpus": stored.digest, "encoder": encoder.digest()}
    number, storage = DTYPES[settings.dtype]
    of_all: Any = {"engine": EXACT, "count": len(stored), **made_of}
    about = Manifest(**of_all, settings={"storage": storage})
    on_cpu = Platform.of(encoder.mesh).on_cpu
    most = CPU_PART if on_cpu else ACCELERATOR_PART
    parts = VectorParts(
        folder,
        made_of,
        count=len(stored),
        part=settings.part or min(most, _PART_TOKENS // encoder.row_tokens),
        width=encoder.encoder.width,
        dtype=number,
    )
    if (folder / index_folder.NAME).exists():
        found = read_manifest(folder, **of_all)
        if found.dtype != number:
            raise InputError(
                f"{folder / index_folder.NAME} has {found.dtype!r} in the field dtype, but --dtype "
                f"is {settings.dtype}; give another --index, or delete {folder} to embed again."
            )
        if jax.process_index() == 0:
            parts.tidy()
            if found.settings != about.settings:
                changed = dataclasses.replace(found, settings=about.settings)
                index_folder.write_manifest(folder, changed)
        return Indexed(stored, folder)

    def begin() -> None:
        stored.check_content()
        parts.begin()
        whole_files.clean_partial(folder, print)

    hosts.first_does(begin)
    workers = settings.workers if settings.workers >= 0 else (0 if on_cpu else 4)
    how = encoder.tokenizer, encoder.form, encoder.title_separator
    rows = PassageRows(stored.folder, *how)
    now = _embed(encoder, parts, rows, workers, stop)
    notes = parts.finished()
    hosts.together("the parts are counted")  # what finishes them deletes the notes
    if len(notes) < len(parts.numbers):
        raise Stopped(stop.name or "another host's signal")
    if jax.process_index() == 0:
        parts.finish(about)
    hosts.together("the index is finished")
    return Indexed(stored, folder, *now[:2], sum(note.cut for note in notes.values()), now[2])


def _embed(
    encoder: PassageEncoder, parts: VectorParts, rows: PassageRows, workers: int, stop: StopSignal
) -> tuple[int, int, float]:
    """Embeds the parts that are not finished, one of each host at a time.

    Gives the passages and tokens that this call embedded on all hosts, and its seconds.
    """
    total, host, count = parts.count, jax.process_index(), jax.process_count()
    finished = set(parts.finished())
    # Where hosts compute together the vectors of a part depend on the other parts of its round.
    together = encoder.mesh.is_multi_process
    numbers = [number for number in parts.numbers if together or number not in finished]
    rounds = [numbers[start : start + count] for start in range(0, len(numbers), count)]
    rounds = [each for each in rounds if not finished.issuperset(each)]
    # A part beyond the last one has no passages.
    mine = [each[host] if host < len(each) else len(parts.numbers) for each in rounds]
    sizes = [sum(len(parts.passages(number)) for number in each) for each in rounds]
    typical = np.linspace(0, total - 1, min(total, _TYPICAL)).astype(np.int64)
    embed = encoder.embed(rows.of(typical).lengths)
    shape = (min(parts.part, total), encoder.row_tokens)

    def write(number: int, found: Rows, size: int, result: jax.Array) -> None:
        vectors = _own(result)[: len(found.lengths)]  # waits for it
        if number in parts.numbers:
            parts.write(number, vectors, PartNote(int(found.lengths.sum()), found.cut))
        bar.update(size)

    def dispatched() -> Iterator[Callable[[], None]]:
        """Begins to compute a part; gives what writes it."""
        devices, pad = encoder.mesh.local_mesh.size, encoder.encoder.pad_id
        tokenised = rows.ahead([parts.passages(number) for number in mine], workers)
        for number, found, size in zip(mine, tokenised, sizes, strict=True):
            given = padded_rows(found.each(), shape, devices, pad)
            result = embed(encoder.params, *shard_batch(encoder.mesh, given))
            yield partial(write, number, found, size, result)
            if hosts.any_of(stop.requested):
                return

    begun, done = time.perf_counter(), total - sum(sizes)
    how: Any = {"unit": " passages", "unit_scale": True, "disable": host > 0}
    with tqdm(total=total, initial=done, **how) as bar:
        # The device computes a part while the host writes the one before.
        for one, _ in itertools.pairwise(itertools.chain(dispatched(), [lambda: None])):
            one()
    hosts.together("all parts are written")
    seconds = time.perf_counter() - begun
    notes = parts.finished()
    new = [number for each in rounds for number in each if number in notes]
    passages = sum(len(parts.passages(number)) for number in new)
    return passages, sum(notes[number].tokens for number in new), seconds


def _own(result: jax.Array) -> np.ndarray:
    """The rows on this host's devices, in order."""
    if result.is_fully_addressable:
        return np.asarray(result)
    shards = sorted(result.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])
