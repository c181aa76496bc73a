"""Lists of queries without judgements: text, rows, BEIR's, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.files.asked_questions import read_questions
from qrag_jax.data.files.query_lists import ListedQuery, read_query_list
from qrag_jax.errors import InputError


def rows(path: Path, *given: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


def test_a_query_a_line(tmp_path: Path) -> None:
    path = tmp_path / "asked.txt"
    path.write_bytes("\ufeffwhere is  Oslo?\r\n\n  why \u2028 not?".encode())
    assert read_query_list(path) == [
        ListedQuery("1", "where is Oslo?"),
        ListedQuery("3", "why not?"),
    ]


def test_rows(tmp_path: Path) -> None:
    path = rows(
        tmp_path / "asked.jsonl",
        {"query": "a  query", "id": 7},
        {"_id": "8", "text": "of BEIR", "metadata": {"x": 1}},
        {"_id": "8", "text": "again", "collection": "two"},
        {"id": "9", "pico": {"P": "adults", "O": "pain"}, "pub_date": "2019"},
        {"id": "10", "query": "judged", "relevant_doc_ids": ["d"], "answers": None},
    )
    assert read_query_list(path) == [
        ListedQuery("7", "a query"),
        ListedQuery("8", "of BEIR"),
        ListedQuery("8", "again", collection="two"),
        ListedQuery("9", "Patient: adults; Outcome: pain", until="2019-12-31"),
        ListedQuery("10", "judged"),
    ]
    packed = tmp_path / "asked.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_query_list(packed) == read_query_list(path)


def test_rows_without_an_id_have_their_own(tmp_path: Path) -> None:
    found = read_query_list(rows(tmp_path / "x.jsonl", {"query": "same"}, {"query": "same"}))
    assert len({each.id for each in found}) == 2


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"question": "x"}, "'query'"),
        ({"query": " "}, "'query'"),
        ({"text": 3}, "'query'"),
        ({"query": "y", "collection": 3}, "'collection'"),
        ({"query": "y", "id": "1"}, r"x\.jsonl:2"),
    ],
)
def test_rows_that_are_refused(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    path = rows(tmp_path / "x.jsonl", {"query": "first", "id": "1"}, row)
    with pytest.raises(InputError, match=told):
        read_query_list(path)


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"asked\.tsv"):
        read_query_list(tmp_path / "asked.tsv")
    with pytest.raises(InputError, match=r"asked\.txt"):
        read_query_list(tmp_path / "asked.txt")
    path = tmp_path / "asked.txt"
    path.write_text("\n \n")
    with pytest.raises(InputError, match=r"asked\.txt"):
        read_query_list(path)
    path.write_bytes(b"good\n\xff\n")
    with pytest.raises(InputError, match=r"asked\.txt:2"):
        read_query_list(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.csv", 'id,question\n,"one, two"\n7,a\u2028b\u0085c\n'),
        ("q.txt", 'one, two\n\n{"id": 7, "text": "a\u2028b\u0085c"}\n'),
        (
            "q.jsonl",
            '{"id": null, "query": "one, two"}\n{"_id": "7", "question": "a\u2028b\u0085c"}\n',
        ),
    ],
)
def test_questions_to_search_for(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    assert [*read_questions(path)] == [("", "one, two"), ("7", "a\u2028b\u0085c")]


@pytest.mark.parametrize(
    ("name", "content"),
    [("q.csv", "id,asked\n1,who?\n"), ("q.tsv", "1\twho?\n"), ("q.txt", "{'text': 'who?'}\n")],
)
def test_files_without_questions(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=name):
        [*read_questions(tmp_path / name)]
