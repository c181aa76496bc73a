"""Records of HotpotQA's layout without a context; with one: test_hotpotqa.py, test_two_wiki.py."""

from __future__ import annotations

from typing import Any

import pytest

from qrag_jax.data.files.records import read_records
from qrag_jax.data.sample import BadRecord, Page, QueryQuestion
from qrag_jax.data.sources import titled_context
from tests.data.real_data import real

RECORD: dict[str, Any] = {
    "_id": "8813",
    "question": "When was the director of Web born?",
    "supporting_facts": [["Web", 1], ["Max Varn", 1], ["Web", 0]],
    "answer": "1925",
}
QUESTION = QueryQuestion("8813", RECORD["question"], ("1925",), (Page("Web"), Page("Max Varn")))


def test_gold_pages_are_known_by_title() -> None:
    assert titled_context.parse_open(RECORD) == QUESTION
    titles = RECORD | {"supporting_facts": None, "supporting_titles": ["Web", "Max Varn"]}
    assert titled_context.parse_open(titles) == QUESTION


def test_the_corpus_that_comes_with_the_data_has_ids() -> None:
    found = titled_context.parse_open(RECORD | {"gold_doc_ids": ["d4", "d0"]})
    assert found.gold == (Page("Web", id="d4"), Page("Max Varn", id="d0"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"supporting_facts": []}, "no supporting facts"),
        ({"supporting_facts": None}, "missing field 'supporting_facts'"),
        ({"supporting_facts": [["", 0]]}, "empty title"),
        (
            {"gold_doc_ids": ["d4"]},
            "gold_doc_ids has not as many ids as there are supporting titles",
        ),
        ({"gold_doc_ids": [4, 0]}, "field 'gold_doc_ids' is not a list of strings"),
        ({"question": ""}, "empty question"),
        ({"answer": None}, "missing field 'answer'"),
    ],
)
def test_unusable_record(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord) as caught:
        titled_context.parse_open(RECORD | fields)
    assert str(caught.value) == reason


def test_real_ids_are_those_of_the_titles() -> None:
    folder = real("2wikimultihopqa")
    corpus = (record for _, record in read_records(folder / "open_corpus.jsonl.gz"))
    titles = {record["_id"]: record["title"] for record in corpus}
    records = [record for _, record in read_records(folder / "open_dev.jsonl.gz")]
    found = [titled_context.parse_open(record) for record in records]
    assert len(found) == 220
    assert all(titles[page.id] == page.title for each in found for page in each.gold)
