"""A small HTTP server that speaks Qdrant's protocol: the client library's local mode behind it.

It shows that the requests have the right form, and what happens when a server fails. It is no test
of Qdrant itself: it has no graph, no shards and no numbers of 8 bits.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pydantic_core import to_jsonable_python
from qdrant_client import QdrantClient, models
from qdrant_client.conversions.common_types import UpdateResult

from tests.json_server import Call, listening

_PATH = re.compile(r"/collections/([^/]+)(.*)")


class Asked(NamedTuple):
    """A request that came in."""

    method: str
    path: str  # below the collection, such as /points
    body: Any


class StandIn:
    """The server's state, which tests read and change.

    Attributes:
        url: where it listens.
        key: that requests must have; "": none.
        client: what is behind it.
        asked: all requests that were not refused, in order.
        fails: returns the status to fail with, or 0; may wait. It sees every request first.
    """

    def __init__(self) -> None:
        self.url, self.key = "", ""
        self.client = QdrantClient(":memory:")
        self.asked: list[Asked] = []
        self.fails: Callable[[Asked], int] = lambda _: 0
        self._turn = threading.Lock()  # local mode is for one thread

    def answer(self, call: Call) -> tuple[int, Any]:
        """Status and body of a reply."""
        found = _PATH.fullmatch(call.path.partition("?")[0])
        assert found, call.path
        name, path = found.groups()
        asked = Asked(call.method, path, json.loads(call.body) if call.body else None)
        key = call.headers.get("api-key")
        if self.key and key != self.key:
            return 401, {"status": {"error": f"no such key: {key}"}}
        if status := self.fails(asked):
            return status, {"status": {"error": "broken on purpose"}}
        with self._turn:
            self.asked.append(asked)
            try:
                result = to_jsonable_python(self.result(name, asked))
                return 200, {"result": result, "status": "ok", "time": 0}
            except ValueError as error:
                return 400, {"status": {"error": str(error)}}

    def sent(self) -> list[int]:
        """The ids of all points that were accepted, in order, as often as they were."""
        puts = (one.body for one in self.asked if one[:2] == ("PUT", "/points"))
        return [point["id"] for body in puts for point in body["points"]]

    def result(self, name: str, asked: Asked) -> Any:
        client, body = self.client, asked.body
        match asked.method, asked.path:
            case "GET", "/exists":
                return {"exists": client.collection_exists(name)}
            case "GET", "":
                return client.get_collection(name)
            case "DELETE", "":
                return client.delete_collection(name)
            case "PATCH", "":
                models.UpdateCollection(**body)  # has its form
                return client.collection_exists(name)
            case "PUT", "":
                config = models.CreateCollection(**body)
                return client.create_collection(name, vectors_config=config.vectors)
            case "PUT", "/index":
                models.CreateFieldIndex(**body)
                return UpdateResult(operation_id=0, status=models.UpdateStatus.COMPLETED)
            case "PUT", "/points":
                return client.upsert(name, models.PointsList(**body).points)
            case "POST", "/points":
                wanted = models.PointRequest(**body)
                shown = {"with_payload": wanted.with_payload, "with_vectors": wanted.with_vector}
                return client.retrieve(name, wanted.ids, **shown)
            case "POST", "/points/count":
                return client.count(name, exact=models.CountRequest(**body).exact)
            case "POST", "/points/scroll":
                page = models.ScrollRequest(**body)
                points, following = client.scroll(name, page.filter, limit=page.limit)
                return {"points": points, "next_page_offset": following}
            case "POST", "/points/query/batch":
                batch = models.QueryRequestBatch(**body)
                for search in batch.searches:
                    search.params = None  # without effect here; local mode warns
                return client.query_batch_points(name, batch.searches)
        raise AssertionError(asked)


@contextlib.contextmanager
def running() -> Iterator[StandIn]:
    """A server that answers while the block runs."""
    state = StandIn()

    with listening(state.answer) as state.url:
        yield state
    state.client.close()
