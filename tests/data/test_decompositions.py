"""Questions taken apart: MuSiQue's and 2WikiMultiHopQA's records, and the invented world's own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.decompositions import (
    Decomposition,
    SubQuestion,
    of_musique,
    of_puzzle,
    of_two_wiki,
    read,
)
from qrag_jax.data.files.records import read_records
from qrag_jax.data.generators.synthetic import SyntheticConfig, puzzle_at
from qrag_jax.data.sample import BadRecord
from qrag_jax.environments.rag.scripted import named
from qrag_jax.errors import InputError
from tests.data.real_data import real

MUSIQUE: dict[str, Any] = {
    "id": "3hop1__1_2_3",
    "question": "Which bay is the capital of the land of Dusk's painter on?",
    "question_decomposition": [
        {"question": "Dusk >> creator", "answer": "Ada Berg"},
        {"question": "#1 >> located in", "answer": "Norway"},
        {
            "question": "which bay is the capital of #2 on, as #1 has it",
            "answer": "the Oslofjord",
        },
    ],
    "answer": "Oslofjord",
    "answer_aliases": ["Oslo Fjord", "NO"],
}


def without(record: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return copy.deepcopy(record) | changed


def test_musique() -> None:
    found = of_musique(MUSIQUE)
    assert found.hops == (
        SubQuestion("What is the creator of Dusk?", ("Ada Berg",)),
        SubQuestion("#1 located in what?", ("Norway",)),
        SubQuestion("which bay is the capital of #2 on, as #1 has it", ("the Oslofjord",)),
    )
    assert found.answers == ("Oslofjord", "Oslo Fjord", "NO")
    assert [hop.needs for hop in found.hops] == [(), (0,), (0, 1)]
    filled = found.hops[2].filled(["Ada #2", "Norway"])
    assert filled == "which bay is the capital of Norway on, as Ada #2 has it"


def test_the_last_hop_has_the_aliases_of_the_answer_that_a_text_can_show() -> None:
    record = without(MUSIQUE)
    record["question_decomposition"][2]["answer"] = "OSLOFJORD."
    # "NO" stands in almost every passage.
    last = of_musique(record).hops[-1]
    assert last.answers == ("OSLOFJORD.", "Oslofjord", "Oslo Fjord")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"question_decomposition": []}, "no decomposition"),
        ({"question_decomposition": None}, "missing field 'question_decomposition'"),
        ({"question_decomposition": ["?"]}, "'question_decomposition'"),
        ({"question_decomposition": [{"question": "?"}]}, "missing field 'answer'"),
        ({"question_decomposition": [{"question": " ", "answer": "a"}]}, "empty sub-question"),
        ({"question_decomposition": [{"question": "?", "answer": "!"}]}, "without a word"),
        ({"question_decomposition": [{"question": "#1?", "answer": "a"}]}, "a later answer"),
        ({"question_decomposition": [{"question": "#7?", "answer": "a"}]}, "a later answer"),
        ({"answer": "", "answer_aliases": []}, "no answer"),
        ({"answer": None}, "missing field 'answer'"),
    ],
)
def test_a_record_of_musique_that_cannot_be_taken_apart(
    changed: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadRecord, match=reason):
        of_musique(without(MUSIQUE, **changed))


def two_wiki(kind: str, answer: str, *evidences: tuple[str, str, str], ids: Any = ()) -> Any:
    return {
        "_id": "x",
        "type": kind,
        "answer": answer,
        "evidences": [list(triple) for triple in evidences],
        "evidences_id": [list(triple) for triple in ids],
    }


def test_a_chain_by_name() -> None:
    record = two_wiki(
        "compositional",
        "Oslo",
        ("Dusk (film)", "director", "Ada Berg"),
        ("ada berg", "place of birth", "Oslo"),
    )
    record["answer_aliases"] = ["Kristiania"]
    assert of_two_wiki(record) == Decomposition(
        (
            SubQuestion("What is the director of Dusk (film)?", ("Ada Berg",)),
            SubQuestion("What is the place of birth of #1?", ("Oslo", "Kristiania")),
        ),
        ("Oslo", "Kristiania"),
    )


def test_a_chain_by_wikidata_id_or_by_order() -> None:
    evidences = (("Dusk", "director", "A. Berg"), ("Ada Berg (actor)", "mother", "Eva Berg"))
    ids = (("Q1", "director", "Q2"), ("Q2", "mother", "Q3"))
    for record in (
        two_wiki("comparison", "yes", *evidences, ids=ids),
        two_wiki("inference", "Eva Berg", *evidences),
    ):
        found = of_two_wiki(record)
        assert [hop.text for hop in found.hops] == [
            "What is the director of Dusk?",
            "What is the mother of #1?",
        ]
        assert found.hops[0].answers == ("A. Berg", "Ada Berg")  # passages may use either
    unlinked = of_two_wiki(two_wiki("comparison", "yes", *evidences))
    assert unlinked.hops[1].text == "What is the mother of Ada Berg (actor)?"


def test_a_comparison_asks_about_what_the_question_names() -> None:
    record = two_wiki(
        "comparison",
        "Dusk",
        ("Dusk", "country", "Norway"),
        ("Dusk", "country", "Sweden"),
        ("Dawn", "country", "Norway"),
    )
    assert of_two_wiki(record) == Decomposition(
        (
            SubQuestion("What is the country of Dusk?", ("Norway", "Sweden")),
            SubQuestion("What is the country of Dawn?", ("Norway",)),
        ),
        ("Dusk",),
    )


def test_a_bridge_comparison_follows_both_bridges() -> None:
    record = two_wiki(
        "bridge_comparison",
        "Dawn",
        ("Dusk", "director", "Ada Berg"),
        ("Dawn", "director", "Bo Lie"),
        ("Ada Berg", "date of birth", "1 May 1900"),
        ("Bo Lie (director)", "date of birth", "2 May 1900"),
    )
    found = of_two_wiki(record)
    assert [hop.needs for hop in found.hops] == [(), (), (0,), (1,)]
    assert found.hops[1].answers == ("Bo Lie",)
    assert found.answers == ("Dawn",)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"evidences": []}, "no decomposition"),
        ({"evidences": None}, "missing field 'evidences'"),
        ({"evidences": [["a", "b"]]}, "'evidences'"),
        ({"evidences": [["a", "b", 3]]}, "'evidences'"),
        ({"evidences": [["#1 Hit", "director", "a"]]}, "like the place"),
        ({"evidences": [["a", " ", "b"]]}, "subject or relation"),
        ({"evidences": [["a", "b", ""]]}, "without a word"),
        ({"type": None}, "missing field 'type'"),
        ({"answer": ""}, "no answer"),
    ],
)
def test_a_record_of_two_wiki_that_cannot_be_taken_apart(
    changed: dict[str, Any], reason: str
) -> None:
    record = two_wiki("comparison", "yes", ("Dusk", "country", "Norway"))
    with pytest.raises(BadRecord, match=reason):
        of_two_wiki(record | changed)


def test_the_invented_world_leads_to_its_answer() -> None:
    config = SyntheticConfig()
    kinds = set()
    for index in range(300):
        puzzle = puzzle_at(config, "train", index)
        found = of_puzzle(puzzle)
        assert found.answers == (puzzle.answer,)
        for hop, place in zip(found.hops, puzzle.chain, strict=True):
            assert named(hop.answers, [" ".join(puzzle.passages[place].sentences)])
        if puzzle.comparison:
            assert [hop.needs for hop in found.hops] in ([(), ()], [(), (), (0,), (1,)])
        else:
            assert found.hops[-1].answers == (puzzle.answer,)
            assert [hop.needs for hop in found.hops] == [(), (0,), (1,), (2,)][: len(found.hops)]
        kinds.add((puzzle.comparison, len(found.hops)))
    assert kinds == {(False, 2), (False, 3), (False, 4), (True, 2), (True, 4)}


def test_files_are_read_with_what_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    records = [MUSIQUE, MUSIQUE, without(MUSIQUE, id="b", question_decomposition=[])]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found, report = read("musique", [path])
    assert found == {"3hop1__1_2_3": of_musique(MUSIQUE)}
    assert report.skipped == {"duplicate id": 1, "no decomposition": 1}
    assert (report.read, report.kept) == (3, 1)
    path.write_text(json.dumps(records[-1]) + "\n")
    with pytest.raises(InputError, match=r"train\.jsonl:1"):
        read("musique", [path])
    with pytest.raises(InputError, match="'hotpotqa'"):
        read("hotpotqa", [path])


@pytest.mark.parametrize(
    ("source", "name", "count"),
    [
        ("musique", "musique/train.jsonl.gz", 552),
        ("musique", "musique/dev.jsonl.gz", 221),
        ("two_wiki", "2wikimultihopqa/train.jsonl.gz", 276),
        ("two_wiki", "2wikimultihopqa/open_dev.jsonl.gz", 220),
    ],
)
def test_real_records_are_taken_apart_and_their_passages_have_the_answers(
    source: str, name: str, count: int
) -> None:
    found, report = read(source, [real(name)])
    assert (len(found), report.skipped) == (count, {})
    corpus = {}
    if "open" in name:
        passages = read_records(real("2wikimultihopqa/open_corpus.jsonl.gz"))
        corpus = {each["_id"]: f"{each['title']} {each['text']}" for _, each in passages}
    hops = answered = 0
    for _, record in read_records(real(name)):
        texts = supporting(record, corpus)
        for hop in found[record.get("_id") or record["id"]].hops:
            hops += 1
            answered += bool(named(hop.answers, texts))
    assert 0.98 < answered / hops < 1


def supporting(record: dict[str, Any], corpus: dict[str, str]) -> list[str]:
    if "gold_doc_ids" in record:
        return [corpus[name] for name in record["gold_doc_ids"]]
    if "paragraphs" in record:
        gold = {step["paragraph_support_idx"] for step in record["question_decomposition"]}
        chosen = [each for each in record["paragraphs"] if each["idx"] in gold]
        return [f"{each['title']} {each['paragraph_text']}" for each in chosen]
    titles = {title for title, _ in record["supporting_facts"]}
    return [f"{title} {' '.join(text)}" for title, text in record["context"] if title in titles]
