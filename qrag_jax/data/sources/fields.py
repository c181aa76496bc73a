"""Typed access to the fields of a record, and the final checks that all sources share.

All raise BadRecord, which names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from qrag_jax.data.sample import BadRecord, Page, QueryQuestion, Sample

Mend = Callable[[str], None]  # is called with each harmless fault of a record


def ignore(fault: str) -> None:
    """A `Mend` for callers who count no faults."""


def present(record: dict[str, Any], *names: str) -> Any:
    """Returns the first value that is not null under `names`, the spellings of one field."""
    for name in names:
        if record.get(name) is not None:
            return record[name]
    raise BadRecord(f"missing field '{names[0]}'")


def text(value: Any, name: str) -> str:
    """Returns `value` if it is a string; BadRecord naming the field otherwise."""
    if not isinstance(value, str):
        raise BadRecord(f"field '{name}' is not a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRecord(f"field '{name}' holds half of a surrogate pair") from None
    return value


def texts(value: Any, name: str) -> list[str]:
    """Returns `value` if it is a list of strings; BadRecord naming the field otherwise."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadRecord(f"field '{name}' is not a list of strings")
    return value


def items(value: Any, name: str) -> list[Any]:
    """Returns `value` if it is a list; BadRecord naming the field otherwise."""
    if not isinstance(value, list):
        raise BadRecord(f"field '{name}' is not a list")
    return value


def index(value: Any, name: str) -> int:
    """Returns `value` if it is an integer; BadRecord naming the field otherwise."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRecord(f"field '{name}' is not an integer")
    return value


def answers(record: dict[str, Any]) -> tuple[str, ...]:
    """Returns the answer followed by its aliases (`answer_aliases`, optional), distinct.

    An empty string as an answer means that there is no answer.
    """
    answer = text(present(record, "answer"), "answer")
    aliases = texts(record.get("answer_aliases") or [], "answer_aliases")
    return tuple(dict.fromkeys(each.strip() for each in (answer, *aliases) if each.strip()))


def make_sample(
    source: str,
    record_id: str,
    question: str,
    chunks: Sequence[str],
    *,
    support: Iterable[int],
    answer_texts: tuple[str, ...],
    needs_support: bool = True,
) -> Sample:
    """Returns the sample with distinct support, in the order given.

    Args:
        source: the source's name.
        record_id: the record's own id.
        question: kept without the white space around it.
        chunks: passages in document order.
        support: positions in `chunks`; the caller has checked that they are in range.
        answer_texts: as `answers` returns them.
        needs_support: whether empty support is refused.
    """
    question = question.strip()
    distinct = tuple(dict.fromkeys(support))
    _check_question(record_id, question)
    if not all(chunk.strip() for chunk in chunks):
        raise BadRecord("empty chunk")
    if not distinct and needs_support:
        raise BadRecord("no supporting facts")
    _check_unicode((record_id, question, *chunks, *answer_texts))
    return Sample(record_id, question, tuple(chunks), distinct, answer_texts, source=source)


def make_question(
    record_id: str,
    question: str,
    answer_texts: tuple[str, ...],
    *,
    titles: Sequence[str],
    ids: Sequence[str] = (),
) -> QueryQuestion:
    """Returns the question of a record that has no passages, whose gold pages are known by title.

    Args:
        record_id: the record's own id.
        question: kept without the white space around it.
        answer_texts: as `answers` returns them.
        titles: of the gold pages; one that is there twice counts once.
        ids: of the different pages, in their order, in the corpus that comes with the data; ():
            none does.
    """
    question = question.strip()
    pages = tuple(dict.fromkeys(title.strip() for title in titles))
    _check_question(record_id, question)
    if not pages:
        raise BadRecord("no supporting facts")
    if not all(pages):
        raise BadRecord("empty title")
    if ids and len(ids) != len(pages):
        raise BadRecord("gold_doc_ids has not as many ids as there are supporting titles")
    _check_unicode((record_id, question, *pages, *ids, *answer_texts))
    gold = tuple(Page(title, id=name) for title, name in zip(pages, ids or [""] * len(pages)))
    return QueryQuestion(record_id, question, answer_texts, gold)


def _check_question(record_id: str, question: str) -> None:
    if not record_id.strip():
        raise BadRecord("empty id")
    if not question:
        raise BadRecord("empty question")


def _check_unicode(parts: Iterable[str]) -> None:
    try:
        for part in parts:
            part.encode()
    except UnicodeEncodeError:
        raise BadRecord("text is not valid Unicode") from None
