from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.files.beir import (
    Document,
    is_collection,
    qrels_path,
    queries_path,
    read_documents,
    read_queries,
)
from qrag_jax.errors import InputError
from qrag_jax.metrics.trec import read_qrels
from tests.data.real_data import real


def write(path: Path, *records: Any) -> None:
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_documents_are_read_in_order_with_their_fields(ending: str, tmp_path: Path) -> None:
    write(
        tmp_path / f"corpus.jsonl{ending}",
        {"_id": "b", "title": "T", "text": "words", "metadata": {"url": "u"}, "year": 1999},
        {"_id": "a", "title": None, "text": "", "metadata": None},
        {"_id": "c", "text": "no title"},
    )
    assert list(read_documents(tmp_path)) == [
        Document("b", "words", "T", {"year": 1999, "url": "u"}),
        Document("a", "", "", {}),
        Document("c", "no title", "", {}),
    ]


def test_a_splits_own_queries_go_before_all(tmp_path: Path) -> None:
    write(tmp_path / "queries.jsonl", {"_id": "1", "text": "one"}, {"_id": "2", "text": "two"})
    write(tmp_path / "queries_dev.jsonl.gz", {"_id": "2", "text": "two", "metadata": {}})
    assert read_queries(tmp_path) == {"1": "one", "2": "two"}
    assert read_queries(tmp_path, "dev") == {"2": "two"}
    assert read_queries(tmp_path, "test") == {"1": "one", "2": "two"}


def test_what_shows_that_a_folder_is_a_collection(tmp_path: Path) -> None:
    write(tmp_path / "corpus.jsonl", {"_id": "1", "text": "one"})
    write(tmp_path / "train.jsonl", {"query": "q"})
    assert not is_collection(tmp_path)
    for name in ("queries.jsonl", "queries_dev.jsonl.gz", "qrels_dev.tsv", "qrels/test.tsv.gz"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        assert is_collection(tmp_path)
        path.unlink()
    write(tmp_path / "queries.jsonl", {"_id": "1", "text": "one"})
    assert queries_path(tmp_path, "dev") == queries_path(tmp_path) == tmp_path / "queries.jsonl"


def test_judgements_are_found_in_both_places(tmp_path: Path) -> None:
    (tmp_path / "qrels_dev.tsv").touch()
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv.gz").touch()
    assert qrels_path(tmp_path, "dev") == tmp_path / "qrels_dev.tsv"
    assert qrels_path(tmp_path, "test") == tmp_path / "qrels" / "test.tsv.gz"
    with pytest.raises(InputError, match=r"qrels_train\.tsv"):
        qrels_path(tmp_path, "train")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "t"}, "'_id'"),
        ({"_id": 7, "text": "t"}, "'_id'"),
        ({"_id": "", "text": "t"}, "'_id'"),
        ({"_id": "x"}, "'text'"),
        ({"_id": "x", "text": ["t"]}, "'text'"),
        ({"_id": "x", "text": "t", "title": 1}, r"corpus\.jsonl:2: field 'title'"),
        ({"_id": "x", "text": "t", "metadata": [1]}, r"corpus\.jsonl:2: field 'metadata'"),
    ],
)
def test_lines_that_are_no_documents_are_refused(
    record: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "corpus.jsonl", {"_id": "good", "text": "t"}, record)
    with pytest.raises(InputError, match=message):
        list(read_documents(tmp_path))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"_id": "1", "text": "again"}, r"queries\.jsonl:2"),
        ({"_id": "2", "text": " "}, r"queries\.jsonl:2"),
    ],
)
def test_lines_that_are_no_queries_are_refused(
    record: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "queries.jsonl", {"_id": "1", "text": "one"}, record)
    with pytest.raises(InputError, match=message):
        read_queries(tmp_path)


def test_a_folder_without_a_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"corpus\.jsonl"):
        list(read_documents(tmp_path))


@pytest.mark.parametrize(
    ("name", "documents", "queries", "judged"),
    [("scifact", 5183, 150, 173), ("cranfield", 1400, 135, 924), ("vaswani", 11429, 56, 1252)],
)
def test_the_real_collections_are_whole(
    name: str, documents: int, queries: int, judged: int
) -> None:
    folder = real(f"ir/{name}")
    names = {document.name for document in read_documents(folder)}
    assert len(names) == documents
    texts = read_queries(folder, "dev")
    qrels = read_qrels(qrels_path(folder, "dev"))
    assert len(texts) == queries
    assert qrels.keys() == texts.keys()
    assert sum(map(len, qrels.values())) == judged
    assert {document for each in qrels.values() for document in each} <= names
