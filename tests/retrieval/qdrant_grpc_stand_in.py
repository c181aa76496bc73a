"""The gRPC side of `qdrant_stand_in`: the same calls, in Qdrant's own messages."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
from qdrant_client import QdrantClient, models
from qdrant_client import grpc as messages
from qdrant_client.conversions.conversion import GrpcToRest, RestToGrpc


class Call(NamedTuple):
    """A call that is understood.

    request: the class of its message.
    answer: of the client in local mode and the message, the reply.
    """

    request: Any
    answer: Callable[[QdrantClient, Any], Any]


def _made(client: QdrantClient, asked: Any) -> Any:
    vectors = GrpcToRest.convert_vectors_config(asked.vectors_config)
    done = client.create_collection(asked.collection_name, vectors)
    return messages.CollectionOperationResponse(result=done)


def _found(client: QdrantClient, asked: Any) -> Any:
    info = client.get_collection(asked.collection_name)
    return messages.GetCollectionInfoResponse(result=RestToGrpc.convert_collection_info(info))


def _put(client: QdrantClient, asked: Any) -> Any:
    points = [
        models.PointStruct(
            id=point.id.num,
            vector=list(point.vectors.vector.dense.data or point.vectors.vector.data),
            payload=GrpcToRest.convert_payload(point.payload),
        )
        for point in asked.points
    ]
    client.upsert(asked.collection_name, points)
    return _done(client, asked)


def _done(client: QdrantClient, asked: Any) -> Any:
    done = messages.UpdateResult(operation_id=0, status=messages.UpdateStatus.Completed)
    return messages.PointsOperationResponse(result=done)


def _read(client: QdrantClient, asked: Any) -> Any:
    ids = [each.num for each in asked.ids]
    points = client.retrieve(asked.collection_name, ids, with_vectors=True)
    return messages.GetResponse(
        result=[
            messages.RetrievedPoint(
                id=messages.PointId(num=point.id),
                payload=RestToGrpc.convert_payload(point.payload),
                vectors=messages.VectorsOutput(
                    vector=messages.VectorOutput(dense=messages.DenseVector(data=point.vector))
                ),
            )
            for point in points
        ]
    )


def _scrolled(client: QdrantClient, asked: Any) -> Any:
    only = GrpcToRest.convert_filter(asked.filter)
    points, _ = client.scroll(asked.collection_name, only, limit=asked.limit)
    ids = [messages.PointId(num=point.id) for point in points]
    return messages.ScrollResponse(result=[messages.RetrievedPoint(id=each) for each in ids])


def _searched(client: QdrantClient, asked: Any) -> Any:
    replies = []
    for one in asked.query_points:
        points = client.query_points(
            asked.collection_name,
            query=list(one.query.nearest.dense.data),
            query_filter=GrpcToRest.convert_filter(one.filter) if one.HasField("filter") else None,
            limit=one.limit,
        ).points
        scored = [
            messages.ScoredPoint(id=messages.PointId(num=point.id), score=point.score)
            for point in points
        ]
        replies.append(messages.BatchResult(result=scored))
    return messages.QueryBatchResponse(result=replies)


CALLS = {
    "/qdrant.Collections/CollectionExists": Call(
        messages.CollectionExistsRequest,
        lambda client, asked: messages.CollectionExistsResponse(
            result=messages.CollectionExists(exists=client.collection_exists(asked.collection_name))
        ),
    ),
    "/qdrant.Collections/Create": Call(messages.CreateCollection, _made),
    "/qdrant.Collections/Delete": Call(
        messages.DeleteCollection,
        lambda client, asked: messages.CollectionOperationResponse(
            result=client.delete_collection(asked.collection_name)
        ),
    ),
    "/qdrant.Collections/Update": Call(
        messages.UpdateCollection,
        lambda client, asked: messages.CollectionOperationResponse(result=True),
    ),
    "/qdrant.Collections/Get": Call(messages.GetCollectionInfoRequest, _found),
    "/qdrant.Points/CreateFieldIndex": Call(messages.CreateFieldIndexCollection, _done),
    "/qdrant.Points/Upsert": Call(messages.UpsertPoints, _put),
    "/qdrant.Points/Get": Call(messages.GetPoints, _read),
    "/qdrant.Points/Count": Call(
        messages.CountPoints,
        lambda client, asked: messages.CountResponse(
            result=messages.CountResult(count=client.count(asked.collection_name).count)
        ),
    ),
    "/qdrant.Points/Scroll": Call(messages.ScrollPoints, _scrolled),
    "/qdrant.Points/QueryBatch": Call(messages.QueryBatchPoints, _searched),
}


class GrpcStandIn(grpc.GenericRpcHandler):
    """Answers as the library's local mode does.

    Attributes:
        code: with which every call ends; None: it is answered.
        asked: path and message of every call, in order.
    """

    def __init__(self, code: grpc.StatusCode | None = None) -> None:
        self.code = code
        self.asked: list[tuple[str, Any]] = []
        self._client, self._turn = QdrantClient(":memory:"), threading.Lock()

    def service(self, handler_call_details: Any) -> Any:
        path = handler_call_details.method
        call = CALLS[path]

        def answer(message: Any, context: grpc.ServicerContext) -> Any:
            self.asked.append((path, message))
            if self.code is not None:
                context.abort(self.code, "on purpose")
            with self._turn:
                return call.answer(self._client, message)

        return grpc.unary_unary_rpc_method_handler(
            answer, call.request.FromString, lambda reply: reply.SerializeToString()
        )


@contextlib.contextmanager
def listening(handler: GrpcStandIn) -> Iterator[int]:
    """A server that answers while the block runs; its port."""
    server = grpc.server(ThreadPoolExecutor(4), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()
