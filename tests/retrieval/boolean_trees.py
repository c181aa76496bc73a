"""Boolean trees at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

from qrag_jax.retrieval.boolean_query import And, Node, Not, Or, Phrase, Word


def random_tree(
    draw: random.Random, words: Sequence[str], depth: int, fields: Sequence[str] = ("",)
) -> Node:
    """A tree with operators up to this depth.

    Args:
        words: of leaves, of which phrases have one to three.
        fields: of which each leaf has one.
    """
    kind = draw.choice(("word", "phrase", "not", "and", "or", "neighbours"))
    if not depth or kind == "word":
        return Word(draw.choice(words), draw.choice(fields))
    if kind == "phrase":
        return Phrase(
            " ".join(draw.choices(words, k=draw.choice((1, 2, 2, 3)))), draw.choice(fields)
        )
    if kind == "not":
        return Not(random_tree(draw, words, depth - 1, fields))
    nodes = tuple(
        random_tree(draw, words, depth - 1, fields) for _ in range(draw.choice((2, 2, 3)))
    )
    return Or(nodes) if kind == "or" else And(nodes, implied=kind == "neighbours")
