"""Judged queries, dates, lists of queries, and TREC's files.

Round trips and damaged files: tests/conformance/test_sources.py.
"""

from __future__ import annotations

from pathlib import Path

import ir_measures
import pytest

from qrag_jax.data.corpora import (
    NO_DOCUMENT,
    NO_TEXT,
    judged_row,
    last_day,
    read_judged_queries,
    read_query_list,
    write_run,
)
from qrag_jax.data.reading import WITHOUT, ReadReport, parse_parts
from qrag_jax.data.sample import Sample
from qrag_jax.errors import InputError
from tests.support.worlds import write_lines

QUERY = {"query": "Does it help?", "relevant_doc_ids": ["d1", 7, "d1"], "id": "q1"}
PICO = {
    "id": 12,
    "pico": {"P": "adults with pain.", "I": "rest", "C": "", "O": "less  pain"},
    "publication_pmids": ["101", "102"],
    "pub_date": "2015/10/07",
    "origin": {"pmid": "9"},
}
PLACE = "train.jsonl:17"


def test_rows_of_both_forms() -> None:
    answered = judged_row(PLACE, QUERY | {"answers": ["yes", "Yes", "yes"], "query": " a\n b "})
    assert answered == Sample("q1", "a b", answers=("yes", "Yes"), grades=(("d1", 1), ("7", 1)))
    text = "Patient: adults with pain; Intervention: rest; Outcome: less pain"
    grades = (("101", 1), ("102", 1))
    assert judged_row(PLACE, PICO) == Sample("12", text, grades=grades, until="2015-10-07")
    assert judged_row(PLACE, PICO | {"pub_date": 2015}).until == "2015-12-31"
    assert judged_row(PLACE, PICO | {"pub_date": None}).until == ""
    with pytest.raises(InputError, match=rf"^{PLACE}: .*'relevant_doc_ids'"):
        judged_row(PLACE, {"query": "q"})


DAYS = """2015-10-07|2015/10/07|2015.10.7|20151007|2015-10-07T08:30:00Z|2015 Oct 7|7 October 2015
07-Oct-2015|7th Oct. 2015|October 7, 2015| Oct.  7th, 2015 """
SPANS = {"2015": "2015-12-31", "2015-02": "2015-02-28", "2016/02": "2016-02-29"}
NO_DATES = "|soon|7/10/2015|15|2015-13|2015-02-30|2015 Foo|2015-00-01|201510|2015 Oct-Dec"


def test_dates() -> None:
    for text in DAYS.replace("\n", "|").split("|"):
        assert last_day(text) == "2015-10-07"
    for text, day in (SPANS | {"2015 Sept": "2015-09-30", "May, 2015": "2015-05-31"}).items():
        assert last_day(text) == day
    for text in NO_DATES.split("|"):
        with pytest.raises(ValueError, match=r"date|day|month|year"):
            last_day(text)


def test_lists_of_queries_in_every_layout(tmp_path: Path) -> None:
    asked = [
        {"query": "a  query", "id": 7},
        {"_id": "8", "text": "of BEIR", "metadata": {"x": 1}},
        {"_id": "8", "text": "again", "collection": "two"},
        {"id": "9", "pico": {"P": "adults", "O": "pain"}, "pub_date": "2019"},
    ]
    assert read_query_list(write_lines(tmp_path / "asked.jsonl.gz", asked)) == [
        Sample("7", "a query"),
        Sample("8", "of BEIR"),
        Sample("8", "again", collection="two"),
        Sample("9", "Patient: adults; Outcome: pain", until="2019-12-31"),
    ]
    twice = write_lines(tmp_path / "x.jsonl", [{"query": q, "id": "1"} for q in "xy"])
    with pytest.raises(InputError, match=r"x\.jsonl:2"):
        read_query_list(twice)


def test_questions_to_search_for_need_no_id(tmp_path: Path) -> None:
    for name, content in {
        "q.csv": 'id,question\n,"one, two"\n7,a b\n',
        "q.txt": 'one, two\n\n{"id": 7, "text": "a b"}\n',
        "q.jsonl": '{"id": null, "query": "one, two"}\n{"_id": "7", "question": "a b"}\n',
    }.items():
        (tmp_path / name).write_text(content)
        found = read_query_list(tmp_path / name, numbered=False)
        assert [(each.id, each.question) for each in found] == [("", "one, two"), ("7", "a b")]


