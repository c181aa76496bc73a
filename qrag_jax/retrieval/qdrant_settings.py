"""What may be chosen of an index in Qdrant: where it is, how it is laid out, how it is searched."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

from qrag_jax.errors import InputError, check_least
from qrag_jax.llm.server_url import check_url

KEY_VARIABLE = "QDRANT_API_KEY"
_SECTION = "qdrant"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


@dataclasses.dataclass(frozen=True)
class QdrantServer:
    """A collection, where it is, and how it is asked.

    A server's API key is read from the environment variable QDRANT_API_KEY alone.

    Attributes:
        url: of a server or of any node of a cluster, such as http://127.0.0.1:6333; "": there is
            none, and the client library itself keeps the vectors in the index's folder. It then
            compares a query with every vector by NumPy, and reads all of them at the start: this
            is meant for tests and for 20,000 passages at most, and the library warns above. Of so
            many with 384 numbers each, a query took 0.05 s on one core, and 0.8 s with a filter.
        collection: the collection's name.
        grpc: whether points are sent by gRPC, which is faster than JSON.
        grpc_port: of the server, for this.
        batch: passages that are sent at a time.
        workers: batches that are sent at once.
        attempts: to ask for one thing, at most, while the server cannot be reached or is broken.
        pause: seconds before the second attempt; doubles up to 8 s.
        timeout: seconds for one attempt.

    Raises:
        InputError: a field cannot be used; no message has a password in it.
    """

    url: str = ""
    collection: str = "passages"
    grpc: bool = False
    grpc_port: int = 6334
    batch: int = 256
    workers: int = 4
    attempts: int = 6
    pause: float = 0.5
    timeout: int = 60

    def __post_init__(self) -> None:
        if self.url:
            field = "the URL of Qdrant"
            parts = check_url(self.url, field, "http://127.0.0.1:6333", KEY_VARIABLE)
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
    """How a server keeps the vectors; without a server it means nothing.

    With shards=16, these are the settings of HARR's index of Wikipedia, 21 million passages.

    Attributes:
        shards: parts that are searched side by side, and spread over the nodes of a cluster.
        replicas: nodes that hold each part.
        int8: whether searches read numbers of 8 bits, which stay in memory.
        on_disk: whether the float32 numbers are read from disk where they are needed.
        m: links of a vector in the HNSW graph; 0: no graph, and every search reads all vectors.
        ef_construct: candidates for these links.

    Raises:
        InputError: a field is too low.
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
    """How a server searches; without a server every search is exact.

    Attributes:
        exact: whether all vectors are compared in float32; else the graph and the numbers of 8
            bits are used, where there are any, and passages may be missed.
        ef: candidates of the search in the graph; 0: as the server has it.
        rescore: whether hits by 8 bits are scored again in float32; scores are else coarse.
        oversampling: this many times k are found by 8 bits for this; at least 1.
        ties: the most passages that are asked for to put those with equal scores in order.

    Raises:
        InputError: a field is too low.
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
        replace: whether a collection of this name is deleted before, unless an upload of the same
            things was begun.
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

        Raises:
            InputError: a setting is unknown, or its value cannot be used.
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
        told = "true or false" if isinstance(like, bool) else f"a number such as {like}"
        raise InputError(f"--qdrant_settings has {text!r} for {name}; give {told}.")
    return value
