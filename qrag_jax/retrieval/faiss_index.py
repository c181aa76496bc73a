"""An engine on a flat index of faiss, on processors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.faiss_files import flat_index, library, read_flat, write_index
from qrag_jax.retrieval.manifest import Manifest, check_files, read_manifest, write_manifest
from qrag_jax.retrieval.protocol import Corpus, Hits, Queries, Where
from qrag_jax.retrieval.ranking import check_k, ranked
from qrag_jax.retrieval.vectors import check_count, check_numbers, query_vectors

ENGINE = "faiss"
FILE = "index.faiss"


class FaissIndex:
    """All passages' vectors in an IndexFlatIP; see `protocol.VectorIndex`.

    Equal scores are in faiss' order of chance; here they are in that of the passages' numbers, for
    which more are asked of faiss where the last ones are equal.

    Args:
        corpus: the passages.
        vectors: theirs, in the same order, `[passages, width]`; or an IndexFlatIP of them.
        encoder: a digest of what embedded them, for the manifest.
        version: of the vectors, if they are those of a folder (`vector_files`).

    Raises:
        InputError: faiss is not installed, there are not as many vectors as passages, or one of
            them holds NaN or an infinite number.
    """

    def __init__(
        self, corpus: Corpus, vectors: np.ndarray | Any, encoder: str = "", version: int = 1
    ) -> None:
        own = isinstance(vectors, library().IndexFlat)
        index: Any = vectors if own else flat_index(vectors)
        self._index = index
        check_count(index.ntotal, len(corpus))
        self.corpus, self.encoder, self.version = corpus, encoder, version

    @classmethod
    def read(cls, path: Path, corpus: Corpus, encoder: str = "") -> FaissIndex:
        """An index of a file that another program wrote.

        The ids of an IndexIDMap are taken for the passages' numbers.

        Raises:
            InputError: as `faiss_files.read_flat` and the class; or the ids are not the passages'
                numbers.
        """
        file = read_flat(path)
        if file.ids is None:
            return cls(corpus, file.index, encoder)
        order = np.argsort(file.ids)
        if not np.array_equal(file.ids[order], np.arange(len(corpus))):
            raise InputError(
                f"{path} has ids that are not the numbers 0 to {len(corpus) - 1} of the corpus's "
                "passages; write it with these, or without ids and in the corpus's order."
            )
        return cls(corpus, file.vectors[order], encoder)

    @classmethod
    def open(
        cls,
        folder: Path,
        corpus: Corpus,
        encoder: str | None = None,
        version: int | None = None,
    ) -> FaissIndex:
        """The index of a folder.

        Args:
            encoder: the digest that its vectors must be of; None: any.
            version: of the vectors that it must be built from; None: any.

        Raises:
            InputError: the folder's index is of another engine, corpus, encoder or version, or is
                not whole; or as for the class.
        """
        asked = {"encoder": encoder, "version": version}
        given = {name: value for name, value in asked.items() if value is not None}
        said = read_manifest(folder, engine=ENGINE, corpus=corpus.digest, **given)
        check_files(folder, said)
        return cls(corpus, read_flat(folder / FILE).index, said.encoder, said.version)

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        """The k passages with the highest inner products; see `protocol.Index`."""
        given = query_vectors(queries, self._index.d)
        check_k(k)
        options = {}
        if where is not None:
            allowed = np.packbits(self.corpus.matching(where), bitorder="little")
            selector = library().IDSelectorBitmap(allowed)
            options = {"params": library().SearchParameters(sel=selector)}
        asked = min(k + 1, len(self.corpus))
        numbers = np.full((len(given), asked), -1, np.int64)
        scores = np.zeros((len(given), asked), np.float32)
        wide: tuple[np.ndarray, np.ndarray] = (scores, numbers)
        if len(given):
            wide = self._index.search(given, asked, **options)
            while asked < len(self.corpus) and _cut(*wide, k):
                asked = min(2 * asked, len(self.corpus))
                wide = self._index.search(given, asked, **options)
        return ranked(wide[1], wide[0], k)

    def vectors(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """float32 `[len(numbers), width]`: the passages' vectors."""
        return self._index.reconstruct_batch(check_numbers(numbers, len(self.corpus)))

    def save(self, folder: Path) -> None:
        """Writes the index as faiss has it, and the manifest.

        Raises:
            OSError: the folder cannot be written.
        """
        write_index(folder / FILE, self._index)
        manifest = Manifest(
            engine=ENGINE,
            corpus=self.corpus.digest,
            count=len(self.corpus),
            encoder=self.encoder,
            width=self._index.d,
            dtype="float32",
            version=self.version,
            files={FILE: (folder / FILE).stat().st_size},
        )
        write_manifest(folder, manifest)


def _cut(scores: np.ndarray, numbers: np.ndarray, k: int) -> bool:
    """Whether passages as good as the k-th of a query may have been left out."""
    return bool(((scores[:, -1] == scores[:, k - 1]) & (numbers[:, -1] >= 0)).any())
