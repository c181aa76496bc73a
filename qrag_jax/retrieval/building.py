"""What an index is made of besides vectors: its settings, the stored corpus, words, other engines.

`systems.indexing` embeds the passages, and brings all of it into one folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from tqdm import tqdm

from qrag_jax.data.corpora import Columns, corpus_files, read_corpus
from qrag_jax.errors import InputError, Natural, least, one_of
from qrag_jax.retrieval import bm25, corpus, index_folder
from qrag_jax.retrieval.corpus import CorpusWriter, StoredCorpus
from qrag_jax.retrieval.index_folder import BM25, CORPUS, EXACT, FAISS, MILVUS_BM25, SERVERS
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.runtime import hosts, whole_files
from qrag_jax.runtime.config_fields import check, internal
from qrag_jax.runtime.interrupt import StopSignal

SOURCE = "source.json"  # in the index's folder: which files the corpus was read from
FURTHER = (FAISS, *SERVERS)
ENGINES = (EXACT, BM25, *FURTHER)
BY_WORDS = (BM25, MILVUS_BM25)  # those of them that need no vectors
# Of --dtype: the numbers in the files, and those on the devices of a search. What int8 finds is
# scored again by the files.
DTYPES = {
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "int8": ("bfloat16", "int8"),
}


@dataclasses.dataclass(frozen=True)
class IndexSettings:
    engine: Annotated[str, one_of(ENGINES)] = EXACT  # one of `ENGINES`
    server: Any = None  # `ServerSettings`; None: the usual
    # A factory string of faiss or the file of an index; "": as before, or flat.
    faiss: str = ""
    faiss_search: str = ""  # parameters of its search, such as nprobe=64; "": as before
    dtype: Annotated[str, one_of(DTYPES)] = "float32"  # a name of `DTYPES`
    columns: Columns = dataclasses.field(default_factory=Columns)  # of the corpus' records
    language: str = "english"  # of the words, for the engine bm25 (`BM25Config.of_language`)
    words: bm25.BM25Config | None = internal(None)  # how they are read and weighed in its place
    skip_empty: bool = False  # passages without title and text are left out; else they are errors
    part: Natural = 0  # passages embedded and written at a time; 0: as many as suit the devices
    # Processes that tokenise; -1: as many as suit the devices; 0: threads do it. A program that
    # uses processes needs the line `if __name__ == "__main__":`
    workers: Annotated[int, least(-1)] = 0

    def __post_init__(self) -> None:
        check(self, "--")
        if self.engine in BY_WORDS:
            self.reading()

    def reading(self) -> bm25.BM25Config:
        """How words are read and weighed, by the language if need be; an unknown one is refused."""
        return self.words or bm25.BM25Config.of_language(self.language)


def read_passages(path: Path, settings: IndexSettings) -> Iterator[tuple[str, Passage | None]]:
    """The passages of a corpus, with their places in its files; None for one that is left out."""
    for where, passage in read_corpus(path, settings.columns):
        yield where, None if settings.skip_empty and not passage.whole else passage


def read_from(source: Path | None, settings: IndexSettings) -> dict[str, Any]:
    """Tells what passages are read from, as JSON has it; None: from no file."""
    stats = [(path.name, path.stat()) for path in corpus_files(source)] if source else []
    about = {
        "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        "columns": dataclasses.asdict(settings.columns),
        "skip_empty": settings.skip_empty,
    }
    return json.loads(json.dumps(about))


def store_corpus(
    read: Callable[[], Iterator[tuple[str, Passage | None]]],
    about: dict[str, Any],
    record: Path,
    stop: StopSignal,
) -> None:
    """Writes the corpus of an index next to `record`, or goes on with it.

    Args:
        read: gives all passages, as `read_passages`.
        about: tells what they are read from.
    """
    out, folder = record.parent, record.parent / CORPUS
    if record.exists() and json.loads(record.read_text(encoding="utf-8")) != about:
        if (folder / corpus.NAME).exists():
            raise InputError(
                f"{out} holds another corpus, or the files or --columns have changed since it was "
                "read; give those from before, or another --index, or delete the folder."
            )
        shutil.rmtree(folder, ignore_errors=True)  # it is not finished, and has no vectors
    elif not record.exists() and folder.exists():
        raise InputError(
            f"{out} has a {CORPUS} without {SOURCE}; leave out --corpus, or give another --index."
        )
    whole_files.write_whole(record, json.dumps(about, indent=1) + "\n")
    if (folder / corpus.NAME).exists():
        return
    bar = tqdm(desc="reading", unit=" passages", unit_scale=True)
    with CorpusWriter(folder) as writer, bar:
        done, skipped = len(writer), 0
        bar.update(done)
        for where, passage in read():
            if passage is None:
                skipped += 1
            elif done:
                done -= 1
            else:
                writer.add(passage, where)
                bar.update()
                stop.check()

        def places(numbers: Sequence[int]) -> list[str]:
            """Where these passages are in the files, which are read again."""
            kept = (where for where, passage in read() if passage)
            first = [*itertools.islice(kept, max(numbers) + 1)]
            return [first[number] for number in numbers]

        writer.finish(places)
    if skipped:
        print(f"{skipped} records without text were left out")


def make_engine(
    out: Path, corpus: StoredCorpus, index_settings: IndexSettings, stop: StopSignal
) -> None:
    """Makes one of `FURTHER` in an index's folder, or goes on with it; what is whole stays."""
    from qrag_jax.retrieval.faiss_index import FILE, FLAT
    from qrag_jax.retrieval.server_index import ServerSettings, server_engine

    engine, encoder = index_settings.engine, ""
    about: dict[str, Any] = {"engine": EXACT, "corpus": corpus.digest, "count": len(corpus)}
    if engine in BY_WORDS:
        sent: Any = index_settings.reading()
    else:
        manifest, sent = index_folder.open_vectors(out / EXACT, **about)
        encoder = manifest.encoder
    if engine == FAISS:
        made_from, search = index_settings.faiss, index_settings.faiss_search
        made_as = "" if Path(made_from).is_file() else made_from or FLAT
        about |= {"engine": FAISS, "encoder": encoder}
        with contextlib.suppress(InputError):  # there is none, or one of other vectors
            there = index_folder.read_manifest(out / FAISS, **about).settings
            if made_from in ("", there["made_as"]):
                if search in ("", there["search"]):
                    return
                made_as, made_from = there["made_as"], str(out / FAISS / FILE)
        make_faiss(out, corpus, made_from or FLAT, made_as, search)
        return
    with tqdm(total=len(corpus), desc="sending", unit=" passages", unit_scale=True) as bar:

        def report(passages: int) -> None:
            bar.update(passages - bar.n)
            stop.check()

        settings = index_settings.server or ServerSettings()
        index = server_engine(engine).build(corpus, sent, settings, encoder, report)
    index.save(out / engine)
    print(f"{index.name} is filled")
    print("the server now indexes it; until it has, searches are slower")


