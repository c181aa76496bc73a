"""Judged queries of every format: what is read, skipped and refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.files.corpora import read_corpus
from qrag_jax.data.judged_query import JudgedQuery, Origin, check_in_corpus
from qrag_jax.errors import InputError
from qrag_jax.retrieval.judged_queries import NO_DOCUMENT, NO_TEXT, read_judged_queries
from tests.data.real_data import real

ROWS = [
    {"query": f"query {number}", "relevant_doc_ids": [f"d{number}"], "id": f"q{number}"}
    for number in range(4)
]
REVIEW = {
    "id": "r",
    "pico": {"P": "adults", "I": "rest", "C": "none", "O": "pain"},
    "publication_pmids": ["11"],
    "pub_date": "2015",
}


def written(path: Path, *records: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    text = json.dumps(records) if ".json" in path.suffixes else lines
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    """Judgements of a dev and a test split; the queries of both are in one file."""
    folder = tmp_path / "beir"
    texts = {"1": "one", "2": "two", "3": "three", "4": "four"}
    written(
        folder / "queries.jsonl",
        *({"_id": name, "text": text} for name, text in texts.items()),
    )
    header = "query-id\tcorpus-id\tscore\n"
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text(f"{header}2\ta\t2\n2\tb\t0\n1\tc\t1\n9\tc\t1\n")
    (folder / "qrels_dev.tsv").write_text(f"{header}3\tb\t0\n4\tc\t-1\n")
    return folder


def test_a_collection_in_beirs_layout(collection: Path) -> None:
    queries, (report,) = read_judged_queries(f"{collection},test")
    assert queries == [
        JudgedQuery("2", "two", (("a", 2),)),
        JudgedQuery("1", "one", (("c", 1),)),
    ]
    assert (report.read, report.kept, report.skipped) == (3, 2, {NO_TEXT: 1})
    assert report.files == (
        str(collection / "queries.jsonl"),
        str(collection / "qrels" / "test.tsv"),
    )
    assert report.first == {NO_TEXT: "queries.jsonl: 9"}
    sliced, (report,) = read_judged_queries(f"{collection},test[1:2]")
    assert [each.id for each in sliced] == ["1"]
    assert report.read == 1


def test_queries_of_a_splits_own_file_that_nobody_judged_are_counted(collection: Path) -> None:
    own = [{"_id": name, "text": f"own {name}"} for name in ("7", "1", "2")]
    written(collection / "queries_test.jsonl.gz", *own)
    queries, (report,) = read_judged_queries(f"{collection},test")
    assert [each.text for each in queries] == ["own 1", "own 2"]
    assert report.skipped == {NO_DOCUMENT: 1, NO_TEXT: 1}
    assert "kept 2 of 4 records of queries_test.jsonl.gz, test.tsv (skipped: 1" in report.summary()


def test_judgements_without_a_relevant_document_are_refused(collection: Path) -> None:
    with pytest.raises(InputError, match="usable query among"):
        read_judged_queries(f"{collection},dev")
    with pytest.raises(InputError, match=r"qrels_train\.tsv"):
        read_judged_queries(f"{collection},train")


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.json.gz", "rows.jsonl.gz"])
def test_rows_of_both_forms_in_every_kind_of_file(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, ROWS[0], REVIEW, ROWS[1] | {"relevant_doc_ids": []})
    queries, (report,) = read_judged_queries(f"{path},train")
    assert queries == [
        JudgedQuery("q0", "query 0", (("d0", 1),)),
        JudgedQuery(
            "r",
            "Patient: adults; Intervention: rest; Comparison: none; Outcome: pain",
            (("11", 1),),
            until="2015-12-31",
        ),
    ]
    assert report.skipped == {NO_DOCUMENT: 1}
    assert report.first == {NO_DOCUMENT: f"{name}:3"}


def test_folders_of_rows_and_several_parts(tmp_path: Path) -> None:
    written(tmp_path / "train.jsonl", *ROWS[:3])
    written(tmp_path / "test.jsonl", ROWS[3])
    queries, reports = read_judged_queries(f"{tmp_path},train[1:] ; {tmp_path},test")
    assert [each.id for each in queries] == ["q1", "q2", "q3"]
    assert [report.kept for report in reports] == [2, 1]
    with pytest.raises(InputError, match=r"dev\.jsonl"):
        read_judged_queries(f"{tmp_path},dev")


def test_an_id_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", ROWS[0], ROWS[1], ROWS[0])
    with pytest.raises(InputError, match=r"^rows\.jsonl:3: there is a query 'q0' before; give"):
        read_judged_queries(f"{path},train")
    path = written(tmp_path / "rows.jsonl", ROWS[0], ROWS[1])
    with pytest.raises(InputError, match="'q1'"):
        read_judged_queries(f"{path},train[:1];{path},dev[1:];{path},dev[1:]")


def test_equal_queries_without_ids_are_two(tmp_path: Path) -> None:
    bare = {"query": "the same", "relevant_doc_ids": ["d"]}
    queries, _ = read_judged_queries(f"{written(tmp_path / 'rows.jsonl', bare, bare)},train")
    assert [each.text for each in queries] == ["the same", "the same"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the dataset string is empty; write path,split, and a semicolon"),
        ("rows.jsonl", "the part 'rows.jsonl' of the dataset string has not the form path,split;"),
        ("rows.jsonl,,train", "has not the form path,split;"),
        ("nowhere,train", "nowhere does not exist; give the path of a data file or folder"),
        ("rows.jsonl,train[9:]", "the slice train[9:] of rows.jsonl has none of its 4 records"),
        ("rows.tsv,train", "the name of rows.tsv ends in none of"),
        ("wrong.jsonl,train", "wrong.jsonl:2: field 'query' is 1"),
        ("empty.jsonl,train", "empty.jsonl is empty; it should hold one record"),
    ],
)
def test_data_that_are_refused(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "rows.jsonl", *ROWS)
    written(tmp_path / "wrong.jsonl", ROWS[0], {"query": 1})
    for name in ("rows.tsv", "empty.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(InputError) as caught:
        read_judged_queries(text)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


FROM = Origin("config.queries.train", "the corpus", "name another")


@pytest.mark.parametrize(("name", "count"), [("scifact", 150), ("cranfield", 135)])
def test_real_collections_and_their_corpora(name: str, count: int) -> None:
    folder = real(f"ir/{name}")
    queries, (report,) = read_judged_queries(f"{folder},dev")
    assert (len(queries), report.skipped) == (count, {})
    known = {read.document.name for read in read_corpus(folder)}
    found = check_in_corpus(queries, known, FROM)
    assert (found.queries, found.summary) == (queries, "")


def test_judgements_of_another_real_collection_are_refused() -> None:
    queries, _ = read_judged_queries(f"{real('ir/scifact')},dev")
    known = {read.document.name for read in read_corpus(real("ir/cisi"))}
    with pytest.raises(InputError, match="judgements of another"):
        check_in_corpus(queries, known, FROM, 0.5)
