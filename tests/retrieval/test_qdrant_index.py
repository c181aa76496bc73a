"""The engine on Qdrant, without a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from qrag_jax.errors import InputError
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.protocol import Queries
from qrag_jax.retrieval.qdrant_index import QdrantIndex
from qrag_jax.retrieval.qdrant_server import STORAGE
from qrag_jax.retrieval.qdrant_settings import QdrantServer
from tests.retrieval.conformance import (
    OF_VECTORS,
    WIDTH,
    Engine,
    assert_same,
    run_with,
    searched,
    task_of,
)
from tests.retrieval.small_corpus import stored


def built(corpus: StoredCorpus, vectors: np.ndarray) -> QdrantIndex:
    return QdrantIndex.build(corpus, vectors, corpus.folder, replace=True)


test_qdrant = run_with(Engine(built, QdrantIndex.open), OF_VECTORS)


def test_filters_mean_what_they_mean_for_the_corpus(tmp_path: Path) -> None:
    values: list[Any] = [
        *(0, 1, 1.0, 1.5, True, False, None, "1", "true", "", "a.b", "Ä\ud800", "x" * 500),
        *([], [1, "a.b"], [[1]], {"a": 1}, {"a": 1.0}, {"b": [1, 2]}, ["x" * 500], 10**30),
    ]
    texts = [f"passage {number}" for number in range(len(values))]
    fields = {name: values for name in ("plain", "dots.in[] it", 'a "quoted" one', "")}
    corpus = stored(tmp_path, texts, **fields)
    index = built(corpus, np.ones((len(values), 2), np.float32))
    queries = Queries(["any"], np.ones((1, 2), np.float32))

    def found(where: dict[str, Any]) -> list[int]:
        numbers = index.search(queries, len(values), where).numbers[0]
        return [int(number) for number in numbers if number >= 0]

    several = [[], [1, "a.b"], [None, True], (1.5, 7), {"", "1"}]
    for wanted in [*values, *several, "absent"]:
        for field in fields:
            matching = np.flatnonzero(corpus.matching({field: wanted})).tolist()
            assert found({field: wanted}) == matching, (field, wanted)
    assert found({"plain": "1", "": "1"}) == [7]
    assert found({"plain": "1", "": 1}) == []
    with pytest.raises(InputError, match="'plai', which no passage of the collection passages of"):
        found({"plai": 1})


def test_one_process_at_a_time_has_the_files(tmp_path: Path) -> None:
    task = task_of(tmp_path, 20)
    index = built(task.corpus, task.vectors)
    index.save(tmp_path)
    program = (
        "import sys; from pathlib import Path\n"
        "from qrag_jax.retrieval.corpus import StoredCorpus\n"
        "from qrag_jax.retrieval.qdrant_index import QdrantIndex\n"
        "folder = Path(sys.argv[1])\n"
        "print(QdrantIndex.open(folder, StoredCorpus(folder)).vectors([7]).tolist()[0])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    other = subprocess.run(command, capture_output=True, text=True)
    assert other.returncode
    assert f"InputError: {tmp_path / STORAGE} is open in another process; end" in other.stderr
    del index
    other = subprocess.run(command, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(task.vectors[7].tolist())


def test_a_collection_of_other_things_stays_as_it_is(tmp_path: Path) -> None:
    task = task_of(tmp_path, 20)
    index = QdrantIndex.build(task.corpus, task.vectors, tmp_path, encoder="e0", version=3)
    index.save(tmp_path)
    again = QdrantIndex.open(tmp_path, task.corpus, encoder="e0", version=3)
    assert_same(again.search(task.queries, 5), searched(task, 5))
    with pytest.raises(InputError, match="has 3 in the field version, but 4 is asked for"):
        QdrantIndex.open(tmp_path, task.corpus, version=4)
    with pytest.raises(InputError, match="has 'e0' in the field encoder"):
        QdrantIndex.open(tmp_path, task.corpus, encoder="e1")
    other = task.vectors + 1
    for message, vectors, settings in (
        ("'e0' in the field encoder, not 'e1'; name another", task.vectors, {"encoder": "e1"}),
        ("3 in the field version, not 1", task.vectors, {"encoder": "e0"}),
        ("in the field vectors, not", other, {"encoder": "e0", "version": 3}),
        (f"for vectors of {WIDTH} numbers, but these have 2; name", other[:, :2], {}),
    ):
        with pytest.raises(InputError, match=message):
            QdrantIndex.build(task.corpus, vectors, tmp_path, **settings)  # type: ignore[arg-type]
    assert_same(again.search(task.queries, 5), searched(task, 5))
    QdrantIndex.build(task.corpus, other[:, :2], tmp_path, replace=True).save(tmp_path)
    opened = QdrantIndex.open(tmp_path, task.corpus)
    np.testing.assert_array_equal(opened.vectors([3]), other[3:4, :2])


def test_collections_of_other_programs_are_refused(tmp_path: Path) -> None:
    task = task_of(tmp_path, 20)
    client = QdrantClient(path=str(tmp_path / STORAGE))

    def params(distance: models.Distance) -> models.VectorParams:
        return models.VectorParams(size=WIDTH, distance=distance)

    client.create_collection("cosine", params(models.Distance.COSINE))
    client.create_collection("named", {"text": params(models.Distance.DOT)})
    client.create_collection("theirs", params(models.Distance.DOT))
    client.upsert("theirs", [models.PointStruct(id=0, vector=[0.5] * WIDTH)])
    client.create_collection("empty", params(models.Distance.DOT))
    client.close()
    for name, message in (
        ("cosine", r"ranks by Cosine \(field distance\), but scores here are inner products"),
        ("named", "has vectors with names, which ours have not"),
        ("theirs", "does not say what it was made from, so it is not ours"),
    ):
        server = QdrantServer(collection=name)
        with pytest.raises(InputError, match=f"the collection {name} of .*qdrant {message}"):
            QdrantIndex.build(task.corpus, task.vectors, tmp_path, server=server)
    server = QdrantServer(collection="empty")
    index = QdrantIndex.build(task.corpus, task.vectors, tmp_path, server=server)
    assert_same(index.search(task.queries, 5), searched(task, 5))


def test_an_index_without_its_collection(tmp_path: Path) -> None:
    task = task_of(tmp_path, 20)
    index = built(task.corpus, task.vectors)
    index.save(tmp_path)
    index._ask("delete", points_selector=[3, 4])
    with pytest.raises(InputError, match="has 18 of 20 passages; build the index again, which s"):
        QdrantIndex.open(tmp_path, task.corpus)
    with pytest.raises(InputError, match="lacks the passage 4; build"):
        index.vectors([5, 4])
    QdrantIndex.build(task.corpus, task.vectors, tmp_path)
    assert_same(
        QdrantIndex.open(tmp_path, task.corpus).search(task.queries, 20), searched(task, 20)
    )
    index._ask("delete_collection")
    with pytest.raises(InputError, match=r"the collection passages of .* does not exist; build"):
        QdrantIndex.open(tmp_path, task.corpus)


def test_a_copy_in_another_folder(tmp_path: Path) -> None:
    task = task_of(tmp_path / "one", 20)
    index = built(task.corpus, task.vectors)
    index.save(tmp_path / "two")
    index._ask("delete_collection")
    opened = QdrantIndex.open(tmp_path / "two", task.corpus)
    assert_same(opened.search(task.queries, 20), searched(task, 20))
