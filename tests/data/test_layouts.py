"""Records of each data set: its layouts, what is mended, what is unusable, and real ones."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from qrag_jax.data.sample import BadRecord, Page, Sample
from qrag_jax.data.sources import SOURCES, parse_claim, parse_musique, parse_open
from qrag_jax.data.sources import parse_niah as parse_needles

parse_hotpot, parse_two_wiki = SOURCES["hotpotqa"].parse, SOURCES["two_wiki"].parse
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
}
CHUNKS = (
    *("Dusk Dusk is a painting by Ada Berg. It hangs in Bergen.", "Dawn Dawn is a film."),
    *("Ada Berg Ada Berg was a painter. She was born in Oslo.", "Nothing"),
)
TITLES = ("Dusk", "Dawn", "Ada Berg", "Nothing")
ASKS = "Where was the painter of Dusk born?"
# The facts are in the order of the data.
HOTPOT_SAMPLE = Sample("5a7a", ASKS, CHUNKS, (2, 0), ("Oslo",), "hotpotqa", TITLES)


def hotpot(**fields: Any) -> dict[str, Any]:
    return copy.deepcopy(HOTPOT) | fields


def test_other_layouts_of_hotpotqa() -> None:
    supporting = {"title": ["Ada Berg", "Dusk", "Ada Berg"], "sent_id": [1, 0, 0]}
    context = {
        "title": [title for title, _ in HOTPOT["context"]],
        "sentences": [sentences for _, sentences in HOTPOT["context"]],
    }
    hub = HOTPOT | {"id": "5a7a", "supporting_facts": supporting, "context": context}
    titles = HOTPOT | {"supporting_titles": ["Ada Berg", "Dusk"]}
    del hub["_id"], titles["supporting_facts"]
    for record in (HOTPOT, hub, titles):
        assert parse_hotpot(record) == HOTPOT_SAMPLE
    aliases = hotpot(answer_aliases=["Kristiania", "Oslo", " Oslo "])
    assert parse_hotpot(aliases).answers == ("Oslo", "Kristiania")


CLAIM: dict[str, Any] = {
    "uid": "a0cf",
    "claim": " The painter of Dusk was born in Oslo. ",
    "supporting_facts": [["Dusk", 0], ["Ada Berg", 1], ["Dusk", 2]],
    "label": "SUPPORTED",
}
SUPPORTED = "Is the following claim supported: The painter of Dusk was born in Oslo?"
PAGES = (Page("Dusk"), Page("Ada Berg"))
CLAIM_QUESTION = Sample("a0cf", SUPPORTED, (), (), ("yes",), "", pages=PAGES)


def test_layouts_of_hover() -> None:
    assert parse_claim(CLAIM) == CLAIM_QUESTION
    assert parse_claim(CLAIM | {"label": "NOT_SUPPORTED"}).answers == ("no",)
    facts = [{"key": title, "value": place} for title, place in CLAIM["supporting_facts"]]
    record = CLAIM | {"id": 7, "supporting_facts": facts, "label": 1}
    assert parse_claim(record) == CLAIM_QUESTION
    assert parse_claim(record | {"label": 0}).answers == ("no",)


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
    *("2hop__1_2", "What is the capital of the land of Dusk?"),
    ("Norway. Oslo is its capital.", "Sweden. Malmö is a city.", "Dusk. A painting from Norway."),
    *((2, 0), ("Oslo", "Kristiania"), "musique", ("Norway", "Sweden", "Dusk")),
)


def test_steps_name_idx_not_position() -> None:
    record = copy.deepcopy(MUSIQUE) | {"question_decomposition": [step(12), step(10)]}
    for each in record["paragraphs"]:
        each["idx"] += 10
        each["is_supporting"] = False  # not looked at where there is a decomposition
    assert parse_musique(record) == MUSIQUE_SAMPLE


@pytest.mark.parametrize("steps", [[], None])
def test_without_decomposition_the_marked_paragraphs_support(steps: list | None) -> None:
    assert parse_musique(MUSIQUE) == MUSIQUE_SAMPLE
    record = copy.deepcopy(MUSIQUE) | {"question_decomposition": steps}
    expected = dataclasses.replace(MUSIQUE_SAMPLE, support=(0, 2))
    assert parse_musique(record) == expected
    del record["question_decomposition"]
    assert parse_musique(record) == expected


OPEN: dict[str, Any] = {
    "_id": "8813",
    "question": "When was the director of Web born?",
    "supporting_facts": [["Web", 1], ["Max Varn", 1], ["Web", 0]],
    "answer": "1925",
}


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
        "sentences": NEEDLES,
        "input_suffix": f"\n{ASKED}",
        "outputs": ["4410", "7712"],
        "supporting": [3, 1],
    } | fields


def ruler_record(text: str, suffix: str = "", **fields: Any) -> dict[str, Any]:
    prompt = f"{PREFIX}{text}\n{ASKED}{suffix}"
    return {"index": 4, "input": prompt, "outputs": ["4410", "7712"], "length": 40} | fields


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


@pytest.mark.parametrize(
    ("parse", "record", "named"),
    [
        (parse_hotpot, hotpot(supporting_facts=[["Noon", 0]]), "support title"),
        (parse_hotpot, hotpot(supporting_facts=[["Dusk", True]]), "supporting_facts"),
        (parse_hotpot, hotpot(answer=None), "answer"),  # a test split
        (parse_claim, CLAIM | {"supporting_facts": None}, "supporting_facts"),
        (parse_claim, CLAIM | {"label": -1}, "label"),
        (parse_musique, MUSIQUE | {"answerable": False}, "answerable"),
        (parse_musique, MUSIQUE | {"question_decomposition": [step(-1)]}, "support index"),
        (parse_musique, MUSIQUE | {"paragraphs": MUSIQUE["paragraphs"] * 2}, "idx"),
        (parse_open, OPEN | {"gold_doc_ids": ["d4"]}, "gold_doc_ids"),
        (parse_needles, split_record(supporting=[-1]), "support index"),
        (parse_needles, ruler_record("It rained."), "output"),
        (parse_needles, ruler_record("x", input="It rained 7712 times."), "question"),
    ],
)
def test_what_is_unusable_has_its_reason(parse: Any, record: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRecord, match=named):
        parse(record)
