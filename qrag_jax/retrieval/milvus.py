"""Engines on a Milvus server or cluster: vectors, and words (BM25) past one machine's memory.

Words are sparse vectors, whose inner product is the score of `bm25`: a passage has the weights of
its words, a query how often it has each. Milvus' own function for BM25 weighs words by the counts
of one part of a collection, and reads them by its own rules. With ours a passage has one score, in
whatever part it is, and the languages of `BM25Config` are there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from qrag_jax.errors import InputError, library
from qrag_jax.llm.endpoint import is_local
from qrag_jax.retrieval import server_index
from qrag_jax.retrieval.bm25 import BM25Config, Words
from qrag_jax.retrieval.corpus import name_hash
from qrag_jax.retrieval.index_folder import MILVUS, MILVUS_BM25
from qrag_jax.retrieval.protocol import Queries
from qrag_jax.retrieval.server_index import TERMS, ServerIndex
from qrag_jax.retrieval.vectors import float_rows

ID, VECTOR, PAYLOAD = "id", "vector", "payload"  # fields of rows, with `TERMS`
_MOST_TERMS = 4096  # of a row: the most that an array of Milvus holds
_EF = 128  # candidates that a search by graph keeps, at least
_NO_WORD = 2**32 - 2  # the last dimension, of passages without words: no vector may be empty
_UNREACHABLE = 2  # pymilvus' code of errors


class MilvusIndex(ServerIndex):
    """Vectors in a collection of Milvus; see `protocol.VectorIndex`. A key is USER:PASSWORD."""

    ENGINE, TITLE, URL, KEY = MILVUS, "Milvus", "http://127.0.0.1:19530", "MILVUS_TOKEN"
    EXISTS, DROP = "has_collection", "drop_collection"

    def _connected(self) -> Any:
        url = self.settings.url
        client = library("pymilvus", MILVUS).MilvusClient
        # It would log each failure with a traceback, also those that pass.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        options = {
            "grpc.enable_http_proxy": not is_local(url),
            "grpc.keepalive_time_ms": 300_000,  # Milvus Lite hangs up on who asks it more often
            "grpc.use_local_subchannel_pool": 1,  # else one that failed delays the next attempt
        }
        how: Any = {"timeout": server_index.TIMEOUT, "dedicated": True, "grpc_options": options}
        return client(url, token=self._key, **how)

    def _failure(self, error: Exception) -> bool | None:
        from grpc import RpcError
        from pymilvus.exceptions import MilvusException

        if isinstance(error, MilvusException):  # whose code may be one of gRPC
            return error.retriable or error.code == _UNREACHABLE or not isinstance(error.code, int)
        return True if isinstance(error, RpcError) else None

    def _create(self) -> None:
        from pymilvus import DataType, MilvusClient

        ask, settings, schema = self._ask, self.settings, MilvusClient.create_schema()
        schema.add_field(ID, DataType.INT64, is_primary=True)
        kind = "FLAT" if settings.exact else settings.index
        if width := self._manifest.width:
            schema.add_field(VECTOR, DataType.FLOAT_VECTOR, dim=width)
        else:
            schema.add_field(VECTOR, DataType.SPARSE_FLOAT_VECTOR)
            kind = "SPARSE_INVERTED_INDEX"
        array: Any = {"element_type": DataType.INT64, "max_capacity": _MOST_TERMS}
        schema.add_field(TERMS, DataType.ARRAY, **array)
        schema.add_field(PAYLOAD, DataType.JSON)
        how: Any = {"num_shards": settings.shards, "consistency_level": "Strong"}
        ask("create_collection", schema=schema, **how)
        of_vectors, of_terms = (MilvusClient.prepare_index_params() for _ in range(2))
        of_vectors.add_index(VECTOR, index_type=kind, metric_type="IP")
        ask("create_index", index_params=of_vectors)
        of_terms.add_index(TERMS, index_type="INVERTED")
        with contextlib.suppress(InputError):  # Milvus Lite has no index of arrays, and reads them
            ask("create_index", index_params=of_terms)

    def _send(self, numbers: range) -> None:
        rows = []
        for number, vector in zip(numbers, self._vectors(numbers)):
            kept = self._row(number)
            terms = sorted({*map(_number, kept.pop(TERMS))})
            rows.append({ID: number, VECTOR: vector, TERMS: terms, PAYLOAD: kept})
        self._ask("upsert", data=rows, timeout=server_index.TIMEOUT)

    def _vectors(self, numbers: range) -> Iterable[Any]:
        return float_rows(self._sent, numbers)

    def _finish(self) -> None:
        self._ask("flush")

    def _count(self) -> int:
        # Milvus Lite has nothing loaded when it has started.
        self._ask("load_collection", replica_number=self.settings.replicas)
        return self._ask("query", output_fields=["count(*)"])[0]["count(*)"]

    def _stored(self, numbers: list[int]) -> list[tuple[int, Any, Any]]:
        fields = [ID, VECTOR, PAYLOAD]
        rows = self._ask("get", ids=numbers, output_fields=fields) if numbers else []
        return [(row[ID], row[VECTOR], row[PAYLOAD]) for row in rows]

    def _hits(self, asked: list[Any], k: int, only: Any) -> list[list[tuple[int, float]]]:
        effort = "search_list" if self.settings.index == "DISKANN" else "ef"
        params = {"params": {effort: max(k, _EF)}}
        how: Any = {"anns_field": VECTOR, "limit": k, "filter": only or "", "search_params": params}
        how |= {"output_fields": [ID], "timeout": server_index.TIMEOUT}
        answers = self._ask("search", data=asked, **how)
        return [[(hit[ID], hit["distance"]) for hit in one] for one in answers]

    def _having(self, terms: list[list[str]]) -> Any:
        parts = (f"ARRAY_CONTAINS_ANY({TERMS}, {[*map(_number, some)]})" for some in terms)
        return " and ".join(parts)

    def _any(self, only: Any) -> bool:
        return bool(self._ask("query", filter=only, limit=1, output_fields=[ID]))


class MilvusBM25Index(MilvusIndex):
    """BM25 in a collection of Milvus, with the hits of `bm25.BM25Index`.

    It is filled in two readings of the corpus, with the counts of its words in memory.
    """

    ENGINE = MILVUS_BM25

    def _words(self) -> Words:
        return Words(BM25Config(**self._manifest.settings["words"]))

    def _asked(self, queries: Queries) -> list[Any]:
        counts = map(_counts, map(self._words(), queries.texts))
        return [{word: float(tf) for word, tf in one.items()} for one in counts]

    @functools.cached_property
    def _passages_with(self) -> tuple[Counter[int], float]:
        """In how many passages each word is; and how many words a passage has on average."""
        words, passages, length = self._words(), Counter[int](), 0
        for passage in self.corpus:
            counts = _counts(words(passage.whole))
            passages.update(counts.keys())
            length += counts.total()
        return passages, length / len(self.corpus)

    def _vectors(self, numbers: range) -> Iterable[Any]:
        words, (passages, mean) = self._words(), self._passages_with
        k1, b = (self._manifest.settings["words"][name] for name in ("k1", "b"))
        for passage in self.corpus.passages(numbers):
            counts, weights = _counts(words(passage.whole)), dict[int, float]()
            held = k1 * (1 - b + b * counts.total() / max(mean, 1))
            for word, tf in counts.items():
                rare = (len(self.corpus) - passages[word] + 0.5) / (passages[word] + 0.5)
                weights[word] = math.log1p(rare) * tf / (tf + held)
            yield weights or {_NO_WORD: 1.0}


def _counts(words: list[str]) -> Counter[int]:
    """How often each word is there, by 32 bits of its hash: a dimension of Milvus.

    Of five million words one in a thousand shares them with another, and counts as that, too.
    """
    return Counter(name_hash(word) % _NO_WORD for word in words)


def _number(term: str) -> int:
    """63 bits of a term: numbers need no quotes in filters."""
    return name_hash(term) >> 1
