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
from collections.abc import Iterator
from typing import TypeAlias

from qrag_jax.retrieval.boolean_tokens import (
    AND,
    CLOSE,
    END,
    FIELD,
    NOT,
    OPEN,
    OR,
    PHRASE,
    WORD,
    BooleanError,
    Token,
    not_closed,
    tokens,
)

DEEPEST = 50  # NOTs and parentheses within each other; the reader calls itself for each
_OPERANDS = (WORD, PHRASE, NOT, OPEN)  # what an operand begins with


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
    node = reader.query()
    if next(sought(node), None) is None:
        raise BooleanError(
            "the query has only words under NOT, from character 1 on; give what to look for, too."
        )
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


class _Reader:
    """Recursive descent: a method for each line of the grammar above."""

    def __init__(self, text: str) -> None:
        self._tokens = [*tokens(text), Token(END, "", len(text) + 1)]
        self._at = 0

    def query(self) -> Node:
        if self._token.kind == END:
            raise BooleanError("the query is empty at character 1; give a word at least.")
        node = self._either(0)
        self._check_ended()
        return node

    def _either(self, depth: int) -> Node:
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
        while self._token.kind in _OPERANDS:
            nodes.append(self._operand(depth))
        return nodes[0] if len(nodes) == 1 else And(tuple(nodes))

    def _operand(self, depth: int) -> Node:
        token = self._token
        if token.kind not in _OPERANDS:
            raise self._missing_operand()
        if depth >= DEEPEST and token.kind in (NOT, OPEN):
            raise BooleanError(
                f"more than {DEEPEST} NOTs and parentheses are within each other at character "
                f"{token.place}; nest fewer."
            )
        self._at += 1
        if token.kind == NOT:
            return Not(self._operand(depth + 1))
        if token.kind == OPEN:
            node = self._either(depth + 1)
            if self._token.kind == END:
                raise not_closed("parenthesis", token.place)
            if not self._takes(CLOSE):
                self._check_ended()
            return node
        self._takes(FIELD)
        return Word(token.text) if token.kind == WORD else Phrase(token.text)

    @property
    def _token(self) -> Token:
        return self._tokens[self._at]

    def _takes(self, kind: str) -> bool:
        taken = self._token.kind == kind
        self._at += taken
        return taken

    def _missing_operand(self) -> BooleanError:
        token, before = self._token, self._tokens[self._at - 1] if self._at else None
        if before is not None and before.kind in (AND, OR, NOT):
            return BooleanError(
                f"{before.kind} at character {before.place} has no operand behind it; put a word "
                f"there, or leave {before.kind} out."
            )
        if token.kind in (AND, OR):
            return BooleanError(
                f"{token.kind} at character {token.place} has no operand before it; put a word "
                f"there, or leave {token.kind} out."
            )
        if before is not None and token.kind == CLOSE:
            return BooleanError(
                f"the parentheses at character {before.place} hold nothing; put a word there, or "
                "leave them out."
            )
        if before is not None and token.kind == END:
            return not_closed("parenthesis", before.place)
        return self._out_of_place()

    def _check_ended(self) -> None:
        if self._token.kind != END:
            raise self._out_of_place()

    def _out_of_place(self) -> BooleanError:
        """A parenthesis that closes none, or a field: nothing else can be left behind operands."""
        token = self._token
        if token.kind == CLOSE:
            return BooleanError(
                f"the parenthesis at character {token.place} closes none; open it, or leave it out."
            )
        return BooleanError(
            f"the field [{token.text}] at character {token.place} has no word or phrase directly "
            "before it; move it behind one, or leave it out."
        )
