"""HotpotQA's layouts, and what makes one of its records unusable."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from qrag_jax.data.files.records import read_records
from qrag_jax.data.sample import BadRecord, Sample
from qrag_jax.data.sources import hotpotqa
from tests.data.real_data import real

RECORD: dict[str, Any] = {
    "_id": "5a7a",
    "question": " Where was the painter of Dusk born? ",
    "answer": "Oslo",
    "supporting_facts": [["Ada Berg", 1], ["Dusk", 0], ["Ada Berg", 0]],
    "context": [
        ["Dusk", ["Dusk is a painting by Ada Berg.", "  It hangs in Bergen."]],
        ["Dawn", ["Dawn is a film."]],
        ["Ada Berg", ["Ada Berg was a painter.", " She was born in Oslo.", ""]],
        ["Nothing", []],
    ],
    "type": "bridge",
    "level": "hard",
}
SAMPLE = Sample(
    id="5a7a",
    question="Where was the painter of Dusk born?",
    chunks=(
        "Dusk Dusk is a painting by Ada Berg. It hangs in Bergen.",
        "Dawn Dawn is a film.",
        "Ada Berg Ada Berg was a painter. She was born in Oslo.",
        "Nothing",
    ),
    support=(2, 0),  # in the order of the data
    answers=("Oslo",),
    source="hotpotqa",
)


def changed(**fields: Any) -> dict[str, Any]:
    return copy.deepcopy(RECORD) | fields


def test_official_layout() -> None:
    assert hotpotqa.parse(RECORD) == SAMPLE


def test_hub_layout() -> None:
    record = {
        "id": "5a7a",
        "question": RECORD["question"],
        "answer": "Oslo",
        "supporting_facts": {"title": ["Ada Berg", "Dusk", "Ada Berg"], "sent_id": [1, 0, 0]},
        "context": {
            "title": [title for title, _ in RECORD["context"]],
            "sentences": [sentences for _, sentences in RECORD["context"]],
        },
    }
    assert hotpotqa.parse(record) == SAMPLE


def test_titles_layout() -> None:
    record = changed(supporting_titles=["Ada Berg", "Dusk"])
    del record["supporting_facts"]
    assert hotpotqa.parse(record) == SAMPLE


def test_aliases_follow_the_answer() -> None:
    record = changed(answer_aliases=["Kristiania", "Oslo", " Oslo "])
    assert hotpotqa.parse(record).answers == ("Oslo", "Kristiania")
    assert hotpotqa.parse(changed(answer="")).answers == ()


@pytest.mark.parametrize("fact", [["Dusk", 2], ["Dusk", -1], ["Nothing", 0]])
def test_wrong_sentence_index_keeps_the_paragraph(fact: list[Any]) -> None:
    record = changed(supporting_facts=[fact])
    titles = [title for title, _ in record["context"]]
    assert hotpotqa.parse(record).support == (titles.index(fact[0]),)
    assert hotpotqa.mended(record) == "sentence index out of range, paragraph kept"
    hub = {"title": [fact[0]], "sent_id": [fact[1]]}
    assert hotpotqa.parse(changed(supporting_facts=hub)) == hotpotqa.parse(record)
    assert hotpotqa.mended(RECORD) == ""


@pytest.mark.parametrize("name", ["_id", "question", "answer", "supporting_facts", "context"])
@pytest.mark.parametrize("null", [False, True])
def test_missing_field_is_named(name: str, null: bool) -> None:
    record = changed(**{name: None})
    if not null:
        del record[name]
    with pytest.raises(BadRecord, match=rf"^missing field '{name}'$"):
        hotpotqa.parse(record)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"supporting_facts": []}, "no supporting facts"),
        ({"supporting_facts": [["Noon", 0]]}, "support title not in the context"),
        ({"context": []}, "no chunks"),
        ({"context": {"title": [], "sentences": []}}, "no chunks"),
        ({"context": [*RECORD["context"], [" ", [""]]]}, "empty chunk"),
        ({"question": " "}, "empty question"),
        ({"_id": ""}, "empty id"),
        ({"question": "half a pair \ud83d"}, "text is not valid Unicode"),
        ({"_id": 7}, "field '_id' is not a string"),
        ({"question": ["q"]}, "field 'question' is not a string"),
        ({"answer": 1960}, "field 'answer' is not a string"),
        ({"answer_aliases": "Oslo"}, "field 'answer_aliases' is not a list of strings"),
        ({"context": "Dusk"}, "field 'context' is not a list"),
        ({"context": ["Dusk"]}, "field 'context' is not a list of [title, sentences]"),
        ({"context": [[1, ["a"]]]}, "field 'context title' is not a string"),
        ({"context": [["Dusk", "a"]]}, "field 'context sentences' is not a list of strings"),
        ({"context": {"title": ["Dusk"]}}, "missing field 'sentences'"),
        (
            {"context": {"title": ["Dusk"], "sentences": []}},
            "context has not as many titles as paragraphs",
        ),
        ({"supporting_facts": "Dusk"}, "field 'supporting_facts' is not a list"),
        (
            {"supporting_facts": ["Dusk"]},
            "field 'supporting_facts' is not a list of [title, sentence index]",
        ),
        (
            {"supporting_facts": [["Dusk", "0"]]},
            "field 'supporting_facts sentence index' is not an integer",
        ),
        (
            {"supporting_facts": [["Dusk", True]]},
            "field 'supporting_facts sentence index' is not an integer",
        ),
        (
            {"supporting_facts": {"title": ["Dusk"], "sent_id": []}},
            "supporting_facts has not as many titles as sentence indices",
        ),
    ],
)
def test_unusable_record(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord) as caught:
        hotpotqa.parse(changed(**fields))
    assert str(caught.value) == reason


def test_titles_layout_is_checked_too() -> None:
    record = changed(supporting_titles=["Noon"])
    del record["supporting_facts"]
    with pytest.raises(BadRecord, match=r"^support title not in the context$"):
        hotpotqa.parse(record)
    with pytest.raises(BadRecord, match=r"^no supporting facts$"):
        hotpotqa.parse(record | {"supporting_titles": []})


def test_to_record_is_the_inverse() -> None:
    paragraphs = [("Dusk", ["By Ada Berg.", "In Bergen."]), ("Dawn", ["A film."]), ("X", ["Y."])]
    record = hotpotqa.to_record("r1", "Who?", "Ada", paragraphs, [2, 0])
    assert set(record) == set(RECORD)
    assert record["context"][0][1] == ["By Ada Berg.", " In Bergen."]
    assert hotpotqa.parse(record) == Sample(
        "r1",
        "Who?",
        ("Dusk By Ada Berg. In Bergen.", "Dawn A film.", "X Y."),
        (2, 0),
        ("Ada",),
        "hotpotqa",
    )


def test_to_record_needs_distinct_titles() -> None:
    with pytest.raises(ValueError, match="distinct"):
        hotpotqa.to_record("r1", "Who?", "Ada", [("X", ["a"]), ("X", ["b"])], [1])


def test_first_real_records() -> None:
    _, record = next(read_records(real("hotpotqa/train.jsonl.gz")))
    sample = hotpotqa.parse(record)
    assert sample.id == "5a849bd75542992a431d1a79"
    assert sample.support == (2, 3)
    assert sample.answers == ("1960",)
    assert sample.chunks[2].startswith("The Dangerous Liaisons ")
    assert sample.chunks[3].startswith("David Hobson (tenor) David Hobson")
    assert not any("  " in chunk for chunk in sample.chunks)
    _, record = next(read_records(real("hotpotqa/train_titles.jsonl.gz")))
    assert hotpotqa.parse(record).support == (5, 7)


def test_real_records_survive_the_round_trip() -> None:
    for _, record in read_records(real("hotpotqa/dev.jsonl.gz")):
        sample = hotpotqa.parse(record)
        again = hotpotqa.to_record(
            sample.id, sample.question, sample.answers[0], record["context"], sample.support
        )
        assert hotpotqa.parse(again) == sample
