"""Stores the corpus of an index, passage by passage, from the files that it is given in."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qrag_jax.data.files.corpora import Columns, Read, corpus_files, read_corpus
from qrag_jax.errors import InputError
from qrag_jax.retrieval import corpus
from qrag_jax.retrieval.corpus import CorpusWriter
from qrag_jax.retrieval.opening import CORPUS
from qrag_jax.retrieval.protocol import Passage
from qrag_jax.runtime import bounded_json, leftovers, whole_files
from qrag_jax.runtime.interrupt import StopSignal

SOURCE = "source.json"  # in the index's folder: which files the corpus was read from


@dataclasses.dataclass(frozen=True)
class CorpusSource:
    """Files of a corpus, and how they are read.

    Attributes:
        path: file or folder (see `corpora.corpus_files`).
        columns: the fields of its records.
        skip_empty: passages without title and text are left out; else they are errors.
    """

    path: Path
    columns: Columns
    skip_empty: bool

    def told(self) -> dict[str, Any]:
        """What shows that a corpus is the one that was begun with."""
        files = []
        for path in corpus_files(self.path):
            stat = path.stat()
            files.append([path.name, stat.st_size, stat.st_mtime_ns])
        columns = dataclasses.asdict(self.columns)
        told = {"files": files, "columns": columns, "skip_empty": self.skip_empty}
        return json.loads(json.dumps(told))

    def read(self) -> Iterator[Read | None]:
        """The records; None for one that is left out."""
        for read in read_corpus(self.path, self.columns):
            empty = self.skip_empty and not Passage(*read.document).whole
            yield None if empty else read

    def places(self, numbers: Sequence[int]) -> list[str]:
        """Where the passages of these numbers are in the files, which are read again."""
        kept = (read.where for read in self.read() if read is not None)
        found = dict(enumerate(itertools.islice(kept, max(numbers) + 1)))
        return [found[number] for number in numbers]


def store_corpus(source: CorpusSource | None, out: Path, stop: StopSignal) -> None:
    """Writes the corpus of an index from its source, or goes on with it.

    Args:
        source: None: the index has a corpus, or it is told of when that is opened.
        out: the index's folder.
        stop: checked after every passage.

    Raises:
        Stopped: a signal came; the same call goes on.
        OSError: the disk is full.
    """
    folder, record = out / CORPUS, out / SOURCE
    leftovers.clean_partial(out, print)
    if source is None:
        return
    told = source.told()
    if record.exists() and _read(record) != told:
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
    whole_files.write_whole(record, json.dumps(told, indent=1) + "\n")
    if (folder / corpus.NAME).exists():
        return
    with (
        CorpusWriter(folder) as writer,
        tqdm(desc="reading", unit=" passages", unit_scale=True) as bar,
    ):
        done = len(writer)
        bar.update(done)
        skipped = 0
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


def _read(record: Path) -> Any:
    try:
        return bounded_json.load(record, finite=False)
    except ValueError:
        return None
