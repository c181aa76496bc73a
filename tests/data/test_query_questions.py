"""Questions of query writers: what is read from each data set, skipped, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.generators.bridge_world import bridge_question
from qrag_jax.data.query_questions import of_bridge, read_query_questions, unseen
from qrag_jax.data.sample import Page, QueryQuestion
from qrag_jax.data.sources import hotpotqa, musique
from qrag_jax.errors import InputError
from tests.data.real_data import real

PARAGRAPHS = [("J. R. R. Lake", ["It is deep. ", "Old."]), ("Ada Berg", ["She sails."])]
PAGES = (Page("J. R. R. Lake", "It is deep. Old."), Page("Ada Berg", "She sails."))
CLAIM = {
    "uid": "h0",
    "claim": "Ada sails.",
    "supporting_facts": [["Ada Berg", 0]],
    "label": "SUPPORTED",
    "num_hops": 2,
    "hpqa_id": "x",
}
OPEN = {
    "_id": "w0",
    "question": "Who sails?",
    "answer": "Ada",
    "supporting_facts": [["Ada Berg", 0]],
    "gold_doc_ids": ["doc7"],
}


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_passages_and_titles_of_each_data_set(tmp_path: Path) -> None:
    hotpot = hotpotqa.to_record("a", "Where?", "a lake", PARAGRAPHS, [1, 0])
    steps = musique.to_record("b", "Where else?", "a lake", PARAGRAPHS, [1])
    parts = [
        write(tmp_path / "hotpot.jsonl", hotpot),
        write(tmp_path / "musique.jsonl", steps),
        write(tmp_path / "hover.jsonl", CLAIM),
        write(tmp_path / "open.jsonl", OPEN),
    ]
    found, reports = read_query_questions(";".join(f"{path},,dev" for path in parts))
    assert found == [
        QueryQuestion("a", "Where?", ("a lake",), PAGES[::-1], PAGES, "hotpotqa"),
        QueryQuestion("b", "Where else?", ("a lake",), PAGES[1:], PAGES, "musique"),
        QueryQuestion(
            "h0", "Is the following claim supported: Ada sails?", ("yes",), (Page("Ada Berg"),)
        ),
        QueryQuestion("w0", "Who sails?", ("Ada",), (Page("Ada Berg", id="doc7"),)),
    ]
    assert [report.kept for report in reports] == [1, 1, 1, 1]
    assert PAGES[0].whole == "J. R. R. Lake It is deep. Old."


def test_hovers_folder_is_read_by_its_official_names(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("dev", 2)):
        claims = [CLAIM | {"uid": f"{split}{number}"} for number in range(count)]
        file = tmp_path / "hover" / f"hover_{split}_release_v1.1.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(claims), encoding="utf-8")
    for folder in (tmp_path, tmp_path / "hover"):
        found, _ = read_query_questions(f"{folder},hover,train[1:];{folder},hover,validation")
        assert [each.id for each in found] == ["train1", "train2", "dev0", "dev1"]


def test_questions_without_gold_pages_are_skipped_and_counted(tmp_path: Path) -> None:
    none = [CLAIM | {"uid": f"h{number}", "supporting_facts": []} for number in (1, 2)]
    odd = {"uid": "h3"}
    path = write(tmp_path / "hover.jsonl", *none, CLAIM, odd, OPEN | {"supporting_facts": []})
    found, (report,) = read_query_questions(f"{path},,dev")
    assert [each.id for each in found] == ["h0"]
    assert report.skipped == {"no supporting facts": 3, "neither 'question' nor 'claim'": 1}
    assert report.losses() in report.summary()


def test_data_that_cannot_be_used(tmp_path: Path) -> None:
    path = write(tmp_path / "hover.jsonl", CLAIM | {"supporting_facts": []})
    with pytest.raises(InputError, match="usable record among"):
        read_query_questions(f"{path},,dev")
    path.write_text("", encoding="utf-8")
    with pytest.raises(InputError, match=r"hover\.jsonl"):
        read_query_questions(f"{path},,dev")
    with pytest.raises(InputError, match="string is empty"):
        read_query_questions("")
    write(path, CLAIM)
    with pytest.raises(InputError, match="'h0'"):
        read_query_questions(f"{path},,dev;{path},,dev")


def test_questions_of_both_splits_are_evaluated_on_alone() -> None:
    same, other, dev = (QueryQuestion(name, text, (), ()) for name, text in ("aA", "bB", "cA"))
    assert unseen([same, other], [dev]) == [other]
    with pytest.raises(InputError, match=r"config\.questions\.train and config\.questions\.dev"):
        unseen([same], [dev])


def test_gold_pages_of_the_invented_world_are_in_the_order_of_the_hops() -> None:
    for number in range(5):
        made = bridge_question(0, "train", number)
        found = of_bridge(made)
        assert (found.id, found.question, found.answers) == (
            made.id,
            made.question,
            (made.answer,),
        )
        assert [page.title for page in found.gold] == [made.entity, made.bridge]
        assert [page.whole for page in found.passages] == list(made.sample.chunks)
        assert set(found.gold) < set(found.passages)


@pytest.mark.parametrize(
    ("text", "count", "own", "gold"),
    [
        ("hotpotqa,,dev[:20]", 20, 10, 2),
        ("2wikimultihopqa,,train[:20]", 20, 10, 2),
        ("musique,,dev[:20]", 20, 20, 2),
        ("2wikimultihopqa/open_dev.jsonl.gz,,dev", 220, 0, 2),
    ],
)
def test_real_files(text: str, count: int, own: int, gold: int) -> None:
    found, _ = read_query_questions(str(real(text.partition(",")[0])) + text[text.index(",") :])
    assert len(found) == count
    for each in found:
        assert (len(each.passages) > 0) == (own > 0)
        assert len(each.passages) <= own
        assert len(each.gold) >= gold
        assert all(page.title and (page.text or page.id) for page in each.gold)
