"""Boolean queries: words, phrases, AND, OR, NOT and parentheses, read into a tree.

    query:      and ("OR" and)*
    and:        neighbours ("AND" neighbours)*
    neighbours: operand operand*
    operand:    "NOT" operand | "(" query ")" | (word | phrase) field?

So NOT binds closest, then AND, then OR. Neighbours without an operator mean AND; `a NOT b` is
`a AND NOT b`. Operators are upper case only: `and` is a word. Other marks are none: `-cat` is the
word cat. A phrase stands in straight or curly quotes. An asterisk behind a letter or a digit ends
the beginning of a word, also in a phrase: `cardio*`. A field in brackets, such as PubMed's [tiab]
or [MeSH Terms], belongs to the word or phrase before it. Passages have one text, so that a field
has no effect and is left out of the tree.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from qrag_jax.errors import InputError

DEEPEST = 50  # NOTs and parentheses within each other; the reader calls itself for each
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
_OPERANDS = (WORD, PHRASE, NOT, OPEN)  # what an operand begins with


class BooleanError(InputError):
    """A query that cannot be read; the message names the place in it."""

    def __init__(self, place: int, what: str) -> None:
        super().__init__(f"the query cannot be read at character {place}: {what}.")


@dataclasses.dataclass(frozen=True)
class Word:
    """A word as it was given; with `*` behind it, all words that begin so."""

    text: str


@dataclasses.dataclass(frozen=True)
class Phrase:
    """Words that follow each other; white space between them is one space."""

    text: str


@dataclasses.dataclass(frozen=True)
class Not:
    """What does not match the operand."""

    node: Node


@dataclasses.dataclass(frozen=True)
class And:
    """What matches all operands, two or more."""

    nodes: tuple[Node, ...]


@dataclasses.dataclass(frozen=True)
class Or:
    """What matches an operand, of two or more."""

    nodes: tuple[Node, ...]


Leaf: TypeAlias = Word | Phrase
Node: TypeAlias = Leaf | Not | And | Or


def parse_boolean(text: str) -> Node:
    """Reads a query; takes time in proportion to its length.

    Raises:
        BooleanError: the query is empty, or has only words and phrases under NOT; an operand, a
            parenthesis, a quotation mark or a bracket is missing; a field or an asterisk is out of
            place; or the query is nested more than `DEEPEST` deep.
    """
    reader = _Reader(text)
    node = reader.either(0)
    if reader.token.kind != END:
        raise reader.error("it belongs to nothing before it")
    if next(sought(node), None) is None:
        raise BooleanError(1, "all words are under NOT; give what to look for, too")
    return node


def sought(node: Node, negated: bool = False) -> Iterator[Leaf]:
    """The words and phrases that are looked for, in order: under no NOT, or an even number.

    Args:
        negated: whether the node itself is under NOT.
    """
    if isinstance(node, Not):
        yield from sought(node.node, not negated)
    elif isinstance(node, And | Or):
        for each in node.nodes:
            yield from sought(each, negated)
    elif not negated:
        yield node


class _Token(NamedTuple):
    """A mark; the kind is one of the above, and an operator's or a parenthesis' own text."""

    kind: str
    text: str
    place: int  # of its first character in the query, from 1


class _Reader:
    """Recursive descent: a method for each line of the grammar above."""

    def __init__(self, text: str) -> None:
        self._tokens = [*_tokens(text), _Token(END, "", len(text) + 1)]
        self._at = 0

    @property
    def token(self) -> _Token:
        """The next mark."""
        return self._tokens[self._at]

    def error(self, what: str) -> BooleanError:
        """What is wrong with the next mark."""
        return BooleanError(self.token.place, f"{self.token.text or self.token.kind!r}, {what}")

    def either(self, depth: int) -> Node:
        nodes = [self._both(depth)]
        while self._takes(OR):
            nodes.append(self._both(depth))
        return nodes[0] if len(nodes) == 1 else Or(tuple(nodes))

    def _both(self, depth: int) -> Node:
        nodes = [self._neighbours(depth)]
        while self._takes(AND):
            nodes.append(self._neighbours(depth))
        return nodes[0] if len(nodes) == 1 else And(tuple(nodes))

    def _neighbours(self, depth: int) -> Node:
        nodes = [self._operand(depth)]
        while self.token.kind in _OPERANDS:
            nodes.append(self._operand(depth))
        return nodes[0] if len(nodes) == 1 else And(tuple(nodes))

    def _operand(self, depth: int) -> Node:
        token = self.token
        if token.kind not in _OPERANDS:
            raise self.error("where a word, a phrase, NOT or a parenthesis is missing")
        if depth >= DEEPEST and token.kind in (NOT, OPEN):
            raise self.error(f"within more than {DEEPEST} NOTs and parentheses")
        self._at += 1
        if token.kind == NOT:
            return Not(self._operand(depth + 1))
        if token.kind == OPEN:
            node = self.either(depth + 1)
            if not self._takes(CLOSE):
                raise self.error(f"where the parenthesis of character {token.place} must be closed")
            return node
        self._takes(FIELD)
        return Word(token.text) if token.kind == WORD else Phrase(token.text)

    def _takes(self, kind: str) -> bool:
        taken = self.token.kind == kind
        self._at += taken
        return taken


def _tokens(text: str) -> Iterator[_Token]:
    """The marks of a query in order; takes time in proportion to its length."""
    for match in _TOKEN.finditer(text):
        kind, place = str(match.lastgroup), match.start() + 1
        said = match[kind]
        if kind == "stray":
            raise BooleanError(place, f"{said} without its other half")
        if kind in (WORD, PHRASE):
            for star in re.finditer(r"\*", said):
                at = star.start()
                if not _is_letter(said[max(at - 1, 0) : at]) or _is_letter(said[at + 1 : at + 2]):
                    where = match.start(kind) + at + 1
                    raise BooleanError(where, "an asterisk ends the beginning of a word: cardio*")
        if kind in (PHRASE, FIELD):
            said = " ".join(said.split())
            if not said:
                raise BooleanError(place, f"a {kind} without words")
        if kind == "parenthesis" or (kind == WORD and said in (AND, OR, NOT)):
            kind = said
        if kind != "space":
            yield _Token(kind, said, place)


def _is_letter(character: str) -> bool:
    combines = character and unicodedata.category(character)[0] == "M"
    return bool(combines) or character.isalnum() or character == "_"
