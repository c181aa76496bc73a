"""An engine on a flat index of faiss, on processors.

The library is optional (`pip install 'qrag_jax[faiss]'`) and imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.retrieval.index_folder import (
    FAISS,
    Manifest,
    emptied,
    read_manifest,
    write_manifest,
)
from qrag_jax.retrieval.protocol import (
    Corpus,
    Hits,
    Queries,
    Where,
    check_k,
    engine_library,
    ranked,
)
from qrag_jax.retrieval.vectors import (
    Vectors,
    check_numbers,
    of_passages,
    query_vectors,
)
from qrag_jax.runtime.whole_files import reason

FILE = "index.faiss"


class FaissIndex:
    """All passages' vectors in an IndexFlatIP; see `protocol.VectorIndex`.

    Equal scores are in faiss' order of chance; here they are in that of the passages' numbers, for
    which more are asked of faiss where the last ones are equal.

    Args:
        vectors: theirs, in the same order, `[passages, width]`; or an IndexFlatIP of them.
    """

    def __init__(self, corpus: Corpus, vectors: np.ndarray | Vectors | Any) -> None:
        self.corpus = corpus
        self._index: Any = vectors
        if isinstance(vectors, np.ndarray | Vectors):
            rows = of_passages(vectors, len(corpus)).rows(range(len(corpus)))
            self._index = library().IndexFlatIP(rows.shape[1])
            self._index.add(rows)

    @classmethod
    def open(cls, folder: Path, corpus: Corpus, encoder: str | None = None) -> FaissIndex:
        read_manifest(folder, engine=FAISS, corpus=corpus.digest, encoder=encoder)
        return cls(corpus, library().read_index(str(folder / FILE)))

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        given = query_vectors(queries, self._index.d)
        check_k(k)
        options = {}
        if where is not None:
            allowed = np.packbits(self.corpus.matching(where), bitorder="little")
            selector = library().IDSelectorBitmap(allowed)
            options = {"params": library().SearchParameters(sel=selector)}
        count = len(self.corpus)
        asked = min(k + 1, count)
        if not len(given):
            return ranked(np.zeros((0, asked)), np.zeros((0, asked)), k)
        while True:
            scores, numbers = self._index.search(given, asked, **options)
            # Passages as good as the k-th of a query may have been left out.
            cut = asked < count and (scores[:, -1] == scores[:, k - 1]) & (numbers[:, -1] >= 0)
            if not np.any(cut):
                return ranked(numbers, scores, k)
            asked = min(2 * asked, count)

    def vectors(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """float32 `[len(numbers), width]`: the passages' vectors."""
        return self._index.reconstruct_batch(check_numbers(numbers, len(self.corpus)))

    def save(self, folder: Path, encoder: str = "") -> None:
        path, count = emptied(folder) / FILE, len(self.corpus)
        try:
            library().write_index(self._index, str(path))
        except RuntimeError as error:  # faiss has no other
            raise OSError(f"{path} cannot be written: {reason(error)}") from None
        about = self.corpus.digest, count, encoder, self._index.d, "float32"
        write_manifest(folder, Manifest(FAISS, *about), [path])


def library() -> Any:
    return engine_library("faiss", "faiss", "faiss")
