"""MuSiQue's layout, and what makes one of its records unusable."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from qrag_jax.data.files.records import read_records
from qrag_jax.data.sample import BadRecord, Sample
from qrag_jax.data.sources import musique
from tests.data.real_data import real


def paragraph(idx: int, title: str, text: str, supporting: bool) -> dict[str, Any]:
    return {"idx": idx, "title": title, "paragraph_text": text, "is_supporting": supporting}


def step(idx: int | None) -> dict[str, Any]:
    return {"id": 1, "question": "?", "answer": "!", "paragraph_support_idx": idx}


RECORD: dict[str, Any] = {
    "id": "2hop__1_2",
    "paragraphs": [
        paragraph(0, "Norway", "Oslo is its capital.", True),
        paragraph(1, "Sweden", "Malmö is a city.", False),
        paragraph(2, "Dusk", "A painting from Norway.", True),
    ],
    "question": "What is the capital of the land of Dusk?",
    "question_decomposition": [step(2), step(0)],
    "answer": "Oslo",
    "answer_aliases": ["Kristiania"],
    "answerable": True,
}
SAMPLE = Sample(
    id="2hop__1_2",
    question="What is the capital of the land of Dusk?",
    chunks=(
        "Norway. Oslo is its capital.",
        "Sweden. Malmö is a city.",
        "Dusk. A painting from Norway.",
    ),
    support=(2, 0),  # in the order of the data
    answers=("Oslo", "Kristiania"),
    source="musique",
)


def changed(**fields: Any) -> dict[str, Any]:
    return copy.deepcopy(RECORD) | fields


def test_official_layout() -> None:
    assert musique.parse(RECORD) == SAMPLE


def test_steps_name_idx_not_position() -> None:
    record = changed(question_decomposition=[step(12), step(10)])
    for each in record["paragraphs"]:
        each["idx"] += 10
        each["is_supporting"] = False  # not looked at where there is a decomposition
    assert musique.parse(record) == SAMPLE


@pytest.mark.parametrize("steps", [[], None])
def test_without_decomposition_the_marked_paragraphs_support(steps: list | None) -> None:
    record = changed(question_decomposition=steps)
    expected = dataclasses.replace(SAMPLE, support=(0, 2))
    assert musique.parse(record) == expected
    del record["question_decomposition"]
    assert musique.parse(record) == expected


@pytest.mark.parametrize("name", ["id", "question", "paragraphs", "answer"])
def test_missing_field_is_named(name: str) -> None:
    record = changed()
    del record[name]
    with pytest.raises(BadRecord, match=rf"^missing field '{name}'$"):
        musique.parse(record)


@pytest.mark.parametrize("name", ["title", "paragraph_text", "idx"])
def test_missing_paragraph_field_is_named(name: str) -> None:
    record = changed()
    del record["paragraphs"][1][name]
    with pytest.raises(BadRecord, match=rf"^missing field '{name}'$"):
        musique.parse(record)


UNMARKED = [paragraph(0, "Norway", "A land.", False)]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"answerable": False}, "not answerable"),
        ({"answerable": "no"}, "field 'answerable' is not true or false"),
        ({"question_decomposition": [step(3)]}, "support index out of range"),
        ({"question_decomposition": [step(-1)]}, "support index out of range"),
        ({"question_decomposition": [step(None)]}, "missing field 'paragraph_support_idx'"),
        (
            {"question_decomposition": [3]},
            "field 'question_decomposition' is not a list of objects",
        ),
        ({"question_decomposition": [], "paragraphs": UNMARKED}, "no supporting facts"),
        ({"paragraphs": []}, "no chunks"),
        ({"paragraphs": ["text"]}, "field 'paragraphs' is not a list of objects"),
        ({"paragraphs": UNMARKED * 2}, "two paragraphs have one idx"),
        (
            {"paragraphs": [paragraph(0, "", " ", True)], "question_decomposition": [step(0)]},
            "empty chunk",
        ),
        ({"question": ""}, "empty question"),
        ({"answer_aliases": [1]}, "field 'answer_aliases' is not a list of strings"),
    ],
)
def test_unusable_record(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord) as caught:
        musique.parse(changed(**fields))
    assert str(caught.value) == reason


def test_to_record_is_the_inverse() -> None:
    paragraphs = [
        ("Dusk", ["A painting.", "From Norway."]),
        ("Ox", ["Moo."]),
        ("Norway", ["Oslo."]),
    ]
    record = musique.to_record("r1", "Which?", "Oslo", paragraphs, [2, 0])
    assert set(record) == set(RECORD)
    assert [each["is_supporting"] for each in record["paragraphs"]] == [True, False, True]
    chunks = ("Dusk. A painting. From Norway.", "Ox. Moo.", "Norway. Oslo.")
    assert musique.parse(record) == Sample("r1", "Which?", chunks, (2, 0), ("Oslo",), "musique")


def test_first_real_record() -> None:
    _, record = next(read_records(real("musique/train.jsonl.gz")))
    sample = musique.parse(record)
    assert sample.id == "4hop1__88342_49853_128008_80286"
    assert sample.support == (6, 8, 11, 4)  # the decomposition's steps
    assert sample.answers[0] == "Pete Rose"
    first = record["paragraphs"][0]
    assert sample.chunks[0] == f"{first['title']}. {first['paragraph_text']}"


def test_real_decomposition_agrees_with_the_marks() -> None:
    for _, record in read_records(real("musique/dev.jsonl.gz")):
        by_marks = musique.parse(record | {"question_decomposition": []})
        sample = musique.parse(record)
        assert dataclasses.replace(sample, support=tuple(sorted(sample.support))) == by_marks
