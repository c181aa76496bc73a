"""Further engines over an index whose vectors are finished: a file of faiss, a Qdrant collection.

They are made from the vectors in the folder `exact`, and must be made again when these change.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from qrag_jax.errors import InputError
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.manifest import read_manifest
from qrag_jax.retrieval.opening import EXACT, FAISS, QDRANT
from qrag_jax.retrieval.qdrant import QdrantIndex, QdrantSettings
from qrag_jax.retrieval.vectors import Stored, open_vectors
from qrag_jax.runtime.interrupt import StopSignal

FURTHER = (FAISS, QDRANT)


def make_engine(
    engine: str, out: Path, corpus: StoredCorpus, settings: QdrantSettings, stop: StopSignal
) -> None:
    """Makes one of `FURTHER` in its folder, or goes on with it; what is whole stays as it is.

    Args:
        out: the index's folder.
        settings: of Qdrant.
        stop: checked after every batch that is sent.

    Raises:
        Stopped: a signal came; the same call goes on.
        OSError: the disk is full.
    """
    stored = open_vectors(out / EXACT, engine=EXACT, corpus=corpus.digest, count=len(corpus))
    if engine == FAISS:
        _make_faiss(out / FAISS, corpus, stored)
        return
    with tqdm(total=len(corpus), desc="sending", unit=" passages", unit_scale=True) as bar:
        index = QdrantIndex.build(
            corpus,
            stored.vectors,
            settings,
            encoder=stored.manifest.encoder,
            report=_report(bar, stop),
        )
    index.save(out / QDRANT)
    print(f"the collection {settings.collection} at {settings.url} is filled")
    if not index.indexed:
        print("the server now builds its graph; until it has, searches are slower")


def _make_faiss(folder: Path, corpus: StoredCorpus, stored: Stored) -> None:
    from qrag_jax.retrieval.faiss_index import FaissIndex

    about = {"encoder": stored.manifest.encoder}
    try:
        read_manifest(folder, engine=FAISS, corpus=corpus.digest, **about)
    except InputError:  # there is none, or one of other vectors
        vectors = stored.vectors.rows(range(len(corpus)))
        FaissIndex(corpus, vectors, **about).save(folder)
    FaissIndex.open(folder, corpus, **about)  # it is whole, or refused


def _report(bar: tqdm, stop: StopSignal) -> Callable[[int], None]:
    def report(passages: int) -> None:
        bar.update(passages - bar.n)
        stop.check()

    return report
