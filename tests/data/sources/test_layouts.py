"""Records of each data set: its layouts, what is mended, what is unusable, and real ones."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from qrag_jax.data.files.records import read_records
from qrag_jax.data.sample import BadRecord, Page, QueryQuestion, Sample
from qrag_jax.data.sources import hotpotqa, hover, musique, titled_context, two_wiki
from qrag_jax.data.sources.niah import parse as parse_needles
from qrag_jax.data.sources.registry import load_samples
from tests.data.real_data import real


def unusable(parse: Callable[[dict[str, Any]], Any], record: dict[str, Any], named: str) -> None:
    """A reason of one line, which serves as a key, with the name of the field in it."""
    with pytest.raises(BadRecord, match=named) as caught:
        parse(record)
    assert "\n" not in str(caught.value)


# HotpotQA


HOTPOT: dict[str, Any] = {
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


HOTPOT_SAMPLE = Sample(
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


def hotpot(**fields: Any) -> dict[str, Any]:
    return copy.deepcopy(HOTPOT) | fields


def test_official_layout_of_hotpotqa() -> None:
    assert hotpotqa.parse(HOTPOT) == HOTPOT_SAMPLE


def test_hub_layout() -> None:
    record = {
        "id": "5a7a",
        "question": HOTPOT["question"],
        "answer": "Oslo",
        "supporting_facts": {"title": ["Ada Berg", "Dusk", "Ada Berg"], "sent_id": [1, 0, 0]},
        "context": {
            "title": [title for title, _ in HOTPOT["context"]],
            "sentences": [sentences for _, sentences in HOTPOT["context"]],
        },
    }
    assert hotpotqa.parse(record) == HOTPOT_SAMPLE


def test_titles_layout() -> None:
    record = hotpot(supporting_titles=["Ada Berg", "Dusk"])
    del record["supporting_facts"]
    assert hotpotqa.parse(record) == HOTPOT_SAMPLE


def test_aliases_follow_the_answer() -> None:
    record = hotpot(answer_aliases=["Kristiania", "Oslo", " Oslo "])
    assert hotpotqa.parse(record).answers == ("Oslo", "Kristiania")
    assert hotpotqa.parse(hotpot(answer="")).answers == ()


@pytest.mark.parametrize("fact", [["Dusk", 2], ["Dusk", -1], ["Nothing", 0]])
def test_wrong_sentence_index_keeps_the_paragraph(fact: list[Any]) -> None:
    record = hotpot(supporting_facts=[fact])
    titles = [title for title, _ in record["context"]]
    assert hotpotqa.parse(record).support == (titles.index(fact[0]),)
    assert hotpotqa.mended(record) == "sentence index out of range, paragraph kept"
    hub = {"title": [fact[0]], "sent_id": [fact[1]]}
    assert hotpotqa.parse(hotpot(supporting_facts=hub)) == hotpotqa.parse(record)
    assert hotpotqa.mended(HOTPOT) == ""


@pytest.mark.parametrize("name", ["_id", "question", "answer", "supporting_facts", "context"])
def test_a_field_that_is_missing_or_null_is_named(name: str) -> None:
    unusable(hotpotqa.parse, hotpot(**{name: None}), name)
    record = hotpot()
    del record[name]
    unusable(hotpotqa.parse, record, name)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"supporting_facts": []}, "supporting facts"),
        ({"supporting_facts": [["Noon", 0]]}, "support title"),
        ({"supporting_facts": [["Dusk", True]]}, "supporting_facts"),
        ({"supporting_facts": ["Dusk"]}, "supporting_facts"),
        ({"supporting_facts": {"title": ["Dusk"], "sent_id": []}}, "supporting_facts"),
        ({"supporting_facts": None, "supporting_titles": ["Noon"]}, "support title"),
        ({"context": []}, "chunks"),
        ({"context": "Dusk"}, "context"),
        ({"context": [["Dusk", "a"]]}, "context"),
        ({"context": {"title": ["Dusk"], "sentences": []}}, "context"),
        ({"context": [*HOTPOT["context"], [" ", [""]]]}, "chunk"),
        ({"question": " "}, "question"),
        ({"question": "half a pair \ud83d"}, "Unicode"),
        ({"_id": 7}, "_id"),
        ({"answer_aliases": "Oslo"}, "answer_aliases"),
    ],
)
def test_unusable_records_of_hotpotqa(fields: dict[str, Any], named: str) -> None:
    unusable(hotpotqa.parse, hotpot(**fields), named)


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


WIKI: dict[str, Any] = {
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
    assert two_wiki.parse(WIKI) == Sample(
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


def test_test_split_without_answers() -> None:
    with pytest.raises(BadRecord, match=r"^missing field 'answer'$"):
        two_wiki.parse({key: value for key, value in WIKI.items() if key != "answer"})


def test_first_real_records_of_two_wiki() -> None:
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


CLAIM: dict[str, Any] = {
    "uid": "a0cf",
    "claim": " The painter of Dusk was born in Oslo. ",
    "supporting_facts": [["Dusk", 0], ["Ada Berg", 1], ["Dusk", 2]],
    "label": "SUPPORTED",
    "num_hops": 2,
    "hpqa_id": "5a7a",
}


CLAIM_QUESTION = QueryQuestion(
    "a0cf",
    "Is the following claim supported: The painter of Dusk was born in Oslo?",
    ("yes",),
    (Page("Dusk"), Page("Ada Berg")),
)


def test_layouts_of_hover() -> None:
    assert hover.parse(CLAIM) == CLAIM_QUESTION
    assert hover.parse(CLAIM | {"label": "NOT_SUPPORTED"}).answers == ("no",)
    facts = [{"key": title, "value": place} for title, place in CLAIM["supporting_facts"]]
    record = CLAIM | {"id": 7, "supporting_facts": facts, "label": 1}
    assert hover.parse(record) == CLAIM_QUESTION
    assert hover.parse(record | {"label": 0}).answers == ("no",)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"supporting_facts": None}, "supporting facts"),  # the test split
        ({"supporting_facts": [["  ", 0]]}, "title"),
        ({"supporting_facts": ["Dusk"]}, "supporting_facts"),
        ({"supporting_facts": [["Dusk", "0"]]}, "supporting_facts"),
        ({"supporting_facts": [{"value": 1}]}, "supporting_facts"),
        ({"label": None}, "label"),
        ({"label": -1}, "label"),
        ({"label": True}, "label"),
        ({"uid": " "}, "id"),
        ({"claim": "half a pair \ud83d"}, "Unicode"),
    ],
)
def test_unusable_records_of_hover(fields: dict[str, Any], named: str) -> None:
    unusable(hover.parse, CLAIM | fields, named)


# MuSiQue


def paragraph(idx: int, title: str, text: str, supporting: bool) -> dict[str, Any]:
    return {"idx": idx, "title": title, "paragraph_text": text, "is_supporting": supporting}


def step(idx: int | None) -> dict[str, Any]:
    return {"id": 1, "question": "?", "answer": "!", "paragraph_support_idx": idx}


MUSIQUE: dict[str, Any] = {
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


MUSIQUE_SAMPLE = Sample(
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


def test_steps_name_idx_not_position() -> None:
    record = copy.deepcopy(MUSIQUE) | {"question_decomposition": [step(12), step(10)]}
    for each in record["paragraphs"]:
        each["idx"] += 10
        each["is_supporting"] = False  # not looked at where there is a decomposition
    assert musique.parse(record) == MUSIQUE_SAMPLE


@pytest.mark.parametrize("steps", [[], None])
def test_without_decomposition_the_marked_paragraphs_support(steps: list | None) -> None:
    assert musique.parse(MUSIQUE) == MUSIQUE_SAMPLE
    record = copy.deepcopy(MUSIQUE) | {"question_decomposition": steps}
    expected = dataclasses.replace(MUSIQUE_SAMPLE, support=(0, 2))
    assert musique.parse(record) == expected
    del record["question_decomposition"]
    assert musique.parse(record) == expected


def test_real_decomposition_agrees_with_the_marks() -> None:
    for _, record in read_records(real("musique/dev.jsonl.gz")):
        by_marks = musique.parse(record | {"question_decomposition": []})
        sample = musique.parse(record)
        assert dataclasses.replace(sample, support=tuple(sorted(sample.support))) == by_marks


UNMARKED = [paragraph(0, "Norway", "A land.", False)]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"answer": None}, "answer"),
        ({"paragraphs": [{"idx": 0, "title": "T"}]}, "paragraph_text"),
        ({"answerable": False}, "answerable"),
        ({"answerable": "no"}, "answerable"),
        ({"question_decomposition": [step(3)]}, "support index"),
        ({"question_decomposition": [step(-1)]}, "support index"),
        ({"question_decomposition": [step(None)]}, "paragraph_support_idx"),
        ({"question_decomposition": [3]}, "question_decomposition"),
        ({"question_decomposition": [], "paragraphs": UNMARKED}, "supporting facts"),
        ({"paragraphs": []}, "chunks"),
        ({"paragraphs": ["text"]}, "paragraphs"),
        ({"paragraphs": UNMARKED * 2}, "idx"),
        ({"answer_aliases": [1]}, "answer_aliases"),
    ],
)
def test_unusable_records_of_musique(fields: dict[str, Any], named: str) -> None:
    unusable(musique.parse, MUSIQUE | fields, named)


# HotpotQA's layout without a context


OPEN: dict[str, Any] = {
    "_id": "8813",
    "question": "When was the director of Web born?",
    "supporting_facts": [["Web", 1], ["Max Varn", 1], ["Web", 0]],
    "answer": "1925",
}


OPEN_QUESTION = QueryQuestion("8813", OPEN["question"], ("1925",), (Page("Web"), Page("Max Varn")))


def test_gold_pages_are_known_by_title() -> None:
    assert titled_context.parse_open(OPEN) == OPEN_QUESTION
    titles = OPEN | {"supporting_facts": None, "supporting_titles": ["Web", "Max Varn"]}
    assert titled_context.parse_open(titles) == OPEN_QUESTION


def test_the_corpus_that_comes_with_the_data_has_ids() -> None:
    found = titled_context.parse_open(OPEN | {"gold_doc_ids": ["d4", "d0"]})
    assert found.gold == (Page("Web", id="d4"), Page("Max Varn", id="d0"))


def test_real_ids_are_those_of_the_titles() -> None:
    folder = real("2wikimultihopqa")
    corpus = (record for _, record in read_records(folder / "open_corpus.jsonl.gz"))
    titles = {record["_id"]: record["title"] for record in corpus}
    records = [record for _, record in read_records(folder / "open_dev.jsonl.gz")]
    found = [titled_context.parse_open(record) for record in records]
    assert len(found) == 220
    assert all(titles[page.id] == page.title for each in found for page in each.gold)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"supporting_facts": []}, "supporting facts"),
        ({"supporting_facts": [["", 0]]}, "title"),
        ({"gold_doc_ids": ["d4"]}, "gold_doc_ids"),
        ({"gold_doc_ids": [4, 0]}, "gold_doc_ids"),
        ({"answer": None}, "answer"),
    ],
)
def test_unusable_open_records(fields: dict[str, Any], named: str) -> None:
    unusable(titled_context.parse_open, OPEN | fields, named)


# RULER


NEEDLES = [
    "Mr. Fox saw 77123 geese.",
    "One of the special magic numbers for red-fox is: 7712.",
    "It rained.",
    "One of the special magic numbers for red-fox is: 4410.",
    "One of the special magic numbers for red-hen is: 9081.",
]


ASKED = "What are all the special magic numbers for red-fox mentioned in the provided text?"


PREFIX = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)


def split_record(**fields: Any) -> dict[str, Any]:
    return {
        "index": 4,
        "task": "niah_multivalue",
        "input_prefix": PREFIX,
        "sentences": NEEDLES,
        "input_suffix": f"\n{ASKED}",
        "outputs": ["4410", "7712"],
        "query": "red-fox",
        "supporting": [3, 1],
        "length": 40,
    } | fields


def ruler_record(text: str, suffix: str = "", **fields: Any) -> dict[str, Any]:
    prompt = f"{PREFIX}{text}\n{ASKED}{suffix}"
    return {"index": 4, "input": prompt, "outputs": ["4410", "7712"], "length": 40} | fields


def test_sentences_already_split() -> None:
    sample = parse_needles(split_record())
    assert (sample.id, sample.source) == ("niah_multivalue-4", "niah")
    assert sample.question == ASKED
    assert sample.chunks == tuple(NEEDLES)
    assert sample.support == (3, 1)
    assert sample.answers == ("4410", "7712")
    assert parse_needles(split_record(supporting=None)).support == (3, 1)
    begun = split_record(input_suffix=f"\n{ASKED} The special magic numbers for red-fox are")
    assert parse_needles(begun) == sample


def test_rulers_own_prompt() -> None:
    expected = parse_needles(split_record())
    for text in (" ".join(NEEDLES), "\n".join(NEEDLES), "\n\n".join(NEEDLES) + "\n"):
        for suffix in ("", " The special magic numbers for red-fox mentioned in it are", "\n"):
            sample = parse_needles(ruler_record(text, suffix))
            assert (sample.id, sample.question) == ("niah-4", ASKED)
            assert sample.chunks == expected.chunks
            assert sample.support == expected.support
            assert sample.answers == expected.answers
    # A question inside the text is not the one asked; without the instruction all is text.
    text = "Why? " + " ".join(NEEDLES)
    plain = {"index": 4, "input": f"{text}\n{ASKED}", "outputs": ["9081"]}
    assert parse_needles(plain).chunks == ("Why?", *NEEDLES)
    assert parse_needles(plain).support == (5,)


def test_outputs_are_words_of_their_own() -> None:
    text = ["The magic word for a is: calm-sea.", "A calm-sea-bird flew.", "So calm-seas came."]
    record = ruler_record(" ".join(text), outputs=["calm-sea"])
    assert parse_needles(record).support == (0,)


def test_real_needles() -> None:
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
        split = parse_needles(record)
        prompt = record["input_prefix"] + " ".join(record["sentences"]) + record["input_suffix"]
        joined = parse_needles({"index": 1, "input": prompt, "outputs": record["outputs"]})
        assert joined.question == split.question
        assert not joined.chunks[0].startswith(("A special magic", "Some special magic"))
        assert len(joined.support) == len(split.support)
        for one, other in zip(split.support, joined.support, strict=True):
            assert split.chunks[one] in joined.chunks[other]
            alone += split.chunks[one] == joined.chunks[other]
    assert alone >= 0.98 * (60 + 4 * 40)  # the file itself puts one of them after a "Mr."


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"index": 1}, "outputs"),
        ({"index": 1, "outputs": ["1"]}, "input"),
        (split_record(outputs="4410"), "outputs"),
        (split_record(sentences=[]), "chunks"),
        (split_record(sentences=[*NEEDLES, " "]), "chunk"),
        (split_record(input_suffix="\n"), "question"),
        (split_record(supporting=[5]), "support index"),
        (split_record(supporting=[-1]), "support index"),
        (split_record(supporting=["1"]), "supporting"),
        (split_record(supporting=[]), "supporting facts"),
        (split_record(index=None), "index"),
        (ruler_record("It rained."), "output"),
        (ruler_record("x", input="It rained 7712 times."), "question"),
    ],
)
def test_unusable_needles(record: dict[str, Any], named: str) -> None:
    unusable(parse_needles, record, named)
