"""An engine on a Qdrant server or cluster, for vectors that outgrow one machine.

Searches read numbers of 8 bits, which stay in memory, by a graph (HNSW); the best are scored again
in float32. Both can be changed on the server.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qrag_jax.errors import library
from qrag_jax.llm.endpoint import is_local
from qrag_jax.retrieval import server_index
from qrag_jax.retrieval.index_folder import QDRANT
from qrag_jax.retrieval.server_index import DIGEST, TERMS, ServerIndex

_INDEXED_FROM = 20_000  # KB of a segment's vectors from which on it gets a graph; Qdrant's own
_OVERSAMPLING = 2.0  # this many times k are found by 8 bits, to be scored again


class QdrantIndex(ServerIndex):
    """Vectors in a collection of Qdrant; see `protocol.VectorIndex`."""

    ENGINE, TITLE, URL, KEY = QDRANT, "Qdrant", "http://127.0.0.1:6333", "QDRANT_API_KEY"
    EXISTS, DROP = "collection_exists", "delete_collection"
    PIECE = 100  # processes are started for each

    def _connected(self) -> Any:
        url = self.settings.url
        return library("qdrant_client", QDRANT).QdrantClient(
            url=url,
            port=443 if url.startswith("https:") else 6333,  # where the URL has none
            api_key=self._key or None,
            timeout=server_index.TIMEOUT,
            check_compatibility=False,  # it asks the server before anything is wanted of it
            trust_env=not is_local(url),  # proxies
        )

    def _failure(self, error: Exception) -> bool | None:
        from qdrant_client.common.client_exceptions import QdrantException
        from qdrant_client.http.exceptions import ApiException

        # The last one: a process of several that send has ended.
        known = isinstance(error, ApiException | QdrantException | RuntimeError)
        status = getattr(error, "status_code", None) or 500
        return (status >= 500 or status in (408, 429)) if known else None

    @property
    def _models(self) -> Any:
        return library("qdrant_client", QDRANT).models

    def _create(self) -> None:
        ask, models, width = self._ask, self._models, self._manifest.width
        how: Any = {"size": width, "distance": models.Distance.DOT, "on_disk": True}
        int8 = models.ScalarQuantizationConfig(type=models.ScalarType.INT8, always_ram=True)
        ask(
            "create_collection",
            vectors_config=models.VectorParams(**how),
            shard_number=self.settings.shards,
            replication_factor=self.settings.replicas,
            on_disk_payload=True,
            quantization_config=models.ScalarQuantization(scalar=int8),
            hnsw_config=models.HnswConfigDiff(m=16, ef_construct=100),
            # A graph that grows with every batch would cost far more than one at the end.
            optimizers_config=models.OptimizersConfigDiff(indexing_threshold=0),
        )
        schema = models.PayloadSchemaType.KEYWORD
        ask("create_payload_index", field_name=TERMS, field_schema=schema, wait=True)

    def _send(self, numbers: range) -> None:
        self._ask(
            "upload_collection",
            attempts=1,  # it repeats requests itself
            vectors=(self._sent[number].astype(np.float32).tolist() for number in numbers),
            payload=map(self._row, numbers),
            ids=numbers,
            batch_size=self.settings.batch,
            parallel=self.settings.workers,
            max_retries=server_index.ATTEMPTS - 1,
            wait=True,
        )

    def _finish(self) -> None:
        optimizers = self._models.OptimizersConfigDiff(indexing_threshold=_INDEXED_FROM)
        self._ask("update_collection", optimizers_config=optimizers)

    def _count(self) -> int:
        return self._ask("count", exact=True).count

    def _stored(self, numbers: list[int]) -> list[tuple[int, Any, Any]]:
        points = self._ask("retrieve", ids=numbers, with_payload=[DIGEST], with_vectors=True)
        return [(point.id, point.vector, point.payload) for point in points]

    def _hits(self, asked: list[Any], k: int, only: Any) -> list[list[tuple[int, float]]]:
        models, exact = self._models, self.settings.exact
        int8 = models.QuantizationSearchParams(
            ignore=exact, rescore=True, oversampling=_OVERSAMPLING
        )
        params = models.SearchParams(exact=exact, quantization=int8)
        how = {"params": params, "filter": only, "with_payload": False, "limit": k}
        requests = [models.QueryRequest(query=vector, **how) for vector in asked]
        answers = self._ask("query_batch_points", requests=requests)
        return [[(point.id, point.score) for point in one.points] for one in answers]

    def _having(self, terms: list[list[str]]) -> Any:
        models = self._models
        matches = [models.MatchAny(any=some) for some in terms]
        return models.Filter(must=[models.FieldCondition(key=TERMS, match=m) for m in matches])

    def _any(self, only: Any) -> bool:
        return bool(self._ask("scroll", scroll_filter=only, limit=1, with_payload=False)[0])
