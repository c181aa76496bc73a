"""MuSiQue-Ans (Trivedi et al., TACL 2022): its files and its record layout."""

from __future__ import annotations

from typing import Any

from qrag_jax.data.sample import BadRecord, Sample
from qrag_jax.data.sources import fields
from qrag_jax.data.sources.fields import Mend, ignore
from qrag_jax.runtime.retriever_config import passage_text

NAME = "musique"
TITLE_SEPARATOR = ". "


def parse(record: dict[str, Any], mend: Mend = ignore) -> Sample:
    """Turns one record into a sample; a chunk is title, `TITLE_SEPARATOR` and text.

    The supporting facts are the paragraphs whose `idx` is named by a step of
    `question_decomposition`. Without a decomposition, they are those marked `is_supporting`.
    """
    answerable = record.get("answerable", True)
    if not isinstance(answerable, bool):
        raise BadRecord("field 'answerable' is not true or false")
    if not answerable:
        raise BadRecord("not answerable")
    record_id = fields.text(fields.present(record, "id"), "id")
    question = fields.text(fields.present(record, "question"), "question")
    paragraphs = _objects(fields.present(record, "paragraphs"), "paragraphs")
    if not paragraphs:
        raise BadRecord("no chunks")
    answers = fields.answers(record)
    chunks = [_chunk(paragraph) for paragraph in paragraphs]
    support = _support(record, paragraphs)
    return fields.make_sample(
        NAME, record_id, question, chunks, support=support, answer_texts=answers
    )


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRecord(f"field '{name}' is not a list of objects")
    return value


def _chunk(paragraph: dict[str, Any]) -> str:
    title = fields.text(fields.present(paragraph, "title"), "title")
    body = fields.text(fields.present(paragraph, "paragraph_text"), "paragraph_text")
    return passage_text(title, body, TITLE_SEPARATOR)


def _support(record: dict[str, Any], paragraphs: list[dict[str, Any]]) -> list[int]:
    """Returns the positions of the supporting paragraphs; `idx` may differ from the position."""
    steps = _objects(record.get("question_decomposition") or [], "question_decomposition")
    if not steps:
        return [
            place
            for place, paragraph in enumerate(paragraphs)
            if paragraph.get("is_supporting") is True
        ]
    position = {
        fields.index(fields.present(paragraph, "idx"), "idx"): place
        for place, paragraph in enumerate(paragraphs)
    }
    if len(position) < len(paragraphs):
        raise BadRecord("two paragraphs have one idx")
    support = []
    for step in steps:
        named = fields.present(step, "paragraph_support_idx")
        place = position.get(fields.index(named, "paragraph_support_idx"))
        if place is None:
            raise BadRecord("support index out of range")
        support.append(place)
    return support
