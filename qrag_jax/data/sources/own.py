"""Data of your own, in a neutral schema: questions, passages, and what is known of the answer.

A record has
- `question`: a text;
- `chunks`: a list of texts, the passages to choose from, in document order;
- `support`: a list of whole numbers, the places in `chunks` (from 0) of the passages that are
  needed; optional;
- `answers`: a list of texts, or one text: the right answer, then other ways to say it; optional.
  One of `support` and `answers` must be there;
- `id`: a text or a whole number, unique; optional;
- `hops`: the question taken apart, for HARR's scripted agent; optional (`data.decompositions`).

Other names of these fields are set by `Columns`. In a table (CSV) a list is written as JSON in one
cell: `["first passage", "second passage"]`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qrag_jax.data.sample import BadRecord, Sample
from qrag_jax.data.sources import fields
from qrag_jax.data.sources.fields import Mend, ignore
from qrag_jax.errors import InputError
from qrag_jax.runtime import own_code

NAME = "own"
NEEDED = ("question", "chunks")


@dataclasses.dataclass(frozen=True)
class Columns:
    """Section `data.columns`: what the fields of your own data are called."""

    question: str = "question"  # the field with the question, a text
    chunks: str = "chunks"  # with the passages, a list of texts
    support: str = "support"  # with the places of the needed passages, from 0; "": not read
    answers: str = "answers"  # with the right answers, a list of texts or one text; "": not read
    id: str = "id"  # with the record's own id; "": not read. Without one, an id is made

    def __post_init__(self) -> None:
        for field in NEEDED:
            if not getattr(self, field):
                raise InputError(
                    f"config.data.columns.{field} is empty; give the name of the field with the "
                    f"{field}."
                )
        names = list(filter(None, dataclasses.astuple(self)))
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InputError(
                f"config.data.columns has {twice[0]!r} for two fields; give each its own name."
            )

    @classmethod
    def parse(cls, text: str) -> Columns:
        """The columns as a flag has them, such as "question=query,chunks=passages"."""
        known = [field.name for field in dataclasses.fields(cls)]
        given: dict[str, str] = {}
        for part in filter(None, text.split(",")):
            field, equals, name = (word.strip() for word in part.partition("="))
            if field not in known or not equals:
                raise InputError(
                    f"--columns has {part!r}; write FIELD=NAME with commas between, FIELD being "
                    f"one of {', '.join(known)}."
                )
            given[field] = name
        return cls(**given)

    def renamed(self) -> dict[str, str]:
        """Optional fields that were given another name, and that name."""
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        return {
            field: name
            for field, name in dataclasses.asdict(self).items()
            if name and field not in NEEDED and name != usual[field]
        }


USUAL = Columns()


def checked(
    records: Iterator[tuple[str, dict[str, Any]]], columns: Columns
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records as they are.

    The first must have the needed columns, and one at least each column that is renamed.
    """
    needed = {field: getattr(columns, field) for field in NEEDED}
    unseen = columns.renamed()
    first: tuple[str, dict[str, Any]] | None = None
    for where, record in records:
        if first is None:
            first = where, record
            _check_there(needed, *first)
        unseen = {field: name for field, name in unseen.items() if name not in record}
        yield where, record
    if first is not None:
        _check_there(unseen, *first)


def parse(record: dict[str, Any], mend: Mend = ignore, columns: Columns = USUAL) -> Sample:
    """Turns one record into a sample, or raises BadRecord."""
    question = fields.text(fields.present(record, columns.question), columns.question)
    chunks = fields.texts(
        _listed(fields.present(record, columns.chunks), columns.chunks), columns.chunks
    )
    if not chunks:
        raise BadRecord(f"field '{columns.chunks}' has no chunk")
    places = _listed(_value(record, columns.support) or [], columns.support)
    support = [fields.index(each, columns.support) for each in places]
    if not all(0 <= place < len(chunks) for place in support):
        raise BadRecord(f"field '{columns.support}' has an index out of range (they begin at 0)")
    answers = _answers(_value(record, columns.answers), columns.answers)
    if not support and not answers:
        raise BadRecord(
            f"neither '{columns.support or 'support'}' nor '{columns.answers or 'answers'}' says "
            "anything"
        )
    return fields.make_sample(
        NAME,
        record_id(record, columns, question, chunks),
        question,
        chunks,
        support=support,
        answer_texts=answers,
        needs_support=False,
    )


def record_id(
    record: dict[str, Any], columns: Columns, question: str, chunks: Sequence[str]
) -> str:
    """The record's own id, or one made from its content."""
    given = _value(record, columns.id)
    if isinstance(given, int) and not isinstance(given, bool):
        return str(given)
    if given is not None:
        return fields.text(given, columns.id)
    content = json.dumps([question, chunks])  # ASCII: half surrogate pairs are refused later
    return f"own-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def neutral_record(sample: Sample) -> dict[str, Any]:
    """A sample of any source as a record of the schema; what is not known is left out."""
    record: dict[str, Any] = {
        "id": sample.id,
        "question": sample.question,
        "chunks": list(sample.chunks),
    }
    if sample.support:
        record["support"] = list(sample.support)
    if sample.answers:
        joined = [", ".join(sample.answers)]
        record["answers"] = joined if sample.needs_all else list(sample.answers)
    return record


def _check_there(columns: dict[str, str], where: str, record: dict[str, Any]) -> None:
    for field, name in columns.items():
        if name not in record:
            there = ", ".join(map(repr, record)) or "none"
            raise InputError(
                f"{where}: there is no field {name!r} with the {field}, only {there}; name it with "
                f"--config.data.columns.{field}=NAME (validate_data: --columns={field}=NAME)."
            )


def _value(record: dict[str, Any], name: str) -> Any:
    """The value of an optional field; None: it is not there, or not read."""
    return record.get(name) if name else None


def _listed(value: Any, name: str) -> list[Any]:
    """A list, or a text that is one in JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRecord(f'field \'{name}\' is no JSON list, such as ["a", "b"]') from None
    return fields.items(value, name)


def _answers(value: Any, name: str) -> tuple[str, ...]:
    """Distinct answers that are not empty; a text that begins with `[` must be a JSON list."""
    if isinstance(value, str) and not value.lstrip().startswith("["):
        value = [value]
    listed = fields.texts(_listed([] if value is None else value, name), name)
    return tuple(dict.fromkeys(each.strip() for each in listed if each.strip()))


FIELD = "data.path"


def code_records(spec: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs (where, record) of a split; `where` has the number of the record, from 1.

    Args:
        spec: FILE.py:FUNCTION, called with `split`.
    """
    code = own_code.load(spec, FIELD, ("split",))
    name, number = Path(spec.rpartition(":")[0]).name, 0
    try:
        for number, record in enumerate(code.function(split=split), 1):
            if not isinstance(record, dict):
                raise InputError(
                    f"{FIELD} is {spec}, whose record {number} of {split} is {record!r:.60}, no "
                    "dict; give dicts."
                )
            yield f"{name}, {split} record {number}", record
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{FIELD} is {spec}, which failed after record {number} of {split} "
            f"({own_code.told(error)}); mend it."
        ) from error
    if not number:
        raise InputError(f"{FIELD} is {spec}, which has no {split} record; give one at least.")
