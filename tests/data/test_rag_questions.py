"""Questions of agents: both splits, with and without decompositions, and their own passages."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.config import DataConfig
from qrag_jax.data.generators.synthetic import SyntheticConfig
from qrag_jax.data.rag_questions import RagQuestions, load_questions
from qrag_jax.errors import InputError

MADE = SyntheticConfig(hops=(2, 3, 4), train=30, dev=10)


def synthetic(**fields: Any) -> DataConfig:
    return DataConfig(path="synthetic", synthetic=MADE, sources={"synthetic": 1.0}, **fields)


def load(config: DataConfig, *, taken_apart: bool = True, max_hops: int = 4) -> RagQuestions:
    return load_questions(config, config, taken_apart=taken_apart, max_hops=max_hops)


def test_the_invented_world() -> None:
    found = load(synthetic())
    assert (len(found.train), len(found.dev)) == (30, 10)
    for each in (*found.train, *found.dev):
        assert each.decomposition is not None
        assert each.decomposition.answers == each.sample.answers
        # Every hop's answer stands in a gold passage.
        text = " ".join(each.gold).casefold()
        assert all(hop.answers[0].casefold() in text for hop in each.decomposition.hops)


def test_questions_of_many_hops_are_left_out() -> None:
    found = load(synthetic(), max_hops=2)
    assert 0 < len(found.train) < 30
    assert all(len(each.decomposition.hops) <= 2 for each in found.train if each.decomposition)
    assert any("no decomposition of at most 2 hops" in line for line in found.report)


def test_a_decomposition_is_that_of_its_own_question() -> None:
    """Also where questions before it are left out, as those are that evaluation has, too."""
    world = dataclasses.replace(MADE, train=200, dev=200)
    config = dataclasses.replace(synthetic(), synthetic=world)
    for each in load(config).train:
        assert each.decomposition is not None
        assert each.decomposition.answers == each.sample.answers


def test_passages_are_those_of_all_questions_once() -> None:
    found = load(synthetic(), taken_apart=False)
    passages = found.passages()
    assert len(set(passages)) == len(passages)
    assert {text for each in found.dev for text in each.sample.chunks} <= set(passages)
    assert found.train[0].decomposition is None


def test_files_of_a_data_set(tmp_path: Path) -> None:
    def record(name: str, question: str) -> dict[str, Any]:
        texts = ("Ada was born in Oslo.", "Oslo is in Norway.", "Rome is old.")
        return {
            "id": name,
            "question": question,
            "answer": "Norway",
            "answer_aliases": [],
            "answerable": True,
            "paragraphs": [
                {"idx": i, "title": f"t{i}", "paragraph_text": text, "is_supporting": i < 2}
                for i, text in enumerate(texts)
            ],
            "question_decomposition": [
                {"id": 1, "question": "Where was Ada born?", "answer": "Oslo",
                 "paragraph_support_idx": 0},
                {"id": 2, "question": "Where is #1 ?", "answer": "Norway",
                 "paragraph_support_idx": 1},
            ],
        }  # fmt: skip

    for split in ("train", "dev"):
        with gzip.open(tmp_path / f"{split}.jsonl.gz", "wt") as file:
            file.write(json.dumps(record(f"2hop__{split}", f"{split}: where?")) + "\n")
    found = load(DataConfig(path=str(tmp_path), sources={"musique": 1.0}))
    (question,) = found.dev
    assert question.sample.id == "2hop__dev"
    assert question.decomposition is not None
    assert question.decomposition.hops[1].filled(["Oslo"]) == "Where is Oslo ?"
    assert [text.partition(". ")[2] for text in question.gold] == [
        "Ada was born in Oslo.",
        "Oslo is in Norway.",
    ]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (DataConfig(path="synthetic", sources={"hotpotqa": 1.0}), "'hotpotqa'"),
        (DataConfig(path="synthetic", sources={"musique": 1.0}), "files of their"),
    ],
)
def test_data_without_decompositions(config: DataConfig, told: str) -> None:
    with pytest.raises(InputError, match=told):
        load(config)


def test_no_question_is_left() -> None:
    with pytest.raises(InputError, match="most 1 hop"):
        load(synthetic(), max_hops=1)
