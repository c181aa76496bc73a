"""Texts with half of a surrogate pair, which JSON can say (\\ud800) and nothing can write."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """The text with the two halves of a pair joined, and U+FFFD in the place of a half alone."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
