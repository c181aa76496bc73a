"""The engine on Qdrant, through gRPC."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.qdrant_index import QdrantIndex
from qrag_jax.retrieval.qdrant_settings import QdrantLayout, QdrantServer
from tests.retrieval.conformance import OF_VECTORS, Check, Engine, task_of
from tests.retrieval.qdrant_grpc_stand_in import GrpcStandIn, listening

NOBODY = "http://127.0.0.1:1"  # nothing may go by HTTP


@pytest.mark.parametrize("check", OF_VECTORS, ids=lambda check: check.__name__)
def test_by_grpc(check: Check, tmp_path: Path) -> None:
    with listening(GrpcStandIn()) as port:
        server = QdrantServer(NOBODY, grpc=True, grpc_port=port, attempts=1, workers=3)

        def make(corpus: StoredCorpus, vectors: np.ndarray) -> QdrantIndex:
            return QdrantIndex.build(corpus, vectors, corpus.folder, server=server, replace=True)

        check(Engine(make, QdrantIndex.open), tmp_path)


def test_what_a_server_is_told(tmp_path: Path) -> None:
    task, handler = task_of(tmp_path, 20), GrpcStandIn()
    with listening(handler) as port:
        server = QdrantServer(NOBODY, grpc=True, grpc_port=port)
        layout = QdrantLayout(shards=16)
        index = QdrantIndex.build(task.corpus, task.vectors, tmp_path, server=server, layout=layout)
        assert (index.search(task.queries, 3, {"kind": []}).numbers == -1).all()
    asked = dict(handler.asked)
    made = asked["/qdrant.Collections/Create"]
    assert made.shard_number == 16
    assert made.quantization_config.scalar.always_ram
    assert made.optimizers_config.indexing_threshold == 0
    assert asked["/qdrant.Collections/Update"].hnsw_config.m == 16
    params = asked["/qdrant.Points/QueryBatch"].query_points[0].params
    assert params.quantization.rescore
    assert not params.exact


@pytest.mark.parametrize(
    ("code", "calls", "message"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, 1, "refuses the API key (gRPC UNAUTHENTICATED: on purp"),
        (grpc.StatusCode.UNAVAILABLE, 3, "does not answer as it should (gRPC UNAVAILABLE: on pur"),
        (grpc.StatusCode.INVALID_ARGUMENT, 1, "refuses collection_exists for the collection pass"),
    ],
    ids=str,
)
def test_failures(tmp_path: Path, code: grpc.StatusCode, calls: int, message: str) -> None:
    task, handler = task_of(tmp_path, 20), GrpcStandIn(code)
    with listening(handler) as port:
        server = QdrantServer(NOBODY, grpc=True, grpc_port=port, attempts=3, pause=0.0)
        with pytest.raises(InputError, match=re.escape(message)):
            QdrantIndex.build(task.corpus, task.vectors, tmp_path, server=server)
    assert len(handler.asked) == calls
