"""Typed access to the fields of a record, and the final checks that all sources share.

All raise BadRecord, which names the field.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from qrag_jax.data.sample import BadRecord, Page, Sample
from qrag_jax.errors import InputError

Mend = Callable[[str], None]  # is called with each harmless fault of a record


def ignore(fault: str) -> None:
    """A `Mend` for callers who count no faults."""


def present(record: Mapping[str, Any], *names: str) -> Any:
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


def _of_kind(what: str, fits: Callable[[Any], bool]) -> Callable[[Any, str], Any]:
    """A check that returns `value` if it fits, and else raises BadRecord naming the field."""

    def check(value: Any, name: str) -> Any:
        if not fits(value):
            raise BadRecord(f"field '{name}' is not {what}")
        return value

    return check


def _listed(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(each, kind) for each in value)


items = _of_kind("a list", _listed(object))
texts = _of_kind("a list of strings", _listed(str))
objects = _of_kind("a list of objects", _listed(dict))
index = _of_kind("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool))


def identifier(value: Any, name: str) -> str:
    """Returns an id as a text; whole numbers become texts."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    found = text(value, name)
    if not found.strip():
        raise BadRecord(f"field '{name}' is empty")
    return found


def named_columns(text: str, known: Sequence[str], empty: Sequence[str]) -> dict[str, str]:
    """The columns of a flag, such as "id=docid,text=body"; names of `empty` may be empty."""
    named: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        field, equals, name = (word.strip() for word in part.partition("="))
        if field not in known or not equals or not (name or field in empty):
            raise InputError(
                f"--columns has {part!r}; write FIELD=NAME with commas between, FIELD being one of "
                f"{', '.join(known)}."
            )
        named[field] = name
    return named


@contextlib.contextmanager
def refused(where: str, fix: str = "mend the row, or leave it out") -> Iterator[None]:
    """Refuses a row for the reason that a check of its fields gives."""
    try:
        yield
    except BadRecord as bad:
        raise InputError(f"{where}: {bad}; {fix}.") from None


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
    answer_texts: tuple[str, ...],
    *,
    chunks: Sequence[str] = (),
    support: Iterable[int] = (),
    titles: Sequence[str] = (),
    pages: Sequence[Page] = (),
    needs_support: bool = True,
) -> Sample:
    """Returns the sample, stripped of white space around its question and titles.

    Args:
        support: positions in `chunks`, which the caller has checked; one that is there twice
            counts once.
        needs_support: whether it is refused that nothing is gold.
    """
    question = question.strip()
    distinct = tuple(dict.fromkeys(support))
    if not record_id.strip():
        raise BadRecord("empty id")
    if not question:
        raise BadRecord("empty question")
    if not all(chunk.strip() for chunk in chunks):
        raise BadRecord("empty chunk")
    if not distinct and not pages and needs_support:
        raise BadRecord("no supporting facts")
    if not all(page.title for page in pages):
        raise BadRecord("empty title")
    named = (part for page in pages for part in (page.title, page.id))
    try:
        for part in (record_id, question, *chunks, *answer_texts, *named):
            part.encode()
    except UnicodeEncodeError:
        raise BadRecord("text is not valid Unicode") from None
    titles = tuple(title.strip() for title in titles)
    return Sample(
        record_id, question, tuple(chunks), distinct, answer_texts, source, titles, tuple(pages)
    )