# ---------------------------------------------------------------- parts of judged queries


def read(text: str) -> tuple[list[Sample], ReadReport]:
    (part,) = parse_parts(text, WITHOUT)
    return read_judged_queries(part)


def test_a_collection_in_beirs_layout(tmp_path: Path) -> None:
    """Judgements of a dev and a test split; the queries of both are in one file."""
    texts = {"1": "one", "2": "two", "3": "three", "4": "four"}
    rows = [{"_id": name, "text": text} for name, text in texts.items()]
    write_lines(tmp_path / "queries.jsonl", rows)
    header = "query-id\tcorpus-id\tscore\n"
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text(f"{header}2\ta\t2\n2\tb\t0\n1\tc\t1\n9\tc\t1\n")
    (tmp_path / "qrels_dev.tsv").write_text(f"{header}3\tb\t0\n4\tc\t-1\n")
    queries, report = read(f"{tmp_path},test")
    assert [(each.id, each.question, each.grades) for each in queries] == [
        ("2", "two", (("a", 2),)),
        ("1", "one", (("c", 1),)),
    ]
    assert (report.read, report.kept, report.skipped) == (3, 2, {NO_TEXT: 1})
    # Queries of a split's file that nobody judged are counted.
    own = [{"_id": name, "text": f"own {name}"} for name in ("7", "1", "2")]
    write_lines(tmp_path / "queries_test.jsonl.gz", own)
    queries, report = read(f"{tmp_path},test")
    assert [each.question for each in queries] == ["own 1", "own 2"]
    assert report.skipped == {NO_DOCUMENT: 1, NO_TEXT: 1}
    for split, word in (("dev", "usable"), ("train", r"qrels_train\.tsv")):
        with pytest.raises(InputError, match=word):  # without a relevant document; without a file
            read(f"{tmp_path},{split}")


def test_files_and_folders_of_rows(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "test.jsonl.gz", [QUERY, PICO, QUERY | {"relevant_doc_ids": []}])
    queries, report = read(f"{path},train")
    assert queries == [judged_row(PLACE, QUERY), judged_row(PLACE, PICO)]
    assert report.skipped == {NO_DOCUMENT: 1}
    assert report.first[NO_DOCUMENT].startswith(f"{path.name}:3, ")
    assert QUERY["query"] in report.first[NO_DOCUMENT]  # an example
    assert [each.id for each in read(f"{tmp_path},test[1:]")[0]] == ["12"]
    # Equal queries without ids are two; two with one id are not.
    bare = {"query": "the same", "relevant_doc_ids": ["d"]}
    queries, _ = read(f"{write_lines(tmp_path / 'bare.jsonl', [bare, bare])},train")
    assert [each.question for each in queries] == ["the same", "the same"]
    _, report = read(f"{write_lines(tmp_path / 'twice.jsonl', [QUERY, PICO, QUERY])},train")
    assert (report.kept, report.skipped.total()) == (2, 1)
    (tmp_path / "empty.jsonl").touch()
    for text, word in (
        ("nowhere,train", "nowhere"),
        ("test.jsonl.gz,train[9:]", r"train\[9:\]"),
        ("empty.jsonl,train", r"empty\.jsonl"),
        (",dev", r"dev\.jsonl"),
    ):
        with pytest.raises(InputError, match=word):
            read(f"{tmp_path}/{text}")


# ---------------------------------------------------------------- TREC's files


def test_a_run_is_read_by_others(tmp_path: Path) -> None:
    run = {"7": {"b": 1.5, "a": -2.0}, "q-ä": {"a": 0.5, "c": 0.5}}
    write_run(tmp_path / "run", run | {"none": {}}, tag="bm25")
    before = (tmp_path / "run").read_text()
    assert before.splitlines()[:2] == ["7 Q0 b 1 1.5 bm25", "7 Q0 a 2 -2.0 bm25"]
    back = ir_measures.read_trec_run(str(tmp_path / "run"))
    assert [(each.query_id, each.doc_id, each.score) for each in back] == [
        (query, document, score) for query, own in run.items() for document, score in own.items()
    ]
    with pytest.raises(InputError, match="'a b'"):
        write_run(tmp_path / "run", {"q": {"a b": 1.0}}, "bm25")
    assert (tmp_path / "run").read_text() == before
