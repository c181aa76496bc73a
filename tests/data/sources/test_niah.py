"""RULER's needle files: both layouts become the same sample, and what is wrong has a reason."""

from __future__ import annotations

from typing import Any

import pytest

from qrag_jax.data.files.records import read_records
from qrag_jax.data.sample import BadRecord
from qrag_jax.data.sources import niah
from qrag_jax.data.sources.niah import parse
from qrag_jax.data.sources.registry import load_samples
from tests.data.real_data import real

TEXT = [
    "Mr. Fox saw 77123 geese.",
    "One of the special magic numbers for red-fox is: 7712.",
    "It rained.",
    "One of the special magic numbers for red-fox is: 4410.",
    "One of the special magic numbers for red-hen is: 9081.",
]
QUESTION = "What are all the special magic numbers for red-fox mentioned in the provided text?"
PREFIX = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)


def split_record(**fields: Any) -> dict[str, Any]:
    return {
        "index": 4,
        "task": "niah_multivalue",
        "input_prefix": PREFIX,
        "sentences": TEXT,
        "input_suffix": f"\n{QUESTION}",
        "outputs": ["4410", "7712"],
        "query": "red-fox",
        "supporting": [3, 1],
        "length": 40,
    } | fields


def ruler_record(text: str, suffix: str = "", **fields: Any) -> dict[str, Any]:
    prompt = f"{PREFIX}{text}\n{QUESTION}{suffix}"
    return {"index": 4, "input": prompt, "outputs": ["4410", "7712"], "length": 40} | fields


def reason(record: dict[str, Any]) -> str:
    with pytest.raises(BadRecord) as caught:
        parse(record)
    return str(caught.value)


def test_sentences_already_split() -> None:
    sample = parse(split_record())
    assert (sample.id, sample.source) == ("niah_multivalue-4", "niah")
    assert sample.question == QUESTION
    assert sample.chunks == tuple(TEXT)
    assert sample.support == (3, 1)
    assert sample.answers == ("4410", "7712")
    assert parse(split_record(supporting=None)).support == (3, 1)
    begun = split_record(input_suffix=f"\n{QUESTION} The special magic numbers for red-fox are")
    assert parse(begun) == sample


def test_rulers_own_prompt() -> None:
    expected = parse(split_record())
    for text in (" ".join(TEXT), "\n".join(TEXT), "\n\n".join(TEXT) + "\n"):
        for suffix in ("", " The special magic numbers for red-fox mentioned in it are", "\n"):
            sample = parse(ruler_record(text, suffix))
            assert (sample.id, sample.question) == ("niah-4", QUESTION)
            assert sample.chunks == expected.chunks
            assert sample.support == expected.support
            assert sample.answers == expected.answers
    # A question inside the text is not the one asked; without the instruction all is text.
    text = "Why? " + " ".join(TEXT)
    plain = {"index": 4, "input": f"{text}\n{QUESTION}", "outputs": ["9081"]}
    assert parse(plain).chunks == ("Why?", *TEXT)
    assert parse(plain).support == (5,)


def test_outputs_are_words_of_their_own() -> None:
    text = ["The magic word for a is: calm-sea.", "A calm-sea-bird flew.", "So calm-seas came."]
    record = ruler_record(" ".join(text), outputs=["calm-sea"])
    assert parse(record).support == (0,)


def test_bad_records() -> None:
    assert reason({"index": 1}) == "missing field 'outputs'"
    assert reason({"index": 1, "outputs": ["1"]}) == "missing field 'input'"
    assert reason(split_record(outputs="4410")) == "field 'outputs' is not a list of strings"
    assert reason(split_record(sentences="x")) == "field 'sentences' is not a list of strings"
    assert reason(split_record(sentences=[])) == "no chunks"
    assert reason(split_record(sentences=[*TEXT, " "])) == "empty chunk"
    assert reason(split_record(input_suffix="\n")) == "empty question"
    assert reason(split_record(supporting=[5])) == "support index out of range"
    assert reason(split_record(supporting=[-1])) == "support index out of range"
    assert reason(split_record(supporting=["1"])) == "field 'supporting' is not an integer"
    assert reason(split_record(supporting=[])) == "no supporting facts"
    assert reason(split_record(index=None)) == "missing field 'index'"
    assert reason(ruler_record("It rained.")) == "an expected output is in no sentence"
    assert reason(ruler_record(" ".join(TEXT), outputs=[])) == "no supporting facts"
    assert reason(ruler_record("x", input="It rained 7712 times.")) == "no question"


def test_record_and_back() -> None:
    paragraphs = [("Dusk", ["By Ada.", "A film."]), ("", ["Born in Oslo."])]
    sample = parse(niah.to_record("r1", "Where?", "Oslo", paragraphs, [1]))
    assert sample.chunks == ("Dusk By Ada. A film.", "Born in Oslo.")
    assert (sample.id, sample.question, sample.support) == ("r1", "Where?", (1,))
    assert sample.answers == ("Oslo",)


def test_real_data() -> None:
    samples, report = load_samples("niah", str(real("ruler_niah")), "dev")
    assert (report.kept, report.skipped) == (100, {})
    for sample in samples:
        found = {sample.chunks[i].split(": ")[-1].rstrip(".") for i in sample.support}
        assert found == set(sample.answers)
        assert sample.question.startswith("What ")
        assert sample.question.endswith("?")
    assert {len(s.support) for s in samples if "multivalue" in s.id} == {4}


def test_real_data_joined_to_rulers_prompt() -> None:
    """Split again by us, the same needles are found, nearly all as chunks of their own."""
    alone = 0
    for _, record in read_records(real("ruler_niah") / "dev.jsonl.gz"):
        split = parse(record)
        prompt = record["input_prefix"] + " ".join(record["sentences"]) + record["input_suffix"]
        joined = parse({"index": 1, "input": prompt, "outputs": record["outputs"]})
        assert joined.question == split.question
        assert not joined.chunks[0].startswith(("A special magic", "Some special magic"))
        assert len(joined.support) == len(split.support)
        for one, other in zip(split.support, joined.support, strict=True):
            assert split.chunks[one] in joined.chunks[other]
            alone += split.chunks[one] == joined.chunks[other]
    assert alone >= 0.98 * (60 + 4 * 40)  # the file itself puts one of them after a "Mr."
