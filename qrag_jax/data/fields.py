"""Typed access to the fields of a record. All raise BadRecord, which names the field."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qrag_jax.data.sample import BadRecord
from qrag_jax.errors import InputError

TEXT, INDEX, ITEMS = "a string", "an integer", "a list"
TEXTS, OBJECTS = "a list of strings", "a list of objects"
_TYPES = {TEXT: str, INDEX: int, ITEMS: list, TEXTS: str, OBJECTS: dict}


def checked(value: Any, kind: str, name: str) -> Any:
    """Returns `value` if it is of a kind, such as `TEXT`."""
    items, of = value if kind in (TEXTS, OBJECTS) else [value], _TYPES[kind]
    fits = isinstance(items, list) and all(isinstance(item, of) for item in items)
    if not fits or isinstance(value, bool):
        raise BadRecord(f"field '{name}' is not {kind}")
    if of is str and not (text := "".join(items)).isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadRecord(f"field '{name}' holds half of a surrogate pair") from None
    return value


def present(record: Mapping[str, Any], *names: str) -> Any:
    """Returns the first value that is not null under `names`, the spellings of one field."""
    for name in names:
        if record.get(name) is not None:
            return record[name]
    raise BadRecord(f"missing field '{names[0]}'")


def get(record: Mapping[str, Any], kind: str, *names: str, default: Any = None) -> Any:
    """The value of a field, which may be missing or null if there is a default."""
    if default is not None and all(record.get(name) is None for name in names):
        return default
    return checked(present(record, *names), kind, names[0])


def identifier(value: Any, name: str) -> str:
    """Returns an id as a text; whole numbers become texts."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not checked(text := str(value) if is_number else value, TEXT, name).strip():
        raise BadRecord(f"field '{name}' is empty")
    return text


def distinct(texts: Sequence[str]) -> tuple[str, ...]:
    """The different texts that are not empty, without white space around them."""
    return tuple(dict.fromkeys(text.strip() for text in texts if text.strip()))


def answers(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The answer and its aliases (`answer_aliases`, optional); "" means that there is no answer."""
    aliases = get(record, TEXTS, "answer_aliases", default=[])
    return distinct([get(record, TEXT, "answer"), *aliases])


def named_columns(text: str, known: Sequence[str], empty: Sequence[str]) -> dict[str, str]:
    """The columns of a flag, such as "id=docid,text=body"; names of `empty` may be empty."""
    named: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        field, equals, name = (word.strip() for word in part.partition("="))
        if field not in known or not equals or not (name or field in empty):
            raise InputError(
                f"--columns has {part!r}; write FIELD=NAME,…, fields being {', '.join(known)}."
            )
        named[field] = name
    return named


@contextlib.contextmanager
def refused(where: str) -> Iterator[None]:
    """Refuses a row for the reason that a check of its fields gives."""
    try:
        yield
    except BadRecord as bad:
        raise InputError(f"{where}: {bad}; mend the row, or leave it out.") from None
