"""Opens the index of a folder with the engine that it was built for."""

from __future__ import annotations

from pathlib import Path

from qrag_jax.errors import InputError
from qrag_jax.retrieval import bm25, exact, faiss_index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.manifest import NAME
from qrag_jax.retrieval.protocol import Index

CORPUS = "corpus"  # the folder of the passages, beside those of the engines
EXACT, BM25, FAISS = ENGINES = (exact.ENGINE, bm25.ENGINE, faiss_index.ENGINE)


def engines_of(folder: Path) -> list[str]:
    """The engines that a folder has finished indexes for."""
    return [name for name in ENGINES if (folder / name / NAME).is_file()]


def open_index(folder: Path, engine: str = "", encoder: str | None = None) -> Index:
    """An index of a folder that `systems.indexing` wrote: `corpus`, and a folder for each engine.

    Args:
        engine: one of `ENGINES`; "": the only one that there is.
        encoder: the digest that vectors must be of; None: any.

    Raises:
        InputError: there is no such index, or several and none is named; or as the engine's `open`.
    """
    found = engines_of(folder)
    if not engine:
        if len(found) != 1:
            told = f"indexes of {' and '.join(found)}" if found else "no finished index"
            fix = "name one with --engine" if found else "build one with qrag index"
            raise InputError(f"{folder} holds {told}; {fix}.")
        (engine,) = found
    if engine not in found:
        raise InputError(
            f"{folder} holds no finished index of {engine}; build one, or give another --index or "
            "--engine."
        )
    corpus, own = StoredCorpus(folder / CORPUS), folder / engine
    if engine == BM25:
        return bm25.BM25Index.open(own, corpus)
    if engine == FAISS:
        return faiss_index.FaissIndex.open(own, corpus, encoder)
    return exact.ExactIndex.open(own, corpus, encoder=encoder)
