"""Reads the questions of query writers: parts of data sets.

Of data sets, HotpotQA, 2WikiMultiHopQA and MuSiQue bring passages; HoVer's claims, and questions in
the layout of the first two that lack a context, do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from qrag_jax.data.dataset_parts import (
    DatasetPart,
    TitledSample,
    parse_parts,
    read_part_as,
    titled_sample,
)
from qrag_jax.data.sample import BadRecord, Page, QueryQuestion
from qrag_jax.data.sources import titled_context
from qrag_jax.data.sources.registry import ReadReport
from qrag_jax.errors import InputError

_KNOWN = "HotpotQA, 2WikiMultiHopQA, MuSiQue or HoVer"


def read_query_questions(text: str) -> tuple[list[QueryQuestion], list[ReadReport]]:
    """The questions of a dataset string, and for each part the report of what was skipped.

    Questions without gold pages are skipped, too.

    Args:
        text: `path,config,split;path,config,split`, see `dataset_parts`. A path may be the file of
            questions without a context.
    """
    found: dict[str, QueryQuestion] = {}
    reports = []
    for part in parse_parts(text):
        questions, report = _read(part)
        reports.append(report)
        for each in questions:
            if each.id in found:
                raise InputError(
                    f"the question {each.id!r} is there twice; name parts of data that do not "
                    "overlap."
                )
            found[each.id] = each
    return [*found.values()], reports


def unseen(train: Sequence[QueryQuestion], dev: Sequence[QueryQuestion]) -> list[QueryQuestion]:
    """The training questions that are not evaluated on, by their text."""
    asked = {each.question for each in dev}
    kept = [each for each in train if each.question not in asked]
    if not kept:
        raise InputError(
            "config.questions.train and config.questions.dev name the same questions, so none is "
            "left to train on; name other parts."
        )
    return kept


def of_titled(given: TitledSample) -> QueryQuestion:
    """A sample as a question; its gold pages are its supporting passages."""
    sample, titles = given
    passages = tuple(Page(title, given.body(place)) for place, title in enumerate(titles))
    gold = tuple(passages[place] for place in sample.support)
    return QueryQuestion(sample.id, sample.question, sample.answers, gold, passages, sample.source)


def _read(part: DatasetPart) -> tuple[list[QueryQuestion], ReadReport]:
    def parse(record: dict[str, Any]) -> tuple[str, QueryQuestion]:
        question = _parsed(record, part.config)
        return question.id, question

    return read_part_as(part, parse, _KNOWN)


def _parsed(record: dict[str, Any], config: str) -> QueryQuestion:
    if config == "hover" or "claim" in record:
        return titled_context.parse_claim(record)
    if record.get("paragraphs") is not None or record.get("context") is not None:
        return of_titled(titled_sample(record, config))
    if "question" in record:
        return dataclasses.replace(titled_context.parse_open(record), source=config)
    raise BadRecord("neither 'question' nor 'claim'")
