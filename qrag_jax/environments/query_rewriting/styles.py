"""Scripted rewritings of talkative questions, in five styles.

A tiny language model knows nothing, so reinforcement learning can only choose among what it already
does. Here it gets five ways to rewrite a question. All of them say only words that the question
shows, so a model can learn them all; which one finds the gold passage cannot be seen.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from qrag_jax.data.scripted import Draw, TalkativeQuestion
from qrag_jax.data.words import content_words, words_of
from qrag_jax.environments.shares import check_shares, drawn

COPY, NO_STOP_WORDS, SOME_WORDS, ENTITY, WRONG_CLAUSE = STYLES = (
    "copy",
    "no_stop_words",
    "some_words",
    "entity",
    "wrong_clause",
)
KEPT = 0.6  # share of the words that `SOME_WORDS` keeps
_SECTION = "styles"
_STREAM = 14  # of `Draw`; 12 and 13 draw the questions of the two splits


@dataclasses.dataclass(frozen=True)
class RewriteStylesConfig:
    """Section `styles`: shares of the styles of demonstrations, which sum to 1."""

    copy: float = 0.2  # the question as it is
    no_stop_words: float = 0.2  # its words without function words
    some_words: float = 0.2  # a random 60 % of its words, in their order
    entity: float = 0.2  # the name of the entity, and the words by which it is asked about
    wrong_clause: float = 0.2  # the name, and what is said of it, of one clause about somebody else

    def __post_init__(self) -> None:
        check_shares(_SECTION, self, STYLES)

    @property
    def shares(self) -> dict[str, float]:
        """The share of each style, in the order of `STYLES`."""
        return {name: getattr(self, name) for name in STYLES}


class Rewriting(NamedTuple):
    """What is imitated: the query, and the name of its style."""

    style: str
    query: str


def draw_style(config: RewriteStylesConfig, seed: int, index: int) -> str:
    """The style of demonstration `index`, one of `STYLES`; it depends on the arguments only.

    Args:
        config: the shares.
        seed: from 0 to 2^63 - 1.
        index: from 0; the demonstrations of one question have different ones.
    """
    return drawn(config.shares, Draw(seed, _STREAM, index))


def draw_rewriting(
    config: RewriteStylesConfig, seed: int, index: int, question: TalkativeQuestion
) -> Rewriting:
    """Demonstration `index`: the style that `draw_style` gives, and a rewriting in it."""
    draw = Draw(seed, _STREAM, index)
    style = drawn(config.shares, draw)
    return Rewriting(style, rewritten(style, question, draw))


def rewritten(style: str, question: TalkativeQuestion, draw: Draw) -> str:
    """The question rewritten in a style.

    Args:
        style: one of `STYLES`.
        question: what is rewritten.
        draw: chooses the words of `SOME_WORDS` and the clause of `WRONG_CLAUSE`. It must not begin
            with the number that chose the style, as `Draw(seed, stream, index)` anew would.

    Raises:
        ValueError: there is no such style.
    """
    if style == COPY:
        return question.question
    if style == NO_STOP_WORDS:
        return " ".join(content_words(question.question))
    if style == SOME_WORDS:
        return _some_words(question.question, draw)
    if style == ENTITY:
        return f"{question.entity} {question.relation}"
    if style == WRONG_CLAUSE:
        clause = draw.choice(question.clauses)
        return f"{clause.name} {clause.words}"
    raise ValueError(f"there is no style {style!r}; use one of {', '.join(STYLES)}")


def _some_words(text: str, draw: Draw) -> str:
    words = words_of(text)
    kept = draw.shuffled(range(len(words)))[: max(round(KEPT * len(words)), 1)]
    return " ".join(words[place] for place in sorted(kept))
