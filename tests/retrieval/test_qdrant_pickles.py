"""What lies in the place of Qdrant's local files is not run, whatever a folder holds."""

from __future__ import annotations

import json
import os
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from qdrant_client import models

from qrag_jax.errors import InputError
from qrag_jax.retrieval.qdrant_index import QdrantIndex
from qrag_jax.retrieval.qdrant_pickles import check_storage
from qrag_jax.retrieval.qdrant_server import STORAGE
from tests.retrieval.conformance import Task, assert_same, searched, task_of

TABLE = f"{STORAGE}/collection/passages/storage.sqlite"


class Runs:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (self._path,)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    made = task_of(tmp_path / "index", 20)
    QdrantIndex.build(made.corpus, made.vectors, made.corpus.folder).save(made.corpus.folder)
    return made


def change(folder: Path, *statements: tuple[Any, ...]) -> None:
    with sqlite3.connect(folder / TABLE) as database:
        for statement in statements:
            database.execute(*statement)
    database.close()


def refused(task: Task, match: str) -> None:
    with pytest.raises(InputError, match=match) as error:
        QdrantIndex.open(task.corpus.folder, task.corpus)
    assert "\n" not in str(error.value)


def test_what_the_library_wrote_is_opened(task: Task) -> None:
    check_storage(task.corpus.folder / STORAGE)
    found = QdrantIndex.open(task.corpus.folder, task.corpus)
    assert_same(found.search(task.queries, 5), searched(task, 5))


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_runs_is_refused(protocol: int, task: Task, tmp_path: Path) -> None:
    mark = tmp_path / "was run"
    whole = models.PointStruct(id=3, vector=[0.5], payload={"a": Runs(mark)})
    for evil in (Runs(mark), [Runs(mark)], whole):
        data = pickle.dumps(evil, protocol)
        change(task.corpus.folder, ("UPDATE points SET point = ?", (data,)))
        refused(
            task, r"storage.sqlite: refused, since .*it names .*; build the index again, or use"
        )
        assert not mark.exists()
    pickle.loads(data)  # noqa: S301  (it does run where nothing is checked)
    assert mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"id": 3}),
        pickle.dumps(models.PointStruct),  # the class itself
        pickle.dumps(models.PointStruct(id=3, vector=[0.5])) + pickle.dumps(3),
        b"",
        b"\x80\x04",
        "a text",
        None,
    ],
)
def test_what_is_no_point_is_refused(data: bytes | str | None, task: Task) -> None:
    change(task.corpus.folder, ("UPDATE points SET point = ? WHERE rowid = 3", (data,)))
    refused(task, "refused, since a pickle in it is none of a point")


def test_a_table_that_may_change_between_two_looks_is_refused(task: Task, tmp_path: Path) -> None:
    data = pickle.dumps(Runs(tmp_path / "was run"))
    view = (
        "CREATE VIEW points AS SELECT id, CASE WHEN random() % 2 THEN point "  # noqa: S608
        f"ELSE x'{data.hex()}' END AS point FROM kept"
    )
    change(task.corpus.folder, ("ALTER TABLE points RENAME TO kept",), (view,))
    refused(task, "a table that is not the library's own")


@pytest.mark.parametrize(
    ("collections", "message"),
    [
        ({"../../../theirs": {}}, r'the name "\.\./\.\./\.\./theirs", which leaves the folder'),
        ({"/theirs": {}}, "which leaves the folder"),
        (3, "meta.json is damaged"),
    ],
)
def test_collections_outside_the_folder_are_refused(
    collections: Any, message: str, task: Task
) -> None:
    path = task.corpus.folder / STORAGE / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"collections": collections}))
    refused(task, message)


def test_a_broken_table_is_told(task: Task) -> None:
    (task.corpus.folder / TABLE).write_bytes(b"no table " * 100)
    refused(task, "storage.sqlite cannot be read .*; build the index again")
