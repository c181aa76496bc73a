"""Adds passages to an index, and removes others, without building it again.

The new version (`index_folder.version`) is what an index would be that is built of its passages:
those that are kept, in their order, then those that are added. Only these are embedded; the vectors
of the others are copied. Words are indexed again, because every passage changes the weights of all.
Until the new version is whole, the index is the old one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.data.records import read_lines
from qrag_jax.errors import InputError
from qrag_jax.retrieval import index_folder
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.faiss_index import FILE
from qrag_jax.retrieval.index_folder import BM25, CORPUS, EXACT, FAISS, NAME, QDRANT, read_manifest
from qrag_jax.retrieval.protocol import NONE, Passage
from qrag_jax.runtime import hosts, whole_files
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems import indexing

CHANGE = "change.json"  # in the folder of a version: what was added and removed
_COPIED = 2**24  # numbers of vectors that are copied at a time


def change_index(
    out: Path,
    encoder: indexing.PassageEncoder | None,
    *,
    add: Path | None = None,
    remove: Path | None = None,
    settings: indexing.IndexSettings | None = None,
    stop: StopSignal | None = None,
) -> indexing.Indexed:
    """Changes a finished index, or goes on with that; all hosts call this, and see the files.

    Its engines are those of the old version, but Qdrant, whose collection is of the old one.

    Args:
        encoder: the one that embedded the index; None: it has no vectors, or nothing is added.
        add: file or folder of passages, which are read by `settings`.
        remove: file with one id a line; a passage may be removed and added again.
    """
    settings, stop = settings or indexing.IndexSettings(), stop or StopSignal()
    with indexing.locked(out):
        old = index_folder.version(out)
        stored = StoredCorpus(old / CORPUS)
        names = sorted({name for _, name in read_lines(remove)}) if remove else []
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
        about = {"of": stored.digest, "removed": digest, **indexing.read_from(add, settings)}
        if (old / CHANGE).exists():
            last = json.loads((old / CHANGE).read_text(encoding="utf-8"))
            if last == about | {"of": last["of"]}:  # it was finished, and is given again
                return indexing.Indexed(stored, old)
        there = {
            engine: read_manifest(old / engine, corpus=stored.digest)
            for engine in indexing.ENGINES
            if (old / engine).is_dir()
        }
        encoder = encoder if add else None
        embedded_by = encoder.digest() if encoder else ""
        if EXACT in there and add and embedded_by != there[EXACT].encoder:
            raise InputError(
                f"{out} was embedded by another encoder, or with another dtype, pooling, prefix or "
                "length, than those given; give the ones that it was built with."
            )
        removed = stored.numbers(names)
        if NONE in removed:
            unknown = names[removed.tolist().index(NONE)]
            raise InputError(
                f"{remove} has {unknown!r}, which is the id of no passage of {out}; leave it out."
            )
        kept = np.delete(np.arange(len(stored)), removed)

        def read() -> Iterator[tuple[str, Passage | None]]:
            for number in kept.tolist():
                yield f"{out}, passage {number}", stored.passages([number])[0]
            if add is not None:
                yield from indexing.read_passages(add, settings)

        new = index_folder.next_version(out)

        def store() -> None:
            index_folder.delete_others(out)
            whole_files.clean_unfinished(new)
            indexing.store_corpus(read, about, new / CHANGE, stop)

        hosts.first_does(store)
        indexed = indexing.Indexed(StoredCorpus(new / CORPUS), new)
        if EXACT in there and not (new / EXACT / NAME).exists():
            manifest, vectors = index_folder.open_vectors(old / EXACT)
            size = max(_COPIED // manifest.width, 1)
            copied = (vectors[kept[i : i + size]] for i in range(0, len(kept), size))
            now: Any = {"corpus": indexed.corpus.digest, "count": len(indexed.corpus)}
            manifest = dataclasses.replace(manifest, files={}, **now)
            parts = indexing.parts_of(new / EXACT, manifest, encoder, settings, first=len(kept))
            indexed = indexing.embed_parts(
                indexed.corpus, encoder, parts, settings, stop, there=copied
            )

        def finish() -> None:
            if BM25 in there and not (new / BM25 / NAME).exists():
                config = BM25Config(**there[BM25].settings["words"])
                BM25Index.build(indexed.corpus, config).save(new / BM25)
            if FAISS in there and not (new / FAISS / NAME).exists():
                how = there[FAISS].settings
                grown = old / FAISS / FILE if not names else how["made_as"]
                if EXACT in there and grown:
                    indexing.make_faiss(new, indexed.corpus, grown, how["made_as"], how["search"])
                else:
                    print("the index of faiss is left out: give it again with qrag index --faiss")
            if QDRANT in there:
                kept_at = there[QDRANT].settings["qdrant"]["collection"]
                print(
                    f"the collection {kept_at} of Qdrant has the old passages: send the new ones "
                    "to another, with qrag index --qdrant=URL --collection=NAME"
                )
            index_folder.switch(out, new)
            added = len(indexed.corpus) - len(kept)
            print(f"{added:,} passages were added to {out}, {len(stored) - len(kept):,} removed")

        hosts.first_does(finish)
        return indexed._replace(folder=new)
