"""Finds a JSON object in a model's text, which may have other text around it."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

_DECODER = json.JSONDecoder()
_MOST_DEEP = 20


def last_object(text: str, names: Collection[str]) -> dict[str, Any] | None:
    """The last JSON object in the text that has all these names; None if there is none.

    Objects inside of other objects do not count. Code fences and words around it do not matter.
    After a few objects that are nested too deep, the rest of the text is not looked at: each of a
    long row of open braces would be tried.
    """
    found, start, deep = None, text.find("{"), 0
    while start >= 0 and deep < _MOST_DEEP:
        end = start + 1
        try:
            value, end = _DECODER.raw_decode(text, start)
        except ValueError:
            value = None
        except RecursionError:
            value, deep = None, deep + 1
        if isinstance(value, dict) and value.keys() >= set(names):
            found = value
        start = text.find("{", end)
    return found


def well_formed(text: str) -> str:
    """The text with the two halves of each pair joined, and with U+FFFD for each half alone."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
