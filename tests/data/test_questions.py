"""Questions of query writers and agents, taken apart or with judgements on a corpus."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.config import DataConfig
from qrag_jax.data.loading import Questions, load_questions
from qrag_jax.data.queries import Origin, Query, check_in_corpus
from qrag_jax.data.reading import read_parts, without_asked
from qrag_jax.data.sample import Decomposition, Page, Sample, SubQuestion
from qrag_jax.data.sources import musique_hops as of_musique
from qrag_jax.data.sources import two_wiki_hops as of_two_wiki
from qrag_jax.errors import InputError
from tests.support import worlds
from tests.support.worlds import record_of, write_lines

PARAGRAPHS = [("J. R. R. Lake", ["It is deep. ", "Old."]), ("Ada Berg", ["She sails."])]
PAGES = (Page("J. R. R. Lake", "It is deep. Old."), Page("Ada Berg", "She sails."))
ADA, FACTS = (Page("Ada Berg"),), [["Ada Berg", 0]]
CLAIM = {"uid": "h0", "claim": "Ada sails.", "supporting_facts": FACTS, "label": "SUPPORTED"}
OPEN_RECORD = {"_id": "w0", "question": "Who sails?", "answer": "Ada", "supporting_facts": FACTS}
OPEN_RECORD |= {"gold_doc_ids": ["doc7"]}


def test_passages_and_titles_of_each_data_set(tmp_path: Path) -> None:
    hotpot = record_of("hotpotqa", "a", "Where?", "a lake", PARAGRAPHS, [1, 0])
    steps = record_of("musique", "b", "Where else?", "a lake", PARAGRAPHS, [1])
    parts = [
        write_lines(tmp_path / "hotpot.jsonl", [hotpot]),
        write_lines(tmp_path / "musique.jsonl", [steps]),
        write_lines(tmp_path / "hover.jsonl", [CLAIM]),
        write_lines(tmp_path / "open.jsonl", [OPEN_RECORD]),
    ]
    found, reports = read_parts(";".join(f"{path},,dev" for path in parts), from_corpus=True)
    assert [
        (each.id, each.question, each.answers, each.gold, each.passages, each.source)
        for each in found
    ] == [
        ("a", "Where?", ("a lake",), PAGES[::-1], PAGES, "hotpotqa"),
        ("b", "Where else?", ("a lake",), PAGES[1:], PAGES, "musique"),
        (
            "h0",
            "Is the following claim supported: Ada sails?",
            ("yes",),
            (Page("Ada Berg"),),
            (),
            "",
        ),
        ("w0", "Who sails?", ("Ada",), (Page("Ada Berg", id="doc7"),), (), ""),
    ]
    assert [report.kept for report in reports] == [1, 1, 1, 1]
    assert PAGES[0].whole == "J. R. R. Lake It is deep. Old."


def test_questions_of_both_splits_are_evaluated_on_alone() -> None:
    same, other, dev = (Sample(name, text, (), (), (), "") for name, text in ("aA", "bB", "cA"))
    assert without_asked([same, other], [dev]) == [other]
    with pytest.raises(InputError, match=r"config\.questions\.train"):
        without_asked([same], [dev])


def own(name: str = "chains") -> DataConfig:
    return DataConfig(path=worlds.path_of(name), sources={"own": 1.0})


def load(config: DataConfig, *, taken_apart: bool = True, max_hops: int = 4) -> Questions:
    return load_questions(config, config, taken_apart=taken_apart, max_hops=max_hops)


def test_questions_of_the_invented_world_with_their_decompositions() -> None:
    found = load(own())
    assert (len(found.train), len(found.dev)) == (30, 10)
    # Also where questions before it are left out, as those are that evaluation has, too.
    every = load(own("many_chains")).train
    for each in (*found.train, *found.dev, *every):
        assert each.decomposition.answers == each.answers
        text = " ".join(page.whole for page in each.gold).casefold()
        assert all(hop.answers[0].casefold() in text for hop in each.decomposition.hops)
    few = load(own(), max_hops=2).train
    assert 0 < len(few) < 30
    assert all(len(each.decomposition.hops) <= 2 for each in few if each.decomposition)
    whole = load(own(), taken_apart=False)
    assert whole.train[0].decomposition is None
    passages = whole.passages()  # those of all questions, once
    assert len(set(passages)) == len(passages)
    assert {text for each in whole.dev for text in each.chunks} <= set(passages)


def test_questions_of_files_with_their_decompositions(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        paragraphs = [("Ada", ["Born in Oslo."]), ("Oslo", ["In Norway."]), ("Rome", ["Old."])]
        record = record_of("musique", split, f"{split}: where?", "Norway", paragraphs, [0, 1])
        for step, text in zip(record["question_decomposition"], ("Ada?", "Where is #1 ?")):
            step |= {"question": text, "answer": "Oslo" if text == "Ada?" else "Norway"}
        write_lines(tmp_path / f"{split}.jsonl", [record])
    (question,) = load(DataConfig(path=str(tmp_path), sources={"musique": 1.0})).dev
    assert question.decomposition.hops[1].filled(["Oslo"]) == "Where is Oslo ?"
    assert [page.whole for page in question.gold] == ["Ada Born in Oslo.", "Oslo In Norway."]
    for source, path in (("hotpotqa", "a"), ("musique", "")):  # without decompositions, or files
        with pytest.raises(InputError, match=source):
            load(DataConfig(path=path, sources={source: 1.0}))
    with pytest.raises(InputError, match="max_hops"):
        load(own(), max_hops=1)


ALL = Query("all", "a", (("d1", 1), ("d2", 2)))
SOME = Query("some", "b", (("d2", 1), ("x1", 1)))
NONE = Query("none", "c", (("x1", 1), ("x2", 1)))
KNOWN = {"d1", "d2", "d3"}
FROM = Origin("config.queries.train", "the corpus of data/north", "name another folder")


def test_queries_without_a_document_in_the_corpus_are_dropped_and_counted() -> None:
    found, line = check_in_corpus([ALL, NONE, SOME], KNOWN, FROM, 0.4)
    assert found == [ALL, SOME]  # SOME keeps the judgement that the corpus lacks
    assert all(words in line for words in ("1 of 3 queries", "none", "1 of the 3 documents"))
    # The ids of the judged documents are all that is needed.
    assert "1 of the 2" in check_in_corpus([ALL], frozenset({"d2"}), FROM)[1]
    four = [ALL, SOME, NONE, Query("other", "d", (("x3", 1),))]
    assert check_in_corpus(four, KNOWN, FROM, 0.5)[0] == [ALL, SOME]
    for given, share in ((four, 0.49), ([NONE], 1.0), ([], 1.0)):
        with pytest.raises(InputError, match=r"config\.queries\.train"):
            check_in_corpus(given, KNOWN, FROM, share)


MUSIQUE: dict[str, Any] = {
    "id": "3hop1__1_2_3",
    "question": "Which bay is the capital of the land of Dusk's painter on?",
    "question_decomposition": [
        {"question": "Dusk >> creator", "answer": "Ada Berg"},
        {"question": "#1 >> located in", "answer": "Norway"},
        {"question": "which bay is the capital of #2 on, as #1 has it", "answer": "the Oslofjord"},
    ],
    "answer": "Oslofjord",
    "answer_aliases": ["Oslo Fjord", "NO"],
}


def test_musique() -> None:
    final = ("Oslofjord", "Oslo Fjord", "NO")
    found = Decomposition(of_musique(MUSIQUE, final), final)
    assert found.hops == (
        SubQuestion("What is the creator of Dusk?", ("Ada Berg",)),
        SubQuestion("#1 located in what?", ("Norway",)),
        SubQuestion("which bay is the capital of #2 on, as #1 has it", ("the Oslofjord",)),
    )
    assert [hop.needs for hop in found.hops] == [(), (0,), (0, 1)]
    record = copy.deepcopy(MUSIQUE)
    record["question_decomposition"][2]["answer"] = "OSLOFJORD."
    # The aliases of the answer that a text can show: "NO" stands in almost every passage.
    assert of_musique(record, final)[-1].answers == ("OSLOFJORD.", "Oslofjord", "Oslo Fjord")
    filled = found.hops[2].filled(["Ada #2", "Norway"])
    assert filled == "which bay is the capital of Norway on, as Ada #2 has it"


def two_wiki(kind: str, answer: str, *evidences: tuple[str, str, str], ids: Any = ()) -> Any:
    return {
        "_id": "x",
        "type": kind,
        "answer": answer,
        "evidences": [list(triple) for triple in evidences],
        "evidences_id": [list(triple) for triple in ids],
    }


def test_a_chain_by_wikidata_id_or_by_order() -> None:
    evidences = (("Dusk", "director", "A. Berg"), ("Ada Berg (actor)", "mother", "Eva Berg"))
    ids = (("Q1", "director", "Q2"), ("Q2", "mother", "Q3"))
    by_id = two_wiki("comparison", "yes", *evidences, ids=ids)
    for record in (by_id, two_wiki("inference", "Eva Berg", *evidences)):
        found = of_two_wiki(record, (record["answer"],))
        assert [hop.needs for hop in found] == [(), (0,)]
        assert found[0].answers == ("A. Berg", "Ada Berg")  # passages may use either
    assert [hop.needs for hop in of_two_wiki(by_id | {"evidences_id": []}, ("yes",))] == [(), ()]
