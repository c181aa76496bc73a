"""What engines on a server share: a collection, how it is filled and searched, and failures.

A row's id is the passage's number. It has the passage's name and metadata, for other programs, and
terms, by which we filter. Row 0 has a digest of what the collection was made from: every version of
a server can do that. The makers' clients are optional packages, imported when they are first used.
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
from typing import Annotated, Any, Self

import numpy as np

from qrag_jax.errors import Count, InputError, Rule, one_of
from qrag_jax.llm.endpoint import check_url, is_local, read_key
from qrag_jax.retrieval.corpus import StoredCorpus, keys_of, unknown_field, wanted_keys
from qrag_jax.retrieval.index_folder import Manifest, read_manifest, write_manifest
from qrag_jax.retrieval.protocol import Hits, Queries, Where, as_hits, past_ties
from qrag_jax.retrieval.vectors import query_vectors
from qrag_jax.runtime.bounded_json import typed
from qrag_jax.runtime.config_fields import check

TERMS, DIGEST = "terms", "qrag_jax"  # fields of rows, and of row 0
ATTEMPTS = 4  # to ask for one thing, while the server cannot be reached or is broken
PAUSE = 0.5  # seconds before the second attempt; doubles
TIMEOUT = 60  # seconds for one attempt
_TIES = 10_000  # the most passages asked for to put those with equal scores in order
_NAME = Rule(re.compile(r"\w[\w.-]{0,200}", re.ASCII).fullmatch, "it must be a plain name")
_QUERIES = 64  # in one request
_INDEXES = ("HNSW", "HNSW_SQ", "HNSW_PQ", "DISKANN")


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """A collection; with shards=16, Qdrant's is HARR's index of Wikipedia, 21 million passages."""

    url: str = ""  # of a server or of any node of a cluster; "": its usual port on this machine
    collection: Annotated[str, _NAME] = "passages"
    replace: bool = False  # a collection of this name is deleted before it is filled
    batch: Count = 256  # passages that are sent at a time
    workers: Count = 1  # processes that send to Qdrant; a script then needs its `__main__` guard
    shards: Count = 1  # parts that are filled and searched side by side, on a cluster's nodes
    replicas: Count = 1  # nodes that hold each part
    exact: bool = False  # all vectors are compared in float32; else passages may be missed
    index: Annotated[str, one_of(_INDEXES)] = "HNSW"  # of Milvus; _SQ: 8 bits a number

    def __post_init__(self) -> None:
        if self.url:
            check_url(self.url, "the server's URL", "http://127.0.0.1:6333", "a variable")
            object.__setattr__(self, "url", self.url.rstrip("/"))
        check(self, "--server_settings: ")

    @classmethod
    def parse(cls, text: str) -> ServerSettings:
        try:
            pairs = [part.partition("=") for part in text.split(",") if part]
            values = {n: v if n == "index" else json.loads(v.lower()) for n, _, v in pairs}
            return typed(cls, values)
        except ValueError as error:
            raise InputError(
                f"--server_settings is {text!r} ({error}); write NAME=VALUE with commas between "
                f"them, of {', '.join(field.name for field in dataclasses.fields(cls))}."
            ) from None


class ServerIndex:
    """All passages in a collection of a server; see `protocol.VectorIndex`.

    Which passages an approximate search looks at, and which of more than `_TIES` equal ones there
    are, is left to the server.
    """

    # One of `index_folder.SERVERS`, its usual URL, the only environment variable that a key is read
    # from, and the client's methods that tell whether a collection exists, and delete it.
    ENGINE = TITLE = URL = KEY = EXISTS = DROP = ""
    PIECE = 1  # batches that `_send` gets at once
    # Methods that each server has of its own.
    _connected: Any  # () → the maker's client
    _failure: Any  # (error) → whether it may pass; None: it is none of the server's
    _create: Any  # () makes the collection, which is empty
    _send: Any  # (numbers, a range) sends these rows, also those that are there
    _finish: Any  # () has the server index the rows
    _count: Any  # () → rows
    _stored: Any  # (numbers) → of each row: number, vector and what is stored, in any order
    _hits: Any  # (queries, k, filter or None) → of each query, numbers and scores of the k best
    _having: Any  # (lists of terms) → a filter: rows with one term of each list
    _any: Any  # (filter) → whether a row passes

    def __init__(
        self, corpus: StoredCorpus, settings: ServerSettings, manifest: Manifest, sent: Any = None
    ) -> None:
        """Use `build` or `open`."""
        self.corpus, self.settings, self._manifest, self._sent = corpus, settings, manifest, sent
        self._key = os.environ.get(self.KEY, "") and read_key(self.KEY, self.KEY)
        self._client, self._fields = None, set[str]()  # that passages have
        self.name = f"the {self.TITLE} collection {settings.collection} at {settings.url}"
        words = filter(None, [manifest.settings.get("words")])
        self._digest = json.dumps([manifest.corpus, manifest.encoder, manifest.width, *words])

    @classmethod
    def build(
        cls,
        corpus: StoredCorpus,
        sent: Any,
        settings: ServerSettings,
        encoder: str = "",
        report: Callable[[int], None] = lambda passages: None,
    ) -> Self:
        """Fills a collection, or goes on with that; `save` then makes a folder an index of it.

        The server indexes the rows when all are there; until it has, searches are good, but slow.

        Args:
            sent: the passages' vectors `[passages, width]`; of words, a `BM25Config`.
            report: is called with the number of passages sent; what it raises ends the upload.
        """
        settings = dataclasses.replace(settings, url=settings.url or cls.URL)
        said = {"server": dataclasses.asdict(dataclasses.replace(settings, replace=False))}
        about: dict[str, Any] = {"settings": said}
        if isinstance(sent, np.ndarray):
            about |= {"encoder": encoder, "width": sent.shape[1], "dtype": "float32"}
        else:
            said["words"] = dataclasses.asdict(sent)
        manifest = Manifest(cls.ENGINE, corpus.digest, len(corpus), **about)
        index = cls(corpus, settings, manifest, sent)
        if settings.replace:
            index._ask(cls.DROP)
        if not index._ask(cls.EXISTS):
            index._create()
            index._send(range(1))
        piece, count = settings.batch * cls.PIECE, len(corpus)
        if (there := index._rows()) < count:  # rows are sent in order, and the last piece in part
            for start in range(there - there % piece, count, piece):
                report(start)
                index._send(range(start, min(start + piece, count)))
        report(count)
        index._finish()
        index._rows(count)
        return index

    @classmethod
    def open(
        cls, folder: Path, corpus: StoredCorpus, *, url: str = "", encoder: str | None = None
    ) -> Self:
        """The index of a folder; `url`: where the collection is now, "" if it did not move."""
        manifest = read_manifest(folder, engine=cls.ENGINE, corpus=corpus.digest, encoder=encoder)
        settings = ServerSettings(**manifest.settings["server"])
        if not url and not is_local(settings.url) and os.environ.get(cls.KEY):
            # The folder may be anyone's, and whoever wrote it would get the key.
            raise InputError(
                f"the index names the server at {settings.url}, and {cls.KEY} holds a key; name "
                "the server yourself (--server=URL) if the key may go there, or unset the variable."
            )
        index = cls(corpus, dataclasses.replace(settings, url=url or settings.url), manifest)
        index._rows(len(corpus))
        return index

    def save(self, folder: Path) -> None:
        write_manifest(folder, self._manifest)

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        only, asked = self._filter(where) if where else None, self._asked(queries)

        def found(most: int) -> Hits:
            rows: list[Any] = []
            for at in range(0, len(asked), _QUERIES):
                rows += self._hits(asked[at : at + _QUERIES], most, only)
            return as_hits([Hits(*np.array(row).reshape(-1, 2).T) for row in rows], most)

        return past_ties(found, k, min(max(k, _TIES), len(self.corpus)))

    def _asked(self, queries: Queries) -> list[Any]:
        """What is searched for, of each query."""
        return query_vectors(queries, self._manifest.width).tolist()

    def vectors(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        ids, places = np.unique(np.asarray(numbers, np.int64), return_inverse=True)
        there = {number: vector for number, vector, _ in self._stored(ids.tolist())}
        rows = np.array([there[number] for number in ids.tolist()], np.float32)
        return rows.reshape(len(ids), self._manifest.width)[places]

    def _rows(self, least: int = 0) -> int:
        """How many the collection has; one with fewer, or of something else, is refused."""
        count, first = self._count(), self._stored([0])
        if not first or (first[0][2] or {}).get(DIGEST) != self._digest:
            raise InputError(
                f"{self.name} was made from other passages or vectors, or by another program; "
                "name another collection, or give --replace to delete this one."
            )
        if count < least:
            lacking = f"{self.name} has {count} of {least} passages"
            raise InputError(f"{lacking}; build the index again, or all of it with --replace.")
        return count

    def _row(self, number: int) -> dict[str, Any]:
        """What is stored of a passage, without half of a surrogate pair."""
        (passage,) = self.corpus.passages([number])
        terms = {_term(field) for field in passage.metadata}
        for field, value in passage.metadata.items():
            terms |= {_term(field, key) for key in keys_of(value)}
        kept = {"name": passage.name, "metadata": passage.metadata, TERMS: sorted(terms)}
        kept |= {} if number else {DIGEST: self._digest}
        text = json.dumps(kept, ensure_ascii=False).encode("utf-8", "replace")
        # Servers hold integers of 64 bits.
        return json.loads(text, parse_int=lambda n: int(n) if len(n) < 19 else float(n))

    def _filter(self, where: Where) -> Any:
        """The server's filter with the meaning of `StoredCorpus.matching`."""
        for name in where.keys() - self._fields:
            if not self._any(self._having([[_term(name)]])):
                raise unknown_field(name, self.name)
            self._fields.add(name)
        return self._having([[_term(n, key) for key in wanted_keys(v)] for n, v in where.items()])

    def _ask(self, method: str, *, attempts: int = 0, **arguments: Any) -> Any:
        """Calls a method of the client for the collection, again while the server is broken."""
        for attempt in range(attempts or ATTEMPTS):
            time.sleep(PAUSE * 2 ** (attempt - 1) if attempt else 0)
            try:
                self._client = self._client or self._connected()
                return getattr(self._client, method)(self.settings.collection, **arguments)
            except InputError:  # the client is not installed
                raise
            except Exception as error:
                if (may_pass := self._failure(error)) is None:
                    raise
                why = f"{type(error).__name__}: {error}"
            if not may_pass:
                break
        # Raised here and not above, where its context would have the key.
        why = " ".join((why.replace(self._key, "***") if self._key else why).split())[:200]
        raise InputError(
            f"{self.name}: {method} fails ({why}); give the url of a server that runs, its key in "
            f"the environment variable {self.KEY}, or another value of the setting that it names."
        )


def _term(field: str, key: str = "") -> str:
    """A word of a passage that has the field, and this key in it if there is one.

    Servers compare no fractions, nulls or objects as we do, and dots in names are paths to them.
    """
    term = json.dumps(field) + ("=" + key if key else "")
    return term if len(term) <= 200 else hashlib.blake2b(term.encode(), digest_size=16).hexdigest()


def server_engine(name: str) -> type[ServerIndex]:
    """The class of an engine of `index_folder.SERVERS`."""
    from qrag_jax.retrieval import milvus, qdrant

    engines = (qdrant.QdrantIndex, milvus.MilvusIndex, milvus.MilvusBM25Index)
    return {engine.ENGINE: engine for engine in engines}[name]
