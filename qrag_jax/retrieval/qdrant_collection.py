"""A collection of Qdrant: what is in it, who made it, and how it is made and filled.

A point's id is the passage's number. Its payload has the passage's `name` and `metadata`, for other
programs, and `terms`, by which we filter. Point 0 says what the collection was made from: this
works with every version of the server, and is there as soon as there is anything.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.columns import keys_of, unknown_field, wanted_keys
from qrag_jax.retrieval.protocol import Passage, Where
from qrag_jax.retrieval.qdrant_server import Connection, library
from qrag_jax.retrieval.qdrant_settings import QdrantLayout
from qrag_jax.retrieval.vectors import Vectors

TERMS = "terms"
MADE = "qrag_jax"  # field of point 0
_INDEXED_FROM = 20_000  # KB of a segment's vectors from which on it gets a graph; Qdrant's own
_LONGEST_TERM = 200
_LOOKED_AT = 1000  # vectors
_ANOTHER = "name another collection, or give replace=True (--replace) to delete this one"


@dataclasses.dataclass(frozen=True)
class Made:
    """What a collection is made from, which must be the same wherever it is used.

    Attributes:
        corpus: the digest of the corpus.
        count: number of passages.
        encoder: a digest of the encoder; "" if unknown.
        version: of the vectors.
        width: of a vector.
        vectors: SHA-256 of up to 1000 vectors, evenly spaced, in hex.
        layout: how the server keeps them.
    """

    corpus: str
    count: int
    encoder: str
    version: int
    width: int
    vectors: str
    layout: QdrantLayout


def digest_of(vectors: Vectors) -> str:
    """SHA-256 of up to 1000 vectors, evenly spaced: tells apart what two encoders made."""
    numbers = np.unique(np.linspace(0, len(vectors) - 1, _LOOKED_AT).round().astype(np.int64))
    return hashlib.sha256(vectors.rows(numbers).astype("<f4").tobytes()).hexdigest()


class Collection:
    """A collection that is, or shall be, made from something.

    Args:
        connection: to where it is.
        made: what it is made from.
    """

    def __init__(self, connection: Connection, made: Made) -> None:
        self.connection, self.made = connection, made
        self._ask, self._known = connection.ask, set[str]()

    def prepare(self, replace: bool) -> None:
        """Makes the collection where there is none; else it must be one of the same things.

        Args:
            replace: whether a collection of this name is deleted before.

        Raises:
            InputError: as `check`; or the server fails or refuses.
        """
        if replace:
            self._ask("delete_collection")
        if self._ask("collection_exists"):
            self.check()
        else:
            self._create()
        self.connection.quicken()

    def check(self) -> None:
        """Refuses a collection that was made from something else; one without points is good.

        Raises:
            InputError: it is of another width, metric, corpus, encoder, version or layout, is not
                ours, or does not exist; or the server fails.
        """
        what, made = self.connection.what, self.made
        if not self._ask("collection_exists"):
            raise InputError(f"{what} does not exist; build the index again, or give its server.")
        found = self._ask("get_collection").config.params.vectors
        if not hasattr(found, "size"):
            raise InputError(f"{what} has vectors with names, which ours have not; {_ANOTHER}.")
        if found.size != made.width:
            raise InputError(
                f"{what} is for vectors of {found.size} numbers, but these have {made.width}; "
                f"{_ANOTHER}."
            )
        if found.distance != library().models.Distance.DOT:
            raise InputError(
                f"{what} ranks by {found.distance.value} (field distance), but scores here are "
                f"inner products (Dot); {_ANOTHER}."
            )
        if not self.count():
            return
        points = self._ask("retrieve", ids=[0], with_payload=[MADE])
        said = (points[0].payload or {}).get(MADE) if points else None
        if not isinstance(said, dict):
            raise InputError(
                f"{what} does not say what it was made from, so it is not ours; {_ANOTHER}."
            )
        for field, wanted in dataclasses.asdict(made).items():
            if said.get(field) != wanted:
                raise InputError(
                    f"{what} was made from another thing: {said.get(field)!r} in the field "
                    f"{field}, not {wanted!r}; {_ANOTHER}."
                )

    def count(self) -> int:
        """The number of points, counted."""
        return self._ask("count", exact=True).count

    def put(self, first: int, passages: list[Passage], vectors: np.ndarray) -> None:
        """Writes passages, or writes them again; returns when the server has done so.

        Args:
            first: the number of the first.
            vectors: float32 `[passages, width]`.

        Raises:
            InputError: the server fails or refuses.
        """
        payloads = [payload_of(passage) for passage in passages]
        if first == 0:
            payloads[0][MADE] = dataclasses.asdict(self.made)
        ids = list(range(first, first + len(passages)))
        batch = library().models.Batch(ids=ids, vectors=vectors.tolist(), payloads=payloads)
        self._ask("upsert", points=batch, wait=True)

    def finish(self) -> None:
        """Lets the server build its graph and its numbers of 8 bits, which takes its time.

        Raises:
            InputError: the server fails or refuses.
        """
        if self.connection.local:
            return
        models, layout = library().models, self.made.layout
        self._ask(
            "update_collection",
            hnsw_config=models.HnswConfigDiff(m=layout.m, ef_construct=layout.ef_construct),
            optimizers_config=models.OptimizersConfigDiff(indexing_threshold=_INDEXED_FROM),
        )

    def filter_of(self, where: Where) -> Any:
        """Qdrant's filter with the meaning of `Corpus.matching`; None: nothing is left out.

        Raises:
            InputError: no passage has a field of that name; or the server fails.
        """
        for field in where:
            self._check_field(field)
        fields = [[_term(field, key) for key in wanted_keys(v)] for field, v in where.items()]
        return _with_one_of_each(fields) if fields else None

    def _check_field(self, field: str) -> None:
        if field not in self._known:
            only = _with_one_of_each([[_term(field)]])
            if not self._ask("scroll", scroll_filter=only, limit=1, with_payload=False)[0]:
                raise unknown_field(field, self.connection.what)
            self._known.add(field)

    def _create(self) -> None:
        models, layout = library().models, self.made.layout
        int8 = models.ScalarQuantizationConfig(type=models.ScalarType.INT8, always_ram=True)
        try:
            self._ask(
                "create_collection",
                vectors_config=models.VectorParams(
                    size=self.made.width, distance=models.Distance.DOT, on_disk=layout.on_disk
                ),
                shard_number=layout.shards,
                replication_factor=layout.replicas,
                on_disk_payload=True,
                quantization_config=models.ScalarQuantization(scalar=int8) if layout.int8 else None,
                # A graph that grows with every batch would cost far more than one at the end.
                hnsw_config=models.HnswConfigDiff(m=0),
                optimizers_config=models.OptimizersConfigDiff(indexing_threshold=0),
            )
        except InputError:
            # An attempt may have succeeded without an answer; the next is then refused.
            if not self._ask("collection_exists"):
                raise
        if not self.connection.local:  # where it would have no effect
            self._ask(
                "create_payload_index",
                field_name=TERMS,
                field_schema=models.PayloadSchemaType.KEYWORD,
                wait=True,
            )


def payload_of(passage: Passage) -> dict[str, Any]:
    """What a point holds besides its vector."""
    terms = set()
    for field, value in passage.metadata.items():
        terms |= {_term(field), *(_term(field, key) for key in keys_of(value))}
    kept = {"name": passage.name, "metadata": passage.metadata}
    # What is sent cannot have half of a surrogate pair.
    text = json.dumps(kept, ensure_ascii=False).encode("utf-8", "replace")
    payload: dict[str, Any] = json.loads(text)
    return payload | ({TERMS: sorted(terms)} if terms else {})


def _term(field: str, key: str = "") -> str:
    """A word of a passage that has the field, and this key in it if there is one.

    Qdrant itself compares no fractions, nulls or objects, and takes dots in a field's name for a
    path; it compares such words as we compare keys.
    """
    term = json.dumps(field) + ("=" + key if key else "")
    if len(term) <= _LONGEST_TERM:
        return term
    return hashlib.blake2b(term.encode(), digest_size=16).hexdigest()


def _with_one_of_each(terms: list[list[str]]) -> Any:
    models = library().models
    return models.Filter(
        must=[
            # gRPC has no empty list of words; no passage has the empty word.
            models.FieldCondition(key=TERMS, match=models.MatchAny(any=each or [""]))
            for each in terms
        ]
    )
