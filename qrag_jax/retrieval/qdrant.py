"""An engine on a Qdrant server or cluster, for corpora that outgrow one machine.

A point's id is the passage's number. Its payload has the passage's `name` and `metadata`, for other
programs, and `terms`, by which we filter. Point 0 has a digest of what the collection was made
from: this works with every version of the server, and is there as soon as there is anything.

The library is optional (`pip install 'qrag_jax[qdrant]'`) and imported when it is first used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from qrag_jax.errors import Count, InputError, Rule, library
from qrag_jax.llm.endpoint import check_url, is_local, read_key
from qrag_jax.retrieval.corpus import StoredCorpus, keys_of, unknown_field, wanted_keys
from qrag_jax.retrieval.index_folder import QDRANT, Manifest, read_manifest, write_manifest
from qrag_jax.retrieval.protocol import Hits, Queries, Where, as_hits, past_ties
from qrag_jax.retrieval.vectors import float_rows, query_vectors
from qrag_jax.runtime.bounded_json import typed
from qrag_jax.runtime.config_fields import check

KEY_VARIABLE = "QDRANT_API_KEY"
TERMS, DIGEST = "terms", "qrag_jax"  # fields of payloads
ATTEMPTS = 4  # to ask for one thing, while the server cannot be reached or is broken
PAUSE = 0.5  # seconds before the second attempt; doubles
TIMEOUT = 60  # seconds for one attempt
_TIES = 10_000  # the most passages asked for to put those with equal scores in order
_NAME = Rule(re.compile(r"\w[\w.-]{0,200}", re.ASCII).fullmatch, "it must be a plain name")
_QUERIES = 64  # in one request
_INDEXED_FROM = 20_000  # KB of a segment's vectors from which on it gets a graph; Qdrant's own
_OVERSAMPLING = 2.0  # this many times k are found by 8 bits, to be scored again


@dataclasses.dataclass(frozen=True)
class QdrantSettings:
    """A collection: where it is, how it is filled and searched.

    The API key is read from the environment variable QDRANT_API_KEY alone. With shards=16, this is
    HARR's index of Wikipedia, 21 million passages. Searches read numbers of 8 bits, which stay in
    memory, by a graph (HNSW); the best are scored again in float32. Both can be changed on the
    server.
    """

    url: str = "http://127.0.0.1:6333"  # of a server or of any node of a cluster
    collection: Annotated[str, _NAME] = "passages"
    replace: bool = False  # a collection of this name is deleted before it is filled
    batch: Count = 256  # passages that are sent at a time
    workers: Count = 1  # processes that send; with more, a script needs its `__main__` guard
    shards: Count = 1  # parts that are searched side by side, and spread over a cluster's nodes
    replicas: Count = 1  # nodes that hold each part
    exact: bool = False  # all vectors are compared in float32; else passages may be missed

    def __post_init__(self) -> None:
        check_url(self.url, "the URL of Qdrant", "http://127.0.0.1:6333", KEY_VARIABLE)
        object.__setattr__(self, "url", self.url.rstrip("/"))
        check(self, "--qdrant_settings: ")

    @classmethod
    def parse(cls, text: str, **strings: Any) -> QdrantSettings:
        try:
            pairs = (part.partition("=") for part in text.split(",") if part)
            values = {name: json.loads(value.lower()) for name, _, value in pairs}
            settings = typed(cls, values)
        except ValueError as error:
            raise InputError(
                f"--qdrant_settings is {text!r} ({error}); write NAME=VALUE with commas between "
                f"them, of {', '.join(field.name for field in dataclasses.fields(cls))}."
            ) from None
        return dataclasses.replace(settings, **strings)


class QdrantIndex:
    """All passages' vectors in a collection of Qdrant; see `protocol.VectorIndex`.

    Which passages a search by graph looks at, and which of more than `_TIES` equal ones there are,
    is left to the server.
    """

    def __init__(self, corpus: StoredCorpus, settings: QdrantSettings, manifest: Manifest) -> None:
        """Use `build` or `open`."""
        client = library("qdrant_client", QDRANT)
        self.corpus, self.settings, self._manifest = corpus, settings, manifest
        self._models, self._key = client.models, _key()
        self._name = f"the collection {settings.collection} on the Qdrant server {settings.url}"
        self._digest = json.dumps([manifest.corpus, manifest.encoder, manifest.width])
        self._fields = set[str]()  # that passages have
        self._client = client.QdrantClient(
            url=settings.url,
            port=443 if settings.url.startswith("https:") else 6333,  # where the URL has none
            api_key=self._key or None,
            timeout=TIMEOUT,
            check_compatibility=False,  # it asks the server before anything is wanted of it
            trust_env=not is_local(settings.url),  # proxies
        )

    @classmethod
    def build(
        cls,
        corpus: StoredCorpus,
        vectors: np.ndarray,
        settings: QdrantSettings,
        encoder: str = "",
        report: Callable[[int], None] = lambda passages: None,
    ) -> QdrantIndex:
        """Fills a collection; `save` then makes a folder an index of it.

        A collection that is not full is filled again from the beginning. The server begins to build
        its graph when all passages are there; until it has, searches are good, but slow. `report`
        is called with the number of passages sent; what it raises ends the upload.
        """
        count, width = vectors.shape
        said = {"qdrant": dataclasses.asdict(dataclasses.replace(settings, replace=False))}
        about = QDRANT, corpus.digest, count, encoder, width, "float32"
        index = cls(corpus, settings, Manifest(*about, settings=said))
        models, ask = index._models, index._ask
        if settings.replace:
            ask("delete_collection")
        if ask("collection_exists"):
            index._check()
        else:
            how = {"size": width, "distance": models.Distance.DOT, "on_disk": True}
            int8 = models.ScalarQuantizationConfig(type=models.ScalarType.INT8, always_ram=True)
            ask(
                "create_collection",
                vectors_config=models.VectorParams(**how),
                shard_number=settings.shards,
                replication_factor=settings.replicas,
                on_disk_payload=True,
                quantization_config=models.ScalarQuantization(scalar=int8),
                hnsw_config=models.HnswConfigDiff(m=16, ef_construct=100),
                # A graph that grows with every batch would cost far more than one at the end.
                optimizers_config=models.OptimizersConfigDiff(indexing_threshold=0),
            )
            schema = models.PayloadSchemaType.KEYWORD
            ask("create_payload_index", field_name=TERMS, field_schema=schema, wait=True)
            vector, payload = float_rows(vectors, [0])[0].tolist(), index._payload(0)
            point = models.PointStruct(id=0, vector=vector, payload=payload)
            ask("upsert", points=[point], wait=True)
        if ask("count", exact=True).count != count:

            def payload_of(number: int) -> dict[str, Any]:
                if number % settings.batch == 0:
                    report(number)
                return index._payload(number)

            ask(
                "upload_collection",
                vectors=(vector.astype(np.float32).tolist() for vector in vectors),
                payload=map(payload_of, range(count)),
                ids=range(count),
                batch_size=settings.batch,
                parallel=settings.workers,
                max_retries=ATTEMPTS - 1,
                wait=True,
            )
        report(count)
        optimizers = models.OptimizersConfigDiff(indexing_threshold=_INDEXED_FROM)
        ask("update_collection", optimizers_config=optimizers)
        return index

    @classmethod
    def open(
        cls, folder: Path, corpus: StoredCorpus, *, url: str = "", encoder: str | None = None
    ) -> QdrantIndex:
        """The index of a folder; `url`: where the collection is now, "" if it did not move."""
        manifest = read_manifest(folder, engine=QDRANT, corpus=corpus.digest, encoder=encoder)
        settings = QdrantSettings(**manifest.settings["qdrant"])
        if url:
            settings = dataclasses.replace(settings, url=url)
        elif not is_local(settings.url) and _key():
            # The folder may be anyone's, and whoever wrote it would get the key.
            raise InputError(
                f"the index names the Qdrant server at {settings.url}, and {KEY_VARIABLE} holds a "
                "key; name the server yourself (--qdrant=URL) if the key may go there, or unset "
                "the variable."
            )
        index = cls(corpus, settings, manifest)
        index._check()
        if (there := index._ask("count", exact=True).count) != len(corpus):
            raise InputError(
                f"{index._name} has {there} of {len(corpus)} passages; build the index again, "
                "which sends them."
            )
        return index

    def save(self, folder: Path) -> None:
        write_manifest(folder, self._manifest)

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        models, settings = self._models, self.settings
        coarse = models.QuantizationSearchParams(
            ignore=settings.exact, rescore=True, oversampling=_OVERSAMPLING
        )
        params = models.SearchParams(exact=settings.exact, quantization=coarse)
        only = self._filter(where) if where else None
        common = {"params": params, "filter": only, "with_payload": False}
        vectors = query_vectors(queries, self._manifest.width).tolist()

        def found(asked: int) -> Hits:
            answers: list[Any] = []
            requests = [models.QueryRequest(query=v, limit=asked, **common) for v in vectors]
            for at in range(0, len(requests), _QUERIES):
                some = requests[at : at + _QUERIES]
                answers += self._ask("query_batch_points", requests=some)
            rows = [[(point.id, point.score) for point in one.points] for one in answers]
            return as_hits([Hits(*np.array(row).reshape(-1, 2).T) for row in rows], asked)

        return past_ties(found, k, min(max(k, _TIES), len(self.corpus)))

    def vectors(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        ids, places = np.unique(np.asarray(numbers, np.int64), return_inverse=True)
        points = self._ask("retrieve", ids=ids.tolist(), with_payload=False, with_vectors=True)
        rows = [point.vector for point in sorted(points, key=lambda point: point.id)]
        return np.array(rows, np.float32).reshape(len(ids), self._manifest.width)[places]

    def _check(self) -> None:
        points = self._ask("retrieve", ids=[0], with_payload=[DIGEST])
        if not points or (points[0].payload or {}).get(DIGEST) != self._digest:
            raise InputError(
                f"{self._name} was made from other passages or vectors, or by another program; "
                "name another collection, or give --replace to delete this one."
            )

    def _payload(self, number: int) -> dict[str, Any]:
        """What a point has; what is sent cannot have half of a surrogate pair."""
        (passage,) = self.corpus.passages([number])
        kept = {"name": passage.name, "metadata": passage.metadata}
        terms = {_term(field) for field in passage.metadata}
        for field, value in passage.metadata.items():
            terms |= {_term(field, key) for key in keys_of(value)}
        text = json.dumps(kept, ensure_ascii=False).encode("utf-8", "replace")
        payload = json.loads(text) | ({TERMS: sorted(terms)} if terms else {})
        return payload if number else payload | {DIGEST: self._digest}

    def _filter(self, where: Where) -> Any:
        """Qdrant's filter with the meaning of `StoredCorpus.matching`."""
        models = self._models

        def of(terms: list[list[str]]) -> Any:
            matches = [models.MatchAny(any=some) for some in terms]
            must = [models.FieldCondition(key=TERMS, match=match) for match in matches]
            return models.Filter(must=must)

        for name in where.keys() - self._fields:
            only = of([[_term(name)]])
            if not self._ask("scroll", scroll_filter=only, limit=1, with_payload=False)[0]:
                raise unknown_field(name, self._name)
            self._fields.add(name)
        return of([[_term(name, key) for key in wanted_keys(v)] for name, v in where.items()])

    def _ask(self, method: str, **arguments: Any) -> Any:
        """Calls a method of the client for the collection, again while the server is broken.

        The upload has the client's own retries.
        """
        from qdrant_client.common.client_exceptions import QdrantException
        from qdrant_client.http.exceptions import ApiException

        for attempt in range(1 if method == "upload_collection" else ATTEMPTS):
            time.sleep(PAUSE * 2 ** (attempt - 1) if attempt else 0)
            try:
                return getattr(self._client, method)(self.settings.collection, **arguments)
            # The last one: a process of several that send has ended.
            except (ApiException, QdrantException, RuntimeError) as error:
                why = f"{type(error).__name__}: {error}"
                status = getattr(error, "status_code", None) or 500
            if status < 500 and status not in (408, 429):
                break
        # Raised here and not above, where its context would have the key.
        why = " ".join((why.replace(self._key, "***") if self._key else why).split())[:200]
        raise InputError(
            f"{self._name}: {method} fails ({why}); give the url of a server that runs, its API "
            f"key in the environment variable {KEY_VARIABLE}, or another value of the setting that "
            "it names."
        )


def _key() -> str:
    exported = os.environ.get(KEY_VARIABLE, "").strip()
    return read_key(KEY_VARIABLE if exported else "", KEY_VARIABLE)


def _term(field: str, key: str = "") -> str:
    """A word of a passage that has the field, and this key in it if there is one.

    Qdrant itself compares no fractions, nulls or objects, and takes dots in a field's name for a
    path; it compares such words as we compare keys.
    """
    term = json.dumps(field) + ("=" + key if key else "")
    return term if len(term) <= 200 else hashlib.blake2b(term.encode(), digest_size=16).hexdigest()
