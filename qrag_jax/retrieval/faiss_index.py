"""An engine on a flat index of faiss, on processors.

The library is optional (`pip install 'qrag_jax[faiss]'`) and imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.retrieval.manifest import Manifest, finish, read_manifest
from qrag_jax.retrieval.protocol import (
    Corpus,
    Hits,
    Queries,
    Where,
    check_k,
    engine_library,
    ranked,
)
from qrag_jax.retrieval.vectors import check_count, check_numbers, checked, query_vectors
from qrag_jax.runtime import whole_files

ENGINE = "faiss"
FILE = "index.faiss"


class FaissIndex:
    """All passages' vectors in an IndexFlatIP; see `protocol.VectorIndex`.

    Equal scores are in faiss' order of chance; here they are in that of the passages' numbers, for
    which more are asked of faiss where the last ones are equal.

    Args:
        vectors: theirs, in the same order, `[passages, width]`; or an IndexFlatIP of them.
    """

    def __init__(self, corpus: Corpus, vectors: np.ndarray | Any, encoder: str = "") -> None:
        is_index = isinstance(vectors, library().Index)
        index: Any = vectors if is_index else flat_index(vectors)
        check_count(index.ntotal, len(corpus))
        self._index = index
        self.corpus, self.encoder = corpus, encoder

    @classmethod
    def open(cls, folder: Path, corpus: Corpus, encoder: str | None = None) -> FaissIndex:
        said = read_manifest(folder, engine=ENGINE, corpus=corpus.digest, encoder=encoder)
        return cls(corpus, library().read_index(str(folder / FILE)), said.encoder)

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

    def save(self, folder: Path) -> None:
        """Writes the index as faiss has it, and the manifest; the file appears whole."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{FILE}{whole_files.PARTIAL}"
        try:
            library().write_index(self._index, str(partial))
            partial.replace(folder / FILE)
        except RuntimeError as error:  # faiss has no other
            why = whole_files.reason(error)
            raise OSError(f"{folder / FILE} cannot be written: {why}") from None
        finally:
            partial.unlink(missing_ok=True)
        whole_files.sync_folder(folder)
        manifest = Manifest(
            engine=ENGINE,
            corpus=self.corpus.digest,
            count=len(self.corpus),
            encoder=self.encoder,
            width=self._index.d,
            dtype="float32",
        )
        finish(folder, manifest, (FILE,))


def library() -> Any:
    return engine_library("faiss", "faiss", "faiss")


def flat_index(vectors: np.ndarray) -> Any:
    """faiss' IndexFlatIP of vectors `[n, width]`."""
    rows = checked(vectors, "the index of faiss").astype(np.float32)
    index = library().IndexFlatIP(rows.shape[1])
    index.add(np.ascontiguousarray(rows))
    return index
