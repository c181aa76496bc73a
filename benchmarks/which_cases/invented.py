"""Invented questions in the files of 2WikiMultihopQA, with their triples; for --quick and tests."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.which_cases.settings import FOLDERS, TWO_WIKI
from qrag_jax.data.generators.bridge_world import BridgeQuestion, bridge_question
from qrag_jax.data.sources import two_wiki


class Sizes(NamedTuple):
    """Numbers of questions; `passages` of each."""

    train: int = 8
    dev: int = 4
    test: int = 6
    passages: int = 6


def write(data: Path, sizes: Sizes, *, without_gold_of: int = 0) -> None:
    """Writes the files of the data set into a folder of `data`.

    Args:
        without_gold_of: the corpus lacks a gold passage of so many test questions, the first ones.
    """
    folder = data / FOLDERS[TWO_WIKI]
    train, dev, test = _questions(sizes)
    names: dict[tuple[str, str], str] = {}
    for question in (*train, *dev, *test):
        for each in question.passages:
            names.setdefault((each.title, each.text), f"{len(names)}")
    lacked = {
        (question.supporting[1].title, question.supporting[1].text)
        for question in test[:without_gold_of]
    }
    corpus = (
        {"_id": name, "title": title, "text": text}
        for (title, text), name in names.items()
        if (title, text) not in lacked
    )
    _lines(folder / "open_corpus.jsonl.gz", corpus)
    for file, questions in (("train", train), ("dev", dev)):
        _lines(folder / f"{file}.jsonl.gz", map(_record, questions))
    _lines(folder / "open_dev.jsonl.gz", (_open(question, names) for question in test))


def _questions(sizes: Sizes) -> tuple[list[BridgeQuestion], ...]:
    """Of three worlds, so that no text is in two parts."""
    return tuple(
        [bridge_question(seed, "train", number, sizes.passages) for number in range(count)]
        for seed, count in enumerate(sizes[:3])
    )


def _record(question: BridgeQuestion) -> dict[str, Any]:
    paragraphs = [(each.title, [each.text]) for each in question.passages]
    record = two_wiki.to_record(
        question.id, question.question, question.answer, paragraphs, sorted(question.chain)
    )
    first, second = question.relations
    triples = [
        [question.entity, first, question.bridge],
        [question.bridge, second, question.answer],
    ]
    return record | {"evidences": triples}


def _open(question: BridgeQuestion, names: dict[tuple[str, str], str]) -> dict[str, Any]:
    record = _record(question)
    del record["context"]
    titles = [title for title, _ in record["supporting_facts"]]
    by_title = {each.title: names[each.title, each.text] for each in question.supporting}
    return record | {"gold_doc_ids": [by_title[title] for title in titles]}


def _lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
