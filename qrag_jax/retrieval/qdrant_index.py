"""An engine on Qdrant: a server or cluster, or the client library alone for small corpora."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.manifest import Manifest, read_manifest, settings_as, write_manifest
from qrag_jax.retrieval.protocol import NONE, Corpus, Hits, Queries, Where
from qrag_jax.retrieval.qdrant_collection import Collection, Made, digest_of
from qrag_jax.retrieval.qdrant_server import Connection, check_named, library
from qrag_jax.retrieval.qdrant_settings import QdrantLayout, QdrantSearch, QdrantServer
from qrag_jax.retrieval.qdrant_upload import Progress, upload
from qrag_jax.retrieval.ranking import check_k, ranked
from qrag_jax.retrieval.vectors import (
    Vectors,
    check_count,
    check_numbers,
    checked,
    query_vectors,
)

ENGINE = "qdrant"
_QUERIES = 64  # in one request
_POINTS = 1000  # read in one request


class QdrantIndex:
    """All passages' vectors in a collection of Qdrant; see `protocol.VectorIndex`.

    `build` and `open` make one. Passages of equal scores come in the order of their numbers: more
    than k are asked for until the score falls, up to `QdrantSearch.ties`. What is left to the
    server: which of more than so many equal passages it gives, and, in a search by graph, which
    passages it looks at; `exact=True` leaves it only the former.

    Without a server, the library reads the files in the folder `qdrant` through pickle, after they
    were found to hold nothing but points (see `qdrant_pickles`).

    Attributes:
        corpus: the passages.
        folder: of the index.
        search_settings: of the search.
    """

    def __init__(
        self, corpus: Corpus, collection: Collection, folder: Path, search: QdrantSearch
    ) -> None:
        self.corpus, self.folder, self.search_settings = corpus, folder, search
        self._collection, self._ask = collection, collection.connection.ask

    @classmethod
    def build(
        cls,
        corpus: Corpus,
        vectors: np.ndarray | Vectors,
        folder: Path,
        *,
        server: QdrantServer | None = None,
        layout: QdrantLayout | None = None,
        search: QdrantSearch | None = None,
        encoder: str = "",
        version: int = 1,
        replace: bool = False,
        told: Callable[[int], None] = lambda passages: None,
    ) -> QdrantIndex:
        """Fills a collection, or goes on filling it; `save` then makes the folder an index.

        A server begins to build its graph when all passages are there. Until `indexed` says that
        it has ended, searches give good hits, but slowly.

        Args:
            vectors: of the passages in the same order, `[passages, width]`.
            folder: the index's; its file `qdrant_progress.json` says how far a server's collection
                is, and without a server the vectors are in it, too.
            server: None: no server.
            encoder: a digest of what embedded the passages; "": unknown.
            version: of the vectors, if they are those of a folder (`vector_files`).
            replace: whether an existing collection of this name is deleted before; not so if an
                upload of the same things was begun, which goes on.
            told: called with the number of passages that are there, after each batch; what it
                raises breaks the upload off.

        Raises:
            InputError: qdrant-client is not installed; there are not as many vectors as passages,
                or one of them holds NaN or an infinite number; the collection exists and was made
                from another thing; or the server cannot be reached, fails or refuses.
            OSError: the folder cannot be written.
        """
        if not isinstance(vectors, Vectors):
            vectors = Vectors([checked(vectors, "the index")])
        check_count(len(vectors), len(corpus))
        if not len(corpus):
            raise InputError("the corpus has no passages; give one that has.")
        made = Made(
            corpus=corpus.digest,
            count=len(corpus),
            encoder=encoder,
            version=version,
            width=vectors.width,
            vectors=digest_of(vectors),
            layout=layout or QdrantLayout(),
        )
        collection = Collection(Connection(server or QdrantServer(), folder), made)
        collection.prepare(replace and not Progress(folder, collection).done)
        upload(collection, corpus, vectors, folder, told)
        collection.finish()
        return cls(corpus, collection, folder, search or QdrantSearch())

    @classmethod
    def open(
        cls,
        folder: Path,
        corpus: Corpus,
        *,
        server: QdrantServer | None = None,
        search: QdrantSearch | None = None,
        encoder: str | None = None,
        version: int | None = None,
    ) -> QdrantIndex:
        """The index of a folder.

        Args:
            server: where the collection is now; None: where it was when the index was saved; if
                that is another machine, no API key may be exported, which would go there.
            search: None: as it was saved.
            encoder: the digest that its vectors must be of; None: any.
            version: of the vectors that it must be built from; None: any.

        Raises:
            InputError: the folder's index is of another engine, corpus, encoder or version; the
                collection is not there, is not that of the index, or lacks passages; only the
                folder names the server, and there is an API key; or as `build`.
        """
        asked = {"encoder": encoder, "version": version}
        given = {name: value for name, value in asked.items() if value is not None}
        said = read_manifest(folder, engine=ENGINE, corpus=corpus.digest, **given).settings
        if server is None:
            server = settings_as(QdrantServer, said.get("server"), folder)
            check_named(server)
        search = search or settings_as(QdrantSearch, said.get("search"), folder)
        connection = Connection(server, folder)
        collection = Collection(connection, settings_as(Made, said.get("made"), folder))
        collection.check()
        if (there := collection.count()) != len(corpus):
            raise InputError(
                f"{connection.what} has {there} of {len(corpus)} passages; build the index again, "
                "which sends those that are missing."
            )
        return cls(
            corpus,
            collection,
            folder,
            search,
        )

    @property
    def indexed(self) -> bool:
        """Whether a server has no graph and no numbers of 8 bits left to build.

        After `build` it may take a second to begin.
        """
        return self._ask("get_collection").status == library().models.CollectionStatus.GREEN

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        """The k passages with the highest inner products; see `protocol.Index`.

        Raises:
            InputError: as there; or the server cannot be reached, fails or refuses.
        """
        given = query_vectors(queries, self._collection.made.width)
        check_k(k)
        only = None if where is None else self._collection.filter_of(where)
        rows: list[list[Any]] = [[] for _ in given]
        left = np.arange(len(given))
        asked = min(k + 1, len(self.corpus))
        most = min(max(asked, self.search_settings.ties), len(self.corpus))
        while len(left):
            for query, row in zip(left, self._found(given[left], asked, only), strict=True):
                rows[query] = row
            if asked == most:
                break
            left = np.array([n for n in left if _cut(rows[n], k, asked)], np.int64)
            asked = min(2 * asked, most)
        return _ranked(rows, k)

    def vectors(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """float32 `[len(numbers), width]`: the passages' vectors.

        Raises:
            IndexError: there is no passage of such a number.
            InputError: the collection lacks one; or the server cannot be reached or fails.
        """
        wanted = check_numbers(numbers, len(self.corpus))
        unique, places = np.unique(wanted, return_inverse=True)
        rows = np.empty((len(unique), self._collection.made.width), np.float32)
        for first in range(0, len(unique), _POINTS):
            ids = unique[first : first + _POINTS].tolist()
            points = self._ask("retrieve", ids=ids, with_payload=False, with_vectors=True)
            found = {point.id: point.vector for point in points}
            for place, number in enumerate(ids, first):
                if number not in found:
                    raise InputError(
                        f"{self._collection.connection.what} lacks the passage {number}; build "
                        "the index again with replace=True."
                    )
                rows[place] = found[number]
        return rows[places]

    def save(self, folder: Path) -> None:
        """Writes the manifest; without a server, another folder gets a copy of the vectors, too.

        Raises:
            InputError: the folder holds vectors of another corpus or encoder.
            OSError: the folder cannot be written.
        """
        made, server = self._collection.made, self._collection.connection.server
        if self._collection.connection.local and folder.resolve() != self.folder.resolve():
            copy = Collection(Connection(server, folder), made)
            copy.prepare(replace=False)
            upload(copy, self.corpus, Vectors([self.vectors(range(made.count))]), folder)
        manifest = Manifest(
            engine=ENGINE,
            corpus=made.corpus,
            count=made.count,
            encoder=made.encoder,
            width=made.width,
            dtype="float32",
            version=made.version,
            settings={
                "server": dataclasses.asdict(server),
                "search": dataclasses.asdict(self.search_settings),
                "made": dataclasses.asdict(made),
            },
        )
        write_manifest(folder, manifest)

    def _found(self, vectors: np.ndarray, asked: int, only: Any) -> list[list[Any]]:
        """The scored points of each query, best first."""
        models = library().models
        params = None if self._collection.connection.local else self._params()
        found: list[list[Any]] = []
        for first in range(0, len(vectors), _QUERIES):
            requests = [
                models.QueryRequest(
                    query=vector, limit=asked, filter=only, params=params, with_payload=False
                )
                for vector in vectors[first : first + _QUERIES].tolist()
            ]
            replies = self._ask("query_batch_points", requests=requests)
            found += [reply.points for reply in replies]
        return found

    def _params(self) -> Any:
        models, chosen = library().models, self.search_settings
        coarse = models.QuantizationSearchParams(
            ignore=chosen.exact,
            rescore=chosen.rescore,
            oversampling=chosen.oversampling if chosen.rescore else None,
        )
        return models.SearchParams(
            exact=chosen.exact,
            hnsw_ef=chosen.ef or None,
            quantization=coarse if self._collection.made.layout.int8 else None,
        )


def _cut(row: list[Any], k: int, asked: int) -> bool:
    """Whether passages as good as the k-th of a query may have been left out."""
    return len(row) == asked and row[-1].score == row[k - 1].score


def _ranked(rows: list[list[Any]], k: int) -> Hits:
    longest = max([1, *map(len, rows)])
    numbers = np.full((len(rows), longest), NONE, np.int64)
    scores = np.full((len(rows), longest), -np.inf, np.float32)
    for query, row in enumerate(rows):
        numbers[query, : len(row)] = [point.id for point in row]
        scores[query, : len(row)] = [point.score for point in row]
    return ranked(numbers, scores, k)
