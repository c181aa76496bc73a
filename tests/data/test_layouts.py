"""Records of each data set and of data of one's own: layouts, what is mended, what is unusable.

Each source's usual layout goes round in tests/conformance/test_sources.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.reading import load_samples
from qrag_jax.data.sample import BadRecord, Passage, Sample, SubQuestion, taken_apart
from qrag_jax.data.sources import (
    SOURCES,
    Columns,
    parse_claim,
    parse_musique,
    parse_open,
    parse_own,
)
from qrag_jax.data.sources import musique_hops as of_musique
from qrag_jax.data.sources import parse_niah as parse_needles
from qrag_jax.data.sources import two_wiki_hops as of_two_wiki
from qrag_jax.errors import InputError
from qrag_jax.runtime.config_fields import check_value
from tests.support.worlds import record_of, write_lines

parse_hotpot = SOURCES["hotpotqa"].parse
CONTEXT = [("Dusk", ["By Ada.", "  It hangs."]), ("Dawn", ["A film."]), ("Nothing", [])]
HOTPOT = record_of("hotpotqa", "5a7a", " Who? ", "Oslo", CONTEXT, [1, 0])


def test_repeated_facts_and_answers_count_once() -> None:
    facts = [["Dawn", 0], ["Dusk", 1], ["Dawn", 0]]
    aliases = ["Kristiania", "Oslo", " Oslo "]
    assert parse_hotpot(HOTPOT | {"supporting_facts": facts, "answer_aliases": aliases}) == Sample(
        *("5a7a", "Who?", ("Dusk By Ada. It hangs.", "Dawn A film.", "Nothing"), (1, 0)),
        *(("Oslo", "Kristiania"), "hotpotqa", ("Dusk", "Dawn", "Nothing")),
    )


CLAIM: dict[str, Any] = {
    "uid": "a0cf",
    "claim": " The painter of Dusk was born in Oslo. ",
    "supporting_facts": [["Dusk", 0], ["Ada Berg", 1], ["Dusk", 2]],
    "label": "SUPPORTED",
}


def test_layouts_of_hover() -> None:
    facts = [{"key": title, "value": place} for title, place in CLAIM["supporting_facts"]]
    hub = CLAIM | {"id": 7, "supporting_facts": facts, "label": 1}
    supported = "Is the following claim supported: The painter of Dusk was born in Oslo?"
    pages = (Passage(title="Dusk"), Passage(title="Ada Berg"))
    for record, other in ((CLAIM, "NOT_SUPPORTED"), (hub, 0)):
        assert parse_claim(record) == Sample("a0cf", supported, (), (), ("yes",), "", pages=pages)
        assert parse_claim(record | {"label": other}).answers == ("no",)


def step(idx: int | None, question: str = "?", answer: str = "!") -> dict[str, Any]:
    return {"question": question, "answer": answer, "paragraph_support_idx": idx}


PLACES = [("Norway", ["Oslo."]), ("Sweden", ["Malmö."]), ("Dusk", ["Norwegian."])]
MUSIQUE = record_of("musique", "2hop__1_2", "What?", "Oslo", PLACES, [2, 0])


def test_without_steps_the_marked_paragraphs_of_musique_support() -> None:
    assert parse_musique(MUSIQUE).support == (2, 0)
    assert parse_musique(MUSIQUE | {"question_decomposition": None}).support == (0, 2)


SAYS = "One of the special magic numbers for {} is: {}."
NEEDLES = ["Mr. Fox saw 77123 geese.", SAYS.format("red-fox", 7712), "It rained."]
NEEDLES += [SAYS.format("red-fox", 4410), SAYS.format("red-hen", 9081)]
ASKED = "What are all the special magic numbers for red-fox mentioned in the provided text?"
PREFIX = "Some special magic numbers are hidden within the following text. Make sure to "
PREFIX += "memorize it. I will quiz you about the numbers afterwards.\n"
SPLIT = {"index": 4, "sentences": NEEDLES, "input_suffix": f"\n{ASKED}"}
SPLIT |= {"outputs": ["4410", "7712"], "supporting": [3, 1]}


def prompted(text: str, suffix: str = "") -> dict[str, Any]:
    """RULER's own record."""
    return {"index": 4, "input": f"{PREFIX}{text}\n{ASKED}{suffix}", "outputs": ["4410", "7712"]}


def test_prompts_of_ruler_are_taken_apart() -> None:
    expected = dataclasses.replace(parse_needles(SPLIT), id="niah-4", question=ASKED)
    for text, suffix in (
        (" ".join(NEEDLES), " The special magic numbers for red-fox mentioned in it are"),
        ("\n\n".join(NEEDLES) + "\n", "\n"),
    ):
        assert parse_needles(prompted(text, suffix)) == expected
    # A question inside the text is not the one asked; without the instruction all is text.
    text = "Why? " + " ".join(NEEDLES)
    plain = parse_needles({"index": 4, "input": f"{text}\n{ASKED}", "outputs": ["9081"]})
    assert (plain.chunks, plain.support) == (("Why?", *NEEDLES), (5,))


