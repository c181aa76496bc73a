"""JSON files that are read strictly: each key once, finite numbers, and errors of one sentence.

The readers of parts take the place that their errors name, such as "file.json, state 3,".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_files
from qrag_jax.runtime.bounded_json import shown

# How values begin that Python writes and JSON does not know.
_PYTHON = re.compile(r"""[bru]?'|[bru]"|\(|[a-zA-Z_.]+\(|(?:True|False|None)\b""")


def load(path: Path) -> Any:
    """The value that a file holds. Text that is Python and no JSON is told, and never evaluated.

    Raises:
        InputError: the file is missing or too large, is not UTF-8 or JSON, has a key twice in one
            object, or a number that is not finite.
    """
    if not path.is_file():
        raise InputError(f"{path} is no file; give the path of a JSON file.")
    try:
        with path.open("rb") as file:
            text = bounded_files.whole(file, path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    try:
        return json.loads(text, object_pairs_hook=_each_once, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        if _PYTHON.match(text, error.pos):
            raise InputError(
                f"{path} is Python from line {error.lineno} column {error.colno} on, and not JSON; "
                "it is not evaluated: write it as JSON."
            ) from None
        raise InputError(
            f"{path} is not JSON ({error.msg} at line {error.lineno} column {error.colno}); mend "
            "it, or write it again."
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON that can be used ({error}); mend it.") from None


def dumps(content: Any) -> str:
    """The text of a file.

    It is ASCII alone, so that half surrogate pairs, which models do write, survive.

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps(content, allow_nan=False) + "\n"


def check_keys(
    place: str, value: Any, needed: Collection[str], optional: Collection[str] = ()
) -> None:
    """Refuses a value that is no object of these keys.

    Raises:
        InputError: it is none, or a key is missing or one too many.
    """
    if not isinstance(value, dict):
        raise InputError(f"{place} is {shown(value)}, no object; write one.")
    if missing := sorted(set(needed) - set(value)):
        raise InputError(
            f"{place} has no key {shown(missing[0])}; write {', '.join(sorted(needed))}."
        )
    if other := sorted(set(value) - {*needed, *optional}):
        raise InputError(
            f"{place} has the key {shown(other[0])}, which is none of "
            f"{', '.join(sorted({*needed, *optional}))}; drop it."
        )


def list_of(place: str, value: Mapping[str, Any], name: str) -> list[Any]:
    """The list under a key; raises InputError if it is none."""
    if not isinstance(value[name], list):
        raise InputError(f"{place} has {name} {shown(value[name])}, no list; write one.")
    return value[name]


def texts_of(place: str, value: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The list of texts under a key; raises InputError if it is none."""
    listed = list_of(place, value, name)
    for each in listed:
        if not isinstance(each, str):
            raise InputError(f"{place} has {shown(each)} in {name}, no text; write texts.")
    return tuple(listed)


def text_of(place: str, value: Mapping[str, Any], name: str) -> str:
    """The text under a key; raises InputError if it is none."""
    if not isinstance(value[name], str):
        raise InputError(f"{place} has {name} {shown(value[name])}, no text; write one.")
    return value[name]


def number_of(place: str, value: Mapping[str, Any], name: str) -> float:
    """The number under a key, as it is written; raises InputError if it is none or not finite."""
    given = value[name]
    if not (type(given) is int or (type(given) is float and math.isfinite(given))):
        raise InputError(f"{place} has {name} {shown(given)}, no finite number; write one.")
    return given


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"it has the key {shown(name)} twice")
            seen.add(name)
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"it has the number {name}")
