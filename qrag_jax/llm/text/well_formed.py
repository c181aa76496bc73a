"""Repairs texts with half of a surrogate pair: JSON can hold it (\\ud800), UTF-8 cannot."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """The text with the two halves of each pair joined, and with U+FFFD for each half alone."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
