"""An engine on a Qdrant server or cluster, for corpora that outgrow one machine.

A point's id is the passage's number. Its payload has the passage's `name` and `metadata`, for other
programs, and `terms`, by which we filter. Point 0 says what the collection was made from: this
works with every version of the server, and is there as soon as there is anything.

The library is optional (`pip install 'qrag_jax[qdrant]'`) and imported when it is first used.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.errors import InputError, check_least
from qrag_jax.llm.endpoint import check_url, is_local, read_key
from qrag_jax.retrieval.columns import keys_of, unknown_field, wanted_keys
from qrag_jax.retrieval.manifest import Manifest, read_manifest, settings_as, write_manifest
from qrag_jax.retrieval.protocol import (
    NONE,
    Corpus,
    Hits,
    Passage,
    Queries,
    Where,
    engine_library,
)
from qrag_jax.retrieval.ranking import check_k, ranked
from qrag_jax.retrieval.vectors import (
    Vectors,
    check_count,
    check_finite,
    check_numbers,
    checked,
    query_vectors,
)

ENGINE = "qdrant"
KEY_VARIABLE = "QDRANT_API_KEY"
TERMS = "terms"
MADE = "qrag_jax"  # field of point 0
_SECTION = "qdrant"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_QUERIES = 64  # in one request
_POINTS = 1000  # read in one request
# Passages that are handed to the client at a time; all those before are there. An upload that was
# broken off starts again with the last ones, and an error that passes costs no more than these.
_SENT = 65_536
_RETRIES = 2  # of a batch by the client, at once; after that there are pauses
_INDEXED_FROM = 20_000  # KB of a segment's vectors from which on it gets a graph; Qdrant's own
_LONGEST_TERM = 200
_LOOKED_AT = 1000  # vectors
_LONGEST_PAUSE = 8.0
_LONGEST_TEXT = 200
_ANOTHER = "name another collection, or give replace=True (--replace) to delete this one"
_REFUSED = (401, 403, "UNAUTHENTICATED", "PERMISSION_DENIED")
# HTTP's statuses and gRPC's codes with which the same call may succeed later.
_PASSING: tuple[int | str, ...] = (
    *(408, 425, 429, 500, 502, 503, 504),
    *("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "INTERNAL"),
    *("CANCELLED", "UNKNOWN"),
)


@dataclasses.dataclass(frozen=True)
class QdrantServer:
    """A collection, where it is, and how it is asked.

    The API key is read from the environment variable QDRANT_API_KEY alone.

    Attributes:
        url: of a server or of any node of a cluster.
        collection: the collection's name.
        grpc: whether points are sent by gRPC, which is faster than JSON.
        grpc_port: of the server, for this.
        batch: passages that are sent at a time.
        workers: processes that send; with more than one, a script needs its `__main__` guard.
        attempts: to ask for one thing, at most, while the server cannot be reached or is broken.
        pause: seconds before the second attempt; doubles up to 8 s.
        timeout: seconds for one attempt.
    """

    url: str = "http://127.0.0.1:6333"
    collection: str = "passages"
    grpc: bool = False
    grpc_port: int = 6334
    batch: int = 256
    workers: int = 1
    attempts: int = 6
    pause: float = 0.5
    timeout: int = 60

    def __post_init__(self) -> None:
        parts = check_url(self.url, "the URL of Qdrant", "http://127.0.0.1:6333", KEY_VARIABLE)
        plain = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        object.__setattr__(self, "url", plain)
        if not _NAME.fullmatch(self.collection):
            raise InputError(
                f"the name of the collection is {self.collection!r}; use letters, digits, dots, "
                "hyphens and underscores."
            )
        check_least(_SECTION, self, grpc_port=1, batch=1, workers=1, attempts=1, timeout=1)
        check_least(_SECTION, self, pause=0)


@dataclasses.dataclass(frozen=True)
class QdrantLayout:
    """How the server keeps the vectors.

    With shards=16, these are the settings of HARR's index of Wikipedia, 21 million passages.

    Attributes:
        shards: parts that are searched side by side, and spread over the nodes of a cluster.
        replicas: nodes that hold each part.
        int8: whether searches read numbers of 8 bits, which stay in memory.
        on_disk: whether the float32 numbers are read from disk where they are needed.
        m: links of a vector in the HNSW graph; 0: no graph, and every search reads all vectors.
        ef_construct: candidates for these links.
    """

    shards: int = 1
    replicas: int = 1
    int8: bool = True
    on_disk: bool = True
    m: int = 16
    ef_construct: int = 100

    def __post_init__(self) -> None:
        check_least(_SECTION, self, shards=1, replicas=1, m=0, ef_construct=4)


@dataclasses.dataclass(frozen=True)
class QdrantSearch:
    """How the server searches.

    Attributes:
        exact: whether all vectors are compared in float32; else the graph and the numbers of 8
            bits are used, where there are any, and passages may be missed.
        ef: candidates of the search in the graph; 0: as the server has it.
        rescore: whether hits by 8 bits are scored again in float32; scores are else coarse.
        oversampling: this many times k are found by 8 bits for this; at least 1.
        ties: the most passages that are asked for to put those with equal scores in order.
    """

    exact: bool = False
    ef: int = 0
    rescore: bool = True
    oversampling: float = 2.0
    ties: int = 10_000

    def __post_init__(self) -> None:
        check_least(_SECTION, self, ef=0, oversampling=1.0, ties=1)
        if not math.isfinite(self.oversampling):
            raise InputError(f"config.{_SECTION}.oversampling is inf; use a number such as 2.")


@dataclasses.dataclass(frozen=True)
class QdrantTarget:
    """Where a collection is made, and how.

    Attributes:
        server: where it is.
        layout: how the server keeps the vectors.
        search: how it searches, unless another way is asked for.
        replace: whether a collection of this name is deleted before.
    """

    server: QdrantServer = dataclasses.field(default_factory=QdrantServer)
    layout: QdrantLayout = dataclasses.field(default_factory=QdrantLayout)
    search: QdrantSearch = dataclasses.field(default_factory=QdrantSearch)
    replace: bool = False

    @classmethod
    def parse(cls, text: str, **of_server: str) -> QdrantTarget:
        """The target that settings on a command line describe.

        Args:
            text: settings of the three kinds, such as "shards=16,replicas=2,exact=true".
            of_server: further settings of the server.
        """
        kinds = (QdrantServer, QdrantLayout, QdrantSearch)
        defaults: dict[str, Any] = {
            field.name: field.default
            for kind in kinds
            for field in dataclasses.fields(kind)
            if not isinstance(field.default, str)  # these have flags of their own
        }
        given: dict[str, Any] = dict(of_server)
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in defaults:
                raise InputError(
                    f"--qdrant_settings has {part!r}; write NAME=VALUE with commas between them, "
                    f"of {', '.join(defaults)}."
                )
            given[name] = _number(name, value, defaults[name])
        server, layout, search = (
            {f.name: given[f.name] for f in dataclasses.fields(kind) if f.name in given}
            for kind in kinds
        )
        return cls(QdrantServer(**server), QdrantLayout(**layout), QdrantSearch(**search))


def _number(name: str, text: str, like: bool | float) -> bool | float:
    """The value of a setting, which has the kind of `like`: true or false, or a number."""
    try:
        value = json.loads(text.lower())
    except ValueError:
        value = None
    kinds = (int, float) if isinstance(like, float) else (type(like),)
    if type(value) not in kinds:
        wanted = "true or false" if isinstance(like, bool) else f"a number such as {like}"
        raise InputError(f"--qdrant_settings has {text!r} for {name}; give {wanted}.")
    return value


@dataclasses.dataclass(frozen=True)
class _Made:
    """What a collection is made from, which must be the same wherever it is used.

    Attributes:
        corpus: the digest of the corpus.
        count: number of passages.
        encoder: a digest of the encoder; "" if unknown.
        width: of a vector.
        vectors: SHA-256 of up to 1000 vectors, evenly spaced, in hex.
        layout: how the server keeps them.
    """

    corpus: str
    count: int
    encoder: str
    width: int
    vectors: str
    layout: QdrantLayout


class QdrantIndex:
    """All passages' vectors in a collection of Qdrant; see `protocol.VectorIndex`.

    `build` and `open` make one. Passages of equal scores come in the order of their numbers: more
    than k are asked for until the score falls, up to `QdrantSearch.ties`. What is left to the
    server: which of more than so many equal passages it gives, and, in a search by graph, which
    passages it looks at; `exact=True` leaves it only the former.

    Attributes:
        corpus: the passages.
        search_settings: of the search.
    """

    def __init__(
        self, corpus: Corpus, connection: _Connection, made: _Made, search: QdrantSearch
    ) -> None:
        self.corpus, self.search_settings = corpus, search
        self._connection, self._made, self._ask = connection, made, connection.ask
        self._known = set[str]()

    @classmethod
    def build(
        cls,
        corpus: Corpus,
        vectors: np.ndarray | Vectors,
        target: QdrantTarget,
        encoder: str = "",
        told: Callable[[int], None] = lambda passages: None,
    ) -> QdrantIndex:
        """Fills a collection; `save` then makes a folder an index of it.

        An upload that was broken off goes on, with some passages that are there already. The server
        begins to build its graph when all are there. Until `indexed` says that it has ended,
        searches give good hits, but slowly.

        Args:
            vectors: of the passages in the same order, `[passages, width]`.
            encoder: a digest of what embedded the passages; "": unknown.
            told: called with the number of passages that were handed to the client, before each
                batch; what it raises breaks the upload off.
        """
        if not isinstance(vectors, Vectors):
            vectors = Vectors([checked(vectors, "the index")])
        check_count(len(vectors), len(corpus))
        if not len(corpus):
            raise InputError("the corpus has no passages; give one that has.")
        made = _Made(
            corpus=corpus.digest,
            count=len(corpus),
            encoder=encoder,
            width=vectors.width,
            vectors=_digest_of(vectors),
            layout=target.layout,
        )
        index = cls(corpus, _Connection(target.server), made, target.search)
        index._prepare(target.replace)
        index._upload(vectors, told)
        return index

    @classmethod
    def open(
        cls,
        folder: Path,
        corpus: Corpus,
        *,
        server: QdrantServer | None = None,
        search: QdrantSearch | None = None,
        encoder: str | None = None,
    ) -> QdrantIndex:
        """The index of a folder.

        Args:
            server: where the collection is now; None: where it was when the index was saved; if
                that is another machine, no API key may be exported, which would go there.
            search: None: as it was saved.
            encoder: the digest that its vectors must be of; None: any.
        """
        given = {} if encoder is None else {"encoder": encoder}
        said = read_manifest(folder, engine=ENGINE, corpus=corpus.digest, **given).settings
        if server is None:
            server = settings_as(QdrantServer, said.get("server"), folder)
            _check_named(server)
        search = search or settings_as(QdrantSearch, said.get("search"), folder)
        made = settings_as(_Made, said.get("made"), folder)
        index = cls(corpus, _Connection(server), made, search)
        index._check()
        if (there := index._count()) != len(corpus):
            raise InputError(
                f"{index._connection.what} has {there} of {len(corpus)} passages; build the index "
                "again, which sends them."
            )
        return index

    @property
    def indexed(self) -> bool:
        """Whether a server has no graph and no numbers of 8 bits left to build.

        After `build` it may take a second to begin.
        """
        return self._ask("get_collection").status == _models().CollectionStatus.GREEN

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        """The k passages with the highest inner products; see `protocol.Index`."""
        given = query_vectors(queries, self._made.width)
        check_k(k)
        only = None if where is None else self._filter_of(where)
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
        """
        wanted = check_numbers(numbers, len(self.corpus))
        unique, places = np.unique(wanted, return_inverse=True)
        rows = np.empty((len(unique), self._made.width), np.float32)
        for first in range(0, len(unique), _POINTS):
            ids = unique[first : first + _POINTS].tolist()
            points = self._ask("retrieve", ids=ids, with_payload=False, with_vectors=True)
            found = {point.id: point.vector for point in points}
            for place, number in enumerate(ids, first):
                if number not in found:
                    raise InputError(
                        f"{self._connection.what} lacks the passage {number}; build the index "
                        "again with replace=True."
                    )
                rows[place] = found[number]
        return rows[places]

    def save(self, folder: Path) -> None:
        """Writes the manifest.

        Raises:
            OSError: the folder cannot be written.
        """
        made = self._made
        manifest = Manifest(
            engine=ENGINE,
            corpus=made.corpus,
            count=made.count,
            encoder=made.encoder,
            width=made.width,
            dtype="float32",
            settings={
                "server": dataclasses.asdict(self._connection.server),
                "search": dataclasses.asdict(self.search_settings),
                "made": dataclasses.asdict(made),
            },
        )
        write_manifest(folder, manifest)

    # ------------------------------------------------------------------ the collection

    def _prepare(self, replace: bool) -> None:
        """Makes the collection where there is none; else it must be one of the same things."""
        if replace:
            self._ask("delete_collection")
        if self._ask("collection_exists"):
            self._check()
        else:
            self._create()

    def _check(self) -> None:
        """Refuses a collection that was made from something else; one without points is good."""
        what, made = self._connection.what, self._made
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
        if found.distance != _models().Distance.DOT:
            raise InputError(
                f"{what} ranks by {found.distance.value} (field distance), but scores here are "
                f"inner products (Dot); {_ANOTHER}."
            )
        if not self._count():
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

    def _count(self) -> int:
        return self._ask("count", exact=True).count

    def _create(self) -> None:
        models, layout = _models(), self._made.layout
        int8 = models.ScalarQuantizationConfig(type=models.ScalarType.INT8, always_ram=True)
        try:
            self._ask(
                "create_collection",
                vectors_config=models.VectorParams(
                    size=self._made.width, distance=models.Distance.DOT, on_disk=layout.on_disk
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
        self._ask(
            "create_payload_index",
            field_name=TERMS,
            field_schema=models.PayloadSchemaType.KEYWORD,
            wait=True,
        )

    def _upload(self, vectors: Vectors, told: Callable[[int], None]) -> None:
        """Sends all passages, unless all are there, and lets the server build its graph."""
        models, layout, server = _models(), self._made.layout, self._connection.server

        def points(passages: range) -> Iterator[Any]:
            for first in range(passages.start, passages.stop, server.batch):
                told(first)
                some = range(first, min(first + server.batch, passages.stop))
                rows = vectors.rows(some)
                check_finite(rows, "the index", first)
                for number, passage, row in zip(some, self.corpus.passages(some), rows):
                    payload = _payload_of(passage)
                    if number == 0:
                        payload[MADE] = dataclasses.asdict(self._made)
                    yield models.PointStruct(id=number, vector=row.tolist(), payload=payload)

        def send(passages: range) -> None:
            def attempt() -> None:
                self._connection.client.upload_points(
                    server.collection,
                    points(passages),
                    batch_size=server.batch,
                    parallel=server.workers,
                    max_retries=_RETRIES,
                    wait=True,
                )

            self._connection.try_often(attempt, "upload_points")

        count, there = self._made.count, self._count()
        if there != count:
            if not there:
                send(range(1))  # says at once what the collection is made from
            for first in range(max(there - _SENT, 0), count, _SENT):
                send(range(first, min(first + _SENT, count)))
            if (there := self._count()) != count:
                raise InputError(
                    f"{self._connection.what} has {there} points after {count} passages were sent, "
                    "so that another program writes to it; end that one, and give replace=True."
                )
        told(count)
        self._ask(
            "update_collection",
            hnsw_config=models.HnswConfigDiff(m=layout.m, ef_construct=layout.ef_construct),
            optimizers_config=models.OptimizersConfigDiff(indexing_threshold=_INDEXED_FROM),
        )

    # ------------------------------------------------------------------ the search

    def _found(self, vectors: np.ndarray, asked: int, only: Any) -> list[list[Any]]:
        """The scored points of each query, best first."""
        models, params = _models(), self._params()
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
        models, chosen = _models(), self.search_settings
        coarse = models.QuantizationSearchParams(
            ignore=chosen.exact,
            rescore=chosen.rescore,
            oversampling=chosen.oversampling if chosen.rescore else None,
        )
        return models.SearchParams(
            exact=chosen.exact,
            hnsw_ef=chosen.ef or None,
            quantization=coarse if self._made.layout.int8 else None,
        )

    def _filter_of(self, where: Where) -> Any:
        """Qdrant's filter with the meaning of `Corpus.matching`; None: nothing is left out."""
        for field in where:
            if field not in self._known:
                only = _with_one_of_each([[_term(field)]])
                if not self._ask("scroll", scroll_filter=only, limit=1, with_payload=False)[0]:
                    raise unknown_field(field, self._connection.what)
                self._known.add(field)
        fields = [[_term(field, key) for key in wanted_keys(v)] for field, v in where.items()]
        return _with_one_of_each(fields) if fields else None


class _Connection:
    """Asks for a collection of a server, again while it cannot be reached or is broken.

    Attributes:
        server: as given.
        client: the library's own.
        what: names the collection in errors; without a key.
    """

    def __init__(self, server: QdrantServer) -> None:
        self.server, self._key = server, _key()
        self._where = f"the Qdrant server at {server.url}"
        self.what = f"the collection {server.collection} of {self._where}"
        self.client = engine_library("qdrant_client", "qdrant-client", "qdrant").QdrantClient(
            url=server.url,
            port=443 if server.url.startswith("https:") else 6333,  # where the URL has none
            api_key=self._key or None,
            prefer_grpc=server.grpc,
            grpc_port=server.grpc_port,
            timeout=server.timeout,
            check_compatibility=False,  # it asks the server before anything is wanted of it
            trust_env=not is_local(server.url),  # proxies
        )

    def ask(self, method: str, **arguments: Any) -> Any:
        """Calls a method of the library's client for the collection; see `try_often`."""
        call = functools.partial(getattr(self.client, method), self.server.collection, **arguments)
        return self.try_often(call, method)

    def try_often(self, call: Callable[[], Any], what: str) -> Any:
        """Calls a function of the client, again while the server is broken; returns its result.

        Args:
            what: names the call in errors.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                return call()
            except Exception as error:
                failure = _failure(error)
                if failure is None:
                    raise
            if failure[0] not in _PASSING or attempt == self.server.attempts:
                raise self._error(*failure, what)
            time.sleep(min(self.server.pause * 2 ** (attempt - 1), _LONGEST_PAUSE))

    def _error(self, code: int | str, why: str, what: str) -> InputError:
        why = " ".join(why.split())
        why = (why.replace(self._key, "***") if self._key else why)[:_LONGEST_TEXT]
        if code in _REFUSED:
            fix = f"export its API key in the environment variable {KEY_VARIABLE}"
            return InputError(f"{self._where} refuses the API key ({why}); {fix}.")
        if code in _PASSING:
            fix = "start it, or give the url of one that runs"
            return InputError(f"{self._where} does not answer as it should ({why}); {fix}.")
        return InputError(
            f"{self._where} refuses {what} for the collection {self.server.collection} ({why}); "
            "change the setting that it names, or the server's."
        )


def _failure(error: Exception) -> tuple[int | str, str] | None:
    """The code and the text of an error of the server; None: it is not about the server."""
    import grpc
    from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
    from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

    if isinstance(error, UnexpectedResponse):
        status = error.status_code or 0
        return status, f"HTTP {status}: {error.content.decode('utf-8', 'replace')}"
    if isinstance(error, ResourceExhaustedResponse):
        return 429, f"HTTP 429: {error.message}"
    if isinstance(error, ResponseHandlingException):
        return "UNAVAILABLE", f"{type(error.source).__name__}: {error.source}"
    if isinstance(error, grpc.RpcError):
        code = getattr(getattr(error, "code", lambda: None)(), "name", "UNKNOWN")
        return code, f"gRPC {code}: {getattr(error, 'details', lambda: '')()}"
    if isinstance(error, RuntimeError):  # one of several processes that send has ended
        return "UNKNOWN", f"{type(error).__name__}: {error}"
    return None


def _models() -> Any:
    return engine_library("qdrant_client", "qdrant-client", "qdrant").models


def _key() -> str:
    set_at_all = os.environ.get(KEY_VARIABLE, "").strip()
    return read_key(KEY_VARIABLE if set_at_all else "", KEY_VARIABLE)


def _check_named(server: QdrantServer) -> None:
    """Refuses to send the API key to another machine that only an index folder names.

    The folder may be anyone's, and whoever wrote it would get the key.
    """
    if not is_local(server.url) and _key():
        raise InputError(
            f"the index names the Qdrant server at {server.url}, and {KEY_VARIABLE} holds a key; "
            "name the server yourself (--qdrant=URL, or server of the settings) if the key may go "
            "there, or unset the variable."
        )


def _digest_of(vectors: Vectors) -> str:
    """SHA-256 of up to 1000 vectors, evenly spaced: tells apart what two encoders made."""
    numbers = np.unique(np.linspace(0, len(vectors) - 1, _LOOKED_AT).round().astype(np.int64))
    return hashlib.sha256(vectors.rows(numbers).astype("<f4").tobytes()).hexdigest()


def _payload_of(passage: Passage) -> dict[str, Any]:
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
    models = _models()
    return models.Filter(
        must=[
            # gRPC has no empty list of words; no passage has the empty word.
            models.FieldCondition(key=TERMS, match=models.MatchAny(any=each or [""]))
            for each in terms
        ]
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
