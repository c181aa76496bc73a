"""The settings of the suite which: their parts, files, and what a corpus lacks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.which_cases import settings
from benchmarks.which_cases.invented import Sizes
from benchmarks.which_cases.settings import (
    CHOICE,
    HOTPOTQA,
    PARTS,
    TEST,
    TRAIN,
    TWO_WIKI,
    Setting,
    qrels,
    setting,
)
from qrag_jax.data.config import DataConfig
from qrag_jax.data.dataset_parts import parse_parts, read_part
from qrag_jax.data.files.beir import is_collection, read_documents, read_queries
from qrag_jax.data.loading import load_split
from qrag_jax.data.query_questions import read_query_questions
from qrag_jax.data.sources import hotpotqa
from qrag_jax.errors import InputError
from qrag_jax.retrieval.judged_queries import read_judged_queries
from tests.benchmarks import invented_setting

SIZES = Sizes()


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return invented_setting.make(tmp_path_factory.mktemp("setting"), SIZES)


def test_parts_have_their_questions_and_share_none(given: Setting) -> None:
    assert [len(given.questions[part]) for part in PARTS] == [*SIZES[:3]]
    texts = [asked.text for part in PARTS for asked in given.questions[part]]
    assert len(set(texts)) == len(texts)
    assert given.lacking == dict.fromkeys(PARTS, 0)
    assert not given.repeated
    assert "lacks a gold passage of 0 questions" in given.told


def test_gold_passages_are_those_of_the_corpus(given: Setting) -> None:
    texts = {passage.name: passage.whole for passage in given.corpus}
    assert len(texts) == len(given.corpus)
    for part in PARTS:
        for asked in given.questions[part]:
            assert len(asked.gold) == 2
            assert any(answer in texts[asked.gold[1]] for answer in asked.answers) or any(
                answer in texts[asked.gold[0]] for answer in asked.answers
            )
    assert {*given.questions[TRAIN][0].gold} < {*given.questions[TRAIN][0].own}


def test_it_is_read_again_as_it_was_written(given: Setting, tmp_path: Path) -> None:
    # The data are not needed any more.
    assert setting(TWO_WIKI, tmp_path / "nowhere", given.folder) == given


def test_every_system_reads_the_same_questions(given: Setting) -> None:
    for folder, part in ((given.choosing, CHOICE), (given.testing, TEST)):
        for split, own in (("train", TRAIN), ("dev", part)):
            ids = [asked.id for asked in given.questions[own]]
            config = DataConfig(path=str(folder), sources={"two_wiki": 1.0})
            samples = load_split(config, split, hold_out=False).all
            assert [sample.id for sample in samples] == ids
            text = f"{folder},two_wiki,{split}"
            assert [each.id for each in read_query_questions(text)[0]] == ids
            found = [s for p in parse_parts(text) for s in read_part(p)[0]]
            assert [each.sample.id for each in found] == ids


def test_the_folder_is_a_collection_of_beir(given: Setting) -> None:
    assert is_collection(given.folder)
    assert [d.name for d in read_documents(given.folder)] == [p.name for p in given.corpus]
    queries = read_queries(given.folder)
    for part in PARTS:
        judged = qrels(given, part)
        assert {q: [*docs] for q, docs in judged.items()} == {
            asked.id: [*asked.gold] for asked in given.questions[part]
        }
        assert {*judged} <= {*queries}
        read, _ = read_judged_queries(f"{given.folder},{part}")
        assert [each.text for each in read] == [a.text for a in given.questions[part]]


def test_a_question_whose_gold_passage_the_corpus_lacks_is_counted(tmp_path: Path) -> None:
    given = invented_setting.make(tmp_path, SIZES, without_gold_of=2)
    assert given.lacking[TEST] == 2
    assert len(given.test) == SIZES.test - 2
    assert "lacks a gold passage of 2 questions, which are left out" in given.told


def test_missing_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"2wikimultihopqa is no folder.*QRAG_DATA"):
        setting(TWO_WIKI, tmp_path, tmp_path / "setting")


# ---------------------------------------------------------------- HotpotQA


def record(number: int, text: str = "", **more: Any) -> dict[str, Any]:
    """A question of two gold passages and one that all questions have."""
    paragraphs = [(f"A{number}", ["One."]), ("Shared", ["Both."]), (f"B{number}", ["Two.", "X."])]
    made = hotpotqa.to_record(f"id-{number}", text or f"Who is {number}?", "X", paragraphs, [0, 2])
    return made | more


def write(data: Path, **files: list[dict[str, Any]]) -> None:
    (data / "hotpotqa").mkdir(parents=True)
    for name, records in files.items():
        with gzip.open(data / "hotpotqa" / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(each) + "\n" for each in records)


def by_titles(number: int) -> dict[str, Any]:
    """As the files `…_titles` have it."""
    made = record(number)
    del made["supporting_facts"]
    return made | {"supporting_titles": [f"B{number}", f"A{number}"]}


def test_passages_are_pooled_and_training_questions_are_held_out(tmp_path: Path) -> None:
    spaced = record(4)
    spaced["context"][1][1] = ["Both ."]  # the shared passage, written in another way
    write(
        tmp_path,
        train=[record(n) for n in range(4)],
        train_titles=[by_titles(10), by_titles(11)],
        dev=[spaced],
        dev_titles=[by_titles(12)],
    )
    given = setting(HOTPOTQA, tmp_path, tmp_path / "setting")
    assert len(given.corpus) == 8 * 2 + 1
    assert [len(given.questions[part]) for part in PARTS] == [3, 3, 2]
    train = {asked.id for part in (TRAIN, CHOICE) for asked in given.questions[part]}
    assert train == {f"id-{n}" for n in (0, 1, 2, 3, 10, 11)}
    texts = {passage.name: passage.whole for passage in given.corpus}
    assert {texts[name] for name in given.test[1].gold} == {"A12 One.", "B12 Two. X."}


def test_a_training_question_of_the_test_is_left_out(tmp_path: Path) -> None:
    same = record(12, "Who is 0?")
    train = [record(n) for n in range(3)]
    more = {"train_titles": [by_titles(3)], "dev_titles": [by_titles(13)]}
    write(tmp_path, train=train, dev=[same], **more)
    given = setting(HOTPOTQA, tmp_path, tmp_path / "setting")
    assert given.repeated == 1
    assert sum(len(given.questions[part]) for part in (TRAIN, CHOICE)) == 3
    assert "1 are left out of training, which are in the test" in given.told


def test_two_questions_of_one_id_are_refused(tmp_path: Path) -> None:
    train, more = [record(0)], {"train_titles": [by_titles(3)], "dev_titles": [by_titles(13)]}
    write(tmp_path, train=train, dev=[record(0, "Another?")], **more)
    with pytest.raises(InputError, match=r"two questions have the id 'id-0'"):
        settings.setting(HOTPOTQA, tmp_path, tmp_path / "setting")