OWN: list[dict[str, Any]] = [
    {"id": "a", "question": "Who?", "chunks": ["Ada is.", "Bo is."], "support": [0]},
    {"id": 7, "question": "Where?", "chunks": ["In Oslo."], "answers": ["Oslo", "Oslo city"]},
    {"question": "When?", "chunks": ["In 1999.", "No."], "support": [1, 0, 1], "answers": "1999"},
]
NAMES = {"question": "query", "chunks": "passages", "support": "gold", "answers": "truth"}


def test_data_of_your_own_need_facts_or_answers(tmp_path: Path) -> None:
    first, second, third = samples = [*map(parse_own, OWN)]
    assert (first.support, first.answers) == ((0,), ())
    assert (second.id, second.support, second.answers) == ("7", (), ("Oslo", "Oslo city"))
    assert (third.support, third.answers) == ((1, 0), ("1999",))
    assert third.id != parse_own(OWN[2] | {"question": "Why?"}).id  # its content decides
    assert parse_own(OWN[2], columns=Columns(support="")).support == ()
    with pytest.raises(BadRecord, match="'support'"):
        parse_own(OWN[1], columns=Columns(answers="truth"))
    renamed = [{NAMES.get(name, name): value for name, value in row.items()} for row in OWN]
    path = write_lines(tmp_path / "r.jsonl", renamed)
    assert load_samples("own", str(path), "train", columns=Columns(**NAMES))[0] == samples


def test_columns_of_your_own() -> None:
    assert Columns.parse("question=query, support=") == Columns(question="query", support="")
    with pytest.raises(InputError, match="--columns has 'questions=query'"):
        Columns.parse("questions=query")
    for fields in ({"question": ""}, {"question": "chunks"}):
        with pytest.raises(InputError, match=r"config\.data\.columns"):
            check_value(Columns, fields, "config.data.columns")


FUNCTION = """
def raises(split):
    yield {"question": "Who?", "chunks": ["a"], "answers": "a"}
    raise KeyError("passages")

def lists(split):
    return [["Who?", ["a"]]]
"""


def test_functions_whose_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTION)
    for name in ("raises", "lists"):
        with pytest.raises(InputError, match=name) as caught:
            load_samples("own", f"{path}:{name}", "train")
        assert "\n" not in str(caught.value)


OPEN = {"_id": "8813", "question": "When?", "answer": "1925", "supporting_facts": [["Web", 1]]}


@pytest.mark.parametrize(
    ("parse", "record", "named"),
    [
        (parse_hotpot, HOTPOT | {"supporting_facts": [["Noon", 0]]}, "support title"),
        (parse_hotpot, HOTPOT | {"answer": None}, "answer"),  # a test split
        (parse_claim, CLAIM | {"label": -1}, "label"),
        (parse_musique, MUSIQUE | {"answerable": False}, "answerable"),
        (parse_musique, MUSIQUE | {"question_decomposition": [step(-1)]}, "support index"),
        (parse_open, OPEN | {"gold_doc_ids": ["d4", "d5"]}, "gold_doc_ids"),
        (parse_needles, prompted("It rained."), "output"),
    ],
)
def test_what_is_unusable_has_its_reason(parse: Any, record: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRecord, match=named):
        parse(record)


# ---------------------------------------------------------------- questions taken apart


def test_steps_of_musique_are_questions_that_need_earlier_answers() -> None:
    last = "which bay is the capital of #2 on, as #1 has it"
    steps = [step(None, "Dusk >> creator", "Ada Berg"), step(None, "#1 >> located in", "Norway")]
    record = {"question_decomposition": [*steps, step(None, last, "the Oslofjord")]}
    final = ("Oslofjord", "Oslo Fjord", "NO")
    found = taken_apart(Sample("", "", answers=final), of_musique(record, final))
    assert found.hops == (
        SubQuestion("What is the creator of Dusk?", ("Ada Berg",)),
        SubQuestion("#1 located in what?", ("Norway",)),
        SubQuestion(last, ("the Oslofjord",)),
    )
    assert [hop.needs for hop in found.hops] == [(), (0,), (0, 1)]
    filled = found.hops[2].filled(["Ada #2", "Norway"])
    assert filled == "which bay is the capital of Norway on, as Ada #2 has it"
    record["question_decomposition"][2]["answer"] = "OSLOFJORD."
    # The aliases of the answer that a text can show: "NO" stands in almost every passage.
    assert of_musique(record, final)[-1].answers == ("OSLOFJORD.", "Oslofjord", "Oslo Fjord")


def test_evidences_of_2wiki_are_a_chain_by_wikidata_id_or_by_order() -> None:
    evidences = [["Dusk", "director", "A. Berg"], ["Ada Berg (actor)", "mother", "Eva Berg"]]
    chain = {"_id": "x", "type": "inference", "answer": "Eva Berg", "evidences": evidences}
    ids = [["Q1", "director", "Q2"], ["Q2", "mother", "Q3"]]
    by_id = chain | {"type": "comparison", "answer": "yes", "evidences_id": ids}
    for record in (by_id, chain | {"evidences_id": []}):
        found = of_two_wiki(record, (record["answer"],))
        assert [hop.needs for hop in found] == [(), (0,)]
        assert found[0].answers == ("A. Berg", "Ada Berg")  # passages may use either
    assert [hop.needs for hop in of_two_wiki(by_id | {"evidences_id": []}, ("yes",))] == [(), ()]
