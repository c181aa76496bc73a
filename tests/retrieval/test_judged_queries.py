"""Judged queries of every format, and gold passages found by their text."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.queries import Query
from qrag_jax.data.sample import Page
from qrag_jax.errors import InputError
from qrag_jax.retrieval.judged_queries import NO_DOCUMENT, NO_TEXT, pooled, read_judged_queries

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
        folder / "queries.jsonl", *({"_id": name, "text": text} for name, text in texts.items())
    )
    header = "query-id\tcorpus-id\tscore\n"
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text(f"{header}2\ta\t2\n2\tb\t0\n1\tc\t1\n9\tc\t1\n")
    (folder / "qrels_dev.tsv").write_text(f"{header}3\tb\t0\n4\tc\t-1\n")
    return folder


def test_a_collection_in_beirs_layout(collection: Path) -> None:
    queries, (report,) = read_judged_queries(f"{collection},test")
    assert queries == [Query("2", "two", (("a", 2),)), Query("1", "one", (("c", 1),))]
    assert (report.read, report.kept, report.skipped) == (3, 2, {NO_TEXT: 1})
    assert {Path(name).name for name in report.files} == {"queries.jsonl", "test.tsv"}
    sliced, (report,) = read_judged_queries(f"{collection},test[1:2]")
    assert ([each.id for each in sliced], report.read) == (["1"], 1)
    # Queries of a split's file that nobody judged are counted.
    texts = [{"_id": name, "text": f"own {name}"} for name in ("7", "1", "2")]
    written(collection / "queries_test.jsonl.gz", *texts)
    queries, (report,) = read_judged_queries(f"{collection},test")
    assert [each.text for each in queries] == ["own 1", "own 2"]
    assert report.skipped == {NO_DOCUMENT: 1, NO_TEXT: 1}
    for split, word in (("dev", "usable"), ("train", r"qrels_train\.tsv")):
        with pytest.raises(InputError, match=word):  # without a relevant document; without a file
            read_judged_queries(f"{collection},{split}")


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.json.gz", "rows.jsonl.gz"])
def test_rows_of_both_forms_in_every_kind_of_file(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, ROWS[0], REVIEW, ROWS[1] | {"relevant_doc_ids": []})
    (first, second), (report,) = read_judged_queries(f"{path},train")
    assert first == Query("q0", "query 0", (("d0", 1),))
    text = "Patient: adults; Intervention: rest; Comparison: none; Outcome: pain"
    assert second == Query("r", text, (("11", 1),), until="2015-12-31")
    assert (report.skipped, report.first) == ({NO_DOCUMENT: 1}, {NO_DOCUMENT: f"{name}:3"})


def test_folders_of_rows_and_several_parts(tmp_path: Path) -> None:
    """Where no id is there twice; equal queries without ids are two."""
    written(tmp_path / "train.jsonl", *ROWS[:3])
    written(tmp_path / "test.jsonl", ROWS[3])
    queries, reports = read_judged_queries(f"{tmp_path},train[1:] ; {tmp_path},test")
    assert [each.id for each in queries] == ["q1", "q2", "q3"]
    assert [report.kept for report in reports] == [2, 1]
    two = written(tmp_path / "two.jsonl", ROWS[0], ROWS[1])
    twice = written(tmp_path / "rows.jsonl", ROWS[0], ROWS[1], ROWS[0])
    for text, word in (
        (f"{tmp_path},dev", r"dev\.jsonl"),
        (f"{twice},train", "'q0'"),
        (f"{two},train[:1];{two},dev[1:];{two},dev[1:]", "'q1'"),
    ):
        with pytest.raises(InputError, match=word):
            read_judged_queries(text)
    bare = {"query": "the same", "relevant_doc_ids": ["d"]}
    queries, _ = read_judged_queries(f"{written(tmp_path / 'bare.jsonl', bare, bare)},train")
    assert [each.text for each in queries] == ["the same", "the same"]


ADA, LAKE, BARE = Page("Ada Berg", "She sails."), Page("Lake (film)", "Old."), Page("", "No. 7!")


def test_each_passage_is_there_once_in_the_order_of_first_sight() -> None:
    """With readable ids that do not depend on the pool."""
    again = Page("ADA BERG", "She  sails", id="elsewhere")
    other = Page("Ada Berg", "She flies.")
    found = pooled([ADA, LAKE, again, BARE, other, LAKE])
    texts = [(page.title, page.text) for page in (ADA, LAKE, BARE, other)]
    assert [(each.title, each.text) for each in found] == texts
    ids = [each.name.rpartition("-")[0] for each in found]
    assert ids == ["ada-berg", "lake-film", "no-7", "ada-berg"]
    assert pooled([BARE, other, LAKE])[2] == found[1]
    marks = pooled([Page("!!!", "?"), Page("???", "?"), Page("!!!", "?")])
    assert len({each.name for each in marks}) == 2
    assert pooled([]) == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "dataset string"),
        ("rows.jsonl,,train", "path,split"),
        ("nowhere,train", "nowhere"),
        ("rows.jsonl,train[9:]", r"train\[9:\]"),
        ("rows.tsv,train", r"rows\.tsv"),
        ("wrong.jsonl,train", r"wrong\.jsonl:2.*'query'"),
        ("empty.jsonl,train", r"empty\.jsonl"),
    ],
)
def test_data_that_are_refused(
    text: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "rows.jsonl", *ROWS)
    written(tmp_path / "wrong.jsonl", ROWS[0], {"query": 1})
    for name in ("rows.tsv", "empty.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=word):
        read_judged_queries(text)
