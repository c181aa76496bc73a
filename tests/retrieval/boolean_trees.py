"""Boolean trees at random, and as text."""

from __future__ import annotations

import random
from collections.abc import Sequence

from qrag_jax.retrieval.boolean_query import And, Node, Not, Or, Phrase, Word


def random_tree(draw: random.Random, words: Sequence[str], depth: int) -> Node:
    """A tree with operators up to this depth.

    Args:
        words: of leaves, of which phrases have one to three.
    """
    kind = draw.choice(("word", "phrase", "not", "and", "or"))
    if not depth or kind == "word":
        return Word(draw.choice(words))
    if kind == "phrase":
        return Phrase(" ".join(draw.choices(words, k=draw.choice((1, 2, 2, 3)))))
    if kind == "not":
        return Not(random_tree(draw, words, depth - 1))
    nodes = tuple(random_tree(draw, words, depth - 1) for _ in range(draw.choice((2, 2, 3))))
    return Or(nodes) if kind == "or" else And(nodes)


def as_text(node: Node) -> str:
    """A query that is read as this tree."""
    if isinstance(node, Not):
        return f"NOT ({as_text(node.node)})"
    if isinstance(node, And | Or):
        between = " AND " if isinstance(node, And) else " OR "
        return between.join(f"({as_text(each)})" for each in node.nodes)
    return f'"{node.text}"[ti]' if isinstance(node, Phrase) else node.text
