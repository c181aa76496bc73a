"""An engine on any index of faiss, on processors: flat, or approximate, for corpora of millions.

faiss names its indexes by factory strings (https://github.com/facebookresearch/faiss/wiki), such as
"HNSW32" or "IVF4096,Flat". An approximate one reads few vectors and misses some passages; how many,
is in parameters of its search, such as nprobe=64. The file is mapped, not read into memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qrag_jax.errors import InputError, library
from qrag_jax.retrieval.index_folder import FAISS, Manifest, emptied, read_manifest, write_manifest
from qrag_jax.retrieval.protocol import Hits, Queries, Where, past_ties
from qrag_jax.retrieval.vectors import float_rows, query_vectors, scan
from qrag_jax.runtime.whole_files import reason

if TYPE_CHECKING:
    from qrag_jax.retrieval.corpus import StoredCorpus

FILE, FLAT = "index.faiss", "Flat"
_TRAINED = 2**30  # numbers of vectors that an index is trained on, at most
_ADDED = 2**26  # likewise added at a time


class FaissIndex:
    """All passages' vectors in an index of faiss; see `protocol.VectorIndex`."""

    def __init__(self, corpus: StoredCorpus, vectors: np.ndarray | None, index: Any) -> None:
        """
        Args:
            vectors: of the passages in order, `[passages, width]`; None: `index` can give them.
            index: one of faiss over them, with inner products.
        """
        self.corpus, self._vectors, self._faiss = corpus, vectors, library("faiss", "faiss")
        self.index = index

    @classmethod
    def build(
        cls, corpus: StoredCorpus, vectors: np.ndarray, made_as: str | Path = FLAT, search: str = ""
    ) -> FaissIndex:
        """An index of the vectors of the passages, in order.

        Args:
            made_as: a factory string, or the file of an index that is trained, to which the vectors
                that it lacks at its end are added.
            search: parameters such as "nprobe=64" (`ParameterSpace` of faiss); they are kept.
        """
        faiss, width = library("faiss", "faiss"), vectors.shape[1]
        try:
            if Path(made_as).is_file():
                index = faiss.read_index(str(made_as))
            else:
                index = faiss.index_factory(width, str(made_as), faiss.METRIC_INNER_PRODUCT)
            if search:
                faiss.ParameterSpace().set_index_parameters(index, search)
            if (index.d, index.metric_type) != (width, faiss.METRIC_INNER_PRODUCT):
                raise RuntimeError(f"it has {index.d} numbers a vector, or no inner products")
            if index.ntotal > len(vectors):
                raise RuntimeError(f"it has {index.ntotal} vectors")
            if not index.is_trained:
                most = min(len(vectors), _TRAINED // width)
                index.train(float_rows(vectors, np.linspace(0, len(vectors) - 1, most)))
            size = _ADDED // width
            for start in range(index.ntotal, len(vectors), size):
                index.add(np.asarray(vectors[start : start + size], np.float32))
        except RuntimeError as error:  # faiss has no other
            raise InputError(
                f"--faiss={made_as} with --faiss_search={search!r} is no index of {len(vectors):,} "
                f"vectors of {width} ({reason(error)}); give such as HNSW32 and nprobe=64."
            ) from None
        return cls(corpus, vectors, index)

    @classmethod
    def open(
        cls,
        folder: Path,
        corpus: StoredCorpus,
        vectors: np.ndarray | None = None,
        encoder: str | None = None,
    ) -> FaissIndex:
        read_manifest(folder, engine=FAISS, corpus=corpus.digest, encoder=encoder)
        faiss = library("faiss", "faiss")
        # Not to be added to: faiss would end the process.
        return cls(corpus, vectors, faiss.read_index(str(folder / FILE), faiss.IO_FLAG_MMAP_IFC))

    def save(self, folder: Path, encoder: str = "", **settings: Any) -> None:
        path = emptied(folder) / FILE
        try:
            self._faiss.write_index(self.index, str(path))
        except RuntimeError as error:
            raise OSError(f"{path} cannot be written: {reason(error)}") from None
        about = self.corpus.digest, len(self.corpus), encoder, self.index.d, "float32"
        write_manifest(folder, Manifest(FAISS, *about, settings=settings), [path])

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        """The k passages with the highest inner products that the index finds.

        With a filter an index that is not flat reads all vectors that agree with it: its own search
        would find too few.
        """
        vectors, options = query_vectors(queries, self.index.d), {}
        if where and not isinstance(self.index, self._faiss.IndexFlat):
            return scan(self, vectors, [()] * len(vectors), None, k, where=where)
        if where:
            allowed = np.packbits(self.corpus.matching(where), bitorder="little")
            selector = self._faiss.IDSelectorBitmap(allowed)
            options = {"params": self._faiss.SearchParameters(sel=selector)}

        def hits_of(asked: int) -> Hits:
            scores, numbers = self.index.search(vectors, asked, **options)
            return Hits(numbers, scores)

        return past_ties(hits_of, k, len(self.corpus))

    def vectors(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        if self._vectors is None:
            return self.index.reconstruct_batch(np.asarray(numbers, np.int64))
        return float_rows(self._vectors, numbers)

    def recall(self, k: int = 10, queries: int = 200) -> float:
        """The share of the k best of all vectors that it finds, of passages as queries."""
        from faiss.contrib.exhaustive_search import knn_ground_truth

        assert self._vectors is not None
        count, width = self._vectors.shape
        asked = self.vectors(np.linspace(0, count - 1, min(queries, count)))
        size = _ADDED // width
        blocks = (
            np.asarray(self._vectors[i : i + size], np.float32) for i in range(0, count, size)
        )
        k = min(k, count)
        metric = self._faiss.METRIC_INNER_PRODUCT
        best, _ = knn_ground_truth(asked, blocks, k, metric_type=metric, ngpu=0)
        numbers = self.search(Queries([""] * len(asked), asked), k).numbers
        scores = np.einsum("qd,qkd->qk", asked, self.vectors(np.maximum(numbers, 0)))
        # By scores, so that of equal passages any will do.
        right = (scores >= best[:, -1:] - 1e-5 * np.abs(best[:, -1:])) & (numbers >= 0)
        return float(right.mean())