def make_faiss(
    out: Path, corpus: StoredCorpus, made_from: str | Path, made_as: str, search: str
) -> None:
    """Writes an index of faiss over the vectors of an index's folder, and prints its recall.

    Args:
        made_from: see `FaissIndex.build`.
        made_as: its factory string; "": it was brought along.
        search: the parameters of its search, as the user gives them.
    """
    from qrag_jax.retrieval.faiss_index import FLAT, FaissIndex

    manifest, vectors = index_folder.open_vectors(out / EXACT)
    index = FaissIndex.build(corpus, vectors, made_from, search)
    index.save(out / FAISS, manifest.encoder, made_as=made_as, search=search)
    if made_as != FLAT:
        recall = f"recall@10 against exact search is {index.recall():.3f}"
        print(f"{made_as or made_from} {search}: {recall}, of passages as questions")


def index_words(stored: StoredCorpus, folder: Path, settings: IndexSettings) -> None:
    """Indexes the words of a corpus, or refuses those that are there and read otherwise."""
    config = settings.reading()

    def build() -> None:
        if not (folder / index_folder.NAME).exists():
            bm25.BM25Index.build(stored, config).save(folder)

    hosts.first_does(build)
    index = bm25.BM25Index.open(folder, stored)  # it fits, or is refused
    if index.config != config:
        raise InputError(
            f"{folder} holds words of another language than --language={settings.language}, or "
            "read by another rule; give another --index, or delete that folder to index them again."
        )
