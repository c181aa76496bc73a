"""The engine on Qdrant, without a server, does what every engine does."""

from __future__ import annotations

import numpy as np

from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.qdrant_index import QdrantIndex
from tests.retrieval.conformance import OF_VECTORS, Engine, run_with


def built(corpus: StoredCorpus, vectors: np.ndarray) -> QdrantIndex:
    return QdrantIndex.build(corpus, vectors, corpus.folder, replace=True)


test_qdrant = run_with(Engine(built, QdrantIndex.open), OF_VECTORS)
