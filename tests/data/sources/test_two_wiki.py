"""2WikiMultiHopQA: what differs from HotpotQA, whose layout it shares (test_hotpotqa.py)."""

from __future__ import annotations

from typing import Any

import pytest

from qrag_jax.data.files.records import read_records
from qrag_jax.data.sample import BadRecord, Sample
from qrag_jax.data.sources import two_wiki
from tests.data.real_data import real

RECORD: dict[str, Any] = {
    "_id": "8813",
    "type": "compositional",
    "question": "When was the director of Web born?",
    "context": [
        ["Max Varn", ["Max Varn was a director.", "He was born in 1925."]],
        ["Web", ["Web is a film.", "Max Varn made it."]],
        ["Max Varn", ["Max Varn was a director.", "He was born in 1925."]],
    ],
    "entity_ids": "Q1_Q2",
    "supporting_facts": [["Web", 1], ["Max Varn", 1]],
    "evidences": [["Web", "director", "Max Varn"]],
    "answer": "1925",
    "evidences_id": [],
    "answer_id": None,
}


def test_official_layout_and_a_title_that_stands_twice() -> None:
    assert two_wiki.parse(RECORD) == Sample(
        "8813",
        "When was the director of Web born?",
        (
            "Max Varn Max Varn was a director. He was born in 1925.",
            "Web Web is a film. Max Varn made it.",
            "Max Varn Max Varn was a director. He was born in 1925.",
        ),
        (1, 0),
        ("1925",),
        "two_wiki",
    )


def test_index_out_of_range() -> None:
    record = RECORD | {"supporting_facts": [["Web", 2]]}
    assert two_wiki.parse(record).support == (1,)
    assert two_wiki.mended(record) == "sentence index out of range, paragraph kept"


def test_test_split_without_answers() -> None:
    with pytest.raises(BadRecord, match=r"^missing field 'answer'$"):
        two_wiki.parse({key: value for key, value in RECORD.items() if key != "answer"})


def test_to_record_is_the_inverse() -> None:
    paragraphs = [("Web", ["A film.", "By Max."]), ("Max", ["Born 1925."]), ("Ox", ["Moo."])]
    record = two_wiki.to_record("r1", "When?", "1925", paragraphs, [0, 1])
    assert set(record) == set(RECORD)
    chunks = ("Web A film. By Max.", "Max Born 1925.", "Ox Moo.")
    expected = Sample("r1", "When?", chunks, (0, 1), ("1925",), "two_wiki")
    assert two_wiki.parse(record) == expected


def test_first_real_records() -> None:
    _, record = next(read_records(real("2wikimultihopqa/train.jsonl.gz")))
    sample = two_wiki.parse(record)
    assert sample.id == "e6b6bc4e0bdc11eba7f7acde48001122"
    assert sample.support == (5, 6)
    assert sample.answers == ("21 March 1925",)
    assert sample.chunks[6].startswith("Max Varnel Max Varnel")
    _, record = next(read_records(real("2wikimultihopqa/dev.jsonl.gz")))
    assert two_wiki.parse(record).support == (1, 3)


def test_real_titles_that_stand_twice_have_equal_texts() -> None:
    twice = 0
    for _, record in read_records(real("2wikimultihopqa/train.jsonl.gz")):
        titles = [title for title, _ in record["context"]]
        chunks = two_wiki.parse(record).chunks
        assert len(set(chunks)) == len(set(titles))
        twice += len(set(titles)) < len(titles)
    assert twice == 13
