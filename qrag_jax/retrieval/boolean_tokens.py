"""The marks of a Boolean query, one by one: operators, words, phrases, fields and parentheses."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

from qrag_jax.errors import InputError

_QUOTES = '"\u201c\u201d\u201e\u201f'
# Each alternative goes on for one class of characters, so that nothing is read twice.
_TOKEN = re.compile(
    rf"""(?P<space>\s+)
    |(?P<parenthesis>[()])
    |[{_QUOTES}](?P<phrase>[^{_QUOTES}]*)[{_QUOTES}]
    |\[(?P<field>[^\[\]]*)\]
    |(?P<word>[^\s()\[\]{_QUOTES}]+)
    |(?P<stray>.)""",
    re.VERBOSE | re.DOTALL,
)
AND, OR, NOT, OPEN, CLOSE, END = "AND", "OR", "NOT", "(", ")", "end"
WORD, PHRASE, FIELD = "word", "phrase", "field"


class BooleanError(InputError):
    """A query that cannot be read; the message is one sentence that names the place in it."""


class Token(NamedTuple):
    """One mark; the kind is one of the above, and an operator's or a parenthesis' own text."""

    kind: str
    text: str
    place: int  # of its first character in the query, from 1


def tokens(text: str) -> Iterator[Token]:
    """The marks of a query in order, without an `END`; takes time in proportion to its length.

    Raises:
        BooleanError: a quotation mark or a bracket is missing or holds nothing, or an asterisk is
            out of place.
    """
    for match in _TOKEN.finditer(text):
        kind, place = str(match.lastgroup), match.start() + 1
        said = match[kind]
        if kind == "stray":
            raise _stray(said, place)
        if kind in (WORD, PHRASE):
            _check_asterisks(said, match.start(kind))
        if kind in (PHRASE, FIELD):
            said = " ".join(said.split())
            if not said:
                marks = "quotation marks" if kind == PHRASE else "brackets"
                raise BooleanError(
                    f"the {marks} at character {place} hold nothing; put a word there, or leave "
                    "them out."
                )
        if kind == "parenthesis" or (kind == WORD and said in (AND, OR, NOT)):
            kind = said
        if kind != "space":
            yield Token(kind, said, place)


def _check_asterisks(text: str, start: int) -> None:
    """Refuses those that do not end the beginning of a word; `start` is the text's place, from 0"""
    for match in re.finditer(r"\*", text):
        at = match.start()
        before, after = text[max(at - 1, 0) : at], text[at + 1 : at + 2]
        if not _is_letter(before) or _is_letter(after):
            raise BooleanError(
                f"the asterisk at character {start + at + 1} does not stand behind the beginning "
                "of a word; put it there, as in cardio*, or leave it out."
            )


def _is_letter(character: str) -> bool:
    combines = character and unicodedata.category(character)[0] == "M"
    return bool(combines) or character.isalnum() or character == "_"


def _stray(mark: str, place: int) -> BooleanError:
    if mark == "]":
        return BooleanError(
            f"the bracket at character {place} closes none; open it, or leave it out."
        )
    return not_closed("bracket" if mark == "[" else "quotation mark", place)


def not_closed(what: str, place: int) -> BooleanError:
    """The error that something is opened at this character, from 1, and not closed."""
    return BooleanError(f"the {what} at character {place} is not closed; close it.")
