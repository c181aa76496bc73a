"""Opens the index of a folder with the engine that shall search it.

The folder has `corpus`, the passages, and a folder for each engine that was built over it. Vectors
lie in `exact`, which the engines scan and faiss can search, too. This module needs no jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from qrag_jax.errors import InputError
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.boolean_search import BooleanIndex
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.manifest import NAME, read_manifest
from qrag_jax.retrieval.protocol import FusedIndex, Index, VectorIndex
from qrag_jax.retrieval.scan import ScanIndex
from qrag_jax.retrieval.vectors import open_vectors

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
# The others: vectors.
_COMPARES = {**dict.fromkeys(OF_WORDS, "words"), HYBRID: "words and vectors"}


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
        engine = self.engine or next((name for name in usable if name in there), "")
        if engine not in usable:
            named = f"the engine {engine}"
            if not engine:
                named = f"the index {self.folder} is one of {there[0]}, which"
            compares = _COMPARES.get(engine or there[0], "vectors")
            raise InputError(f"{named} compares {compares}; {otherwise}.")
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
        return read_manifest(self._vectors).encoder

    def open(self, encoder: str | None = None) -> Index:
        """Opens it; the engine is settled."""
        if encoder is not None and self.engine not in OF_WORDS:
            read_manifest(self._vectors, encoder=encoder)  # refused before anything is loaded
        at, corpus = self.folder, StoredCorpus(self.folder / CORPUS)
        match self.engine:
            case "exact":
                from qrag_jax.retrieval.exact import ExactIndex  # needs jax

                return ExactIndex.open(at / EXACT, corpus)
            case "scan":
                return ScanIndex.open(at / EXACT, corpus)
            case "faiss":
                from qrag_jax.retrieval.faiss_index import FaissIndex

                if self._has(FAISS):
                    return FaissIndex.open(at / FAISS, corpus, self._embedded_by())
                said, vectors = open_vectors(at / EXACT, engine=EXACT, corpus=corpus.digest)
                return FaissIndex(corpus, vectors.rows(range(len(vectors))), said.encoder)
            case "qdrant":
                from qrag_jax.retrieval.qdrant import QdrantIndex

                by = self._embedded_by()
                return QdrantIndex.open(at / QDRANT, corpus, url=self.url, encoder=by)
            case "boolean" if self._has(BOOLEAN):
                return BooleanIndex.open(at / BOOLEAN, corpus)
        words = BM25Index.open(at / BM25, corpus)
        if self.engine == HYBRID:
            return FusedIndex([words, IndexAt(at, EXACT).open()])
        return words if self.engine == BM25 else BooleanIndex.over(words)

    def open_vectors(self, encoder: str | None = None) -> VectorIndex:
        """Opens it; the engine is one of `OF_VECTORS`. See `open`."""
        return cast(VectorIndex, self.open(encoder))

    def _missing(self, engine: str) -> list[str]:
        """The indexes that the folder lacks for an engine."""
        needs = _NEEDS.get(engine, [engine])
        if engine in _INSTEAD and not self._has(engine):
            needs = [_INSTEAD[engine]]
        return [name for name in needs if not self._has(name)]

    def _has(self, name: str) -> bool:
        return (self.folder / name / NAME).is_file()

    def _embedded_by(self) -> str | None:
        """The encoder that further engines over the vectors must be of; None: any."""
        return read_manifest(self.folder / EXACT).encoder if self._has(EXACT) else None

    @property
    def _vectors(self) -> Path:
        """The folder whose manifest tells of the vectors."""
        own = self.engine not in (SCAN, HYBRID) and self._has(self.engine)
        return self.folder / (self.engine if own else EXACT)
