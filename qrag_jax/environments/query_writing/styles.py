"""Scripted demonstrations of query writing in the invented world, in four styles.

A tiny language model knows nothing, so preferences can only choose among what it already does. Here
it gets four ways to write a query, all of which can be seen in the context; which one finds what is
missing cannot. Some demonstrations have the mark of their style before the prompt. So the marks do
what few-shot prompts do for large models, and the bare prompt is the mixture.

The passages that a hop shows are those that the scripted queries before it have found. If styles
kept to themselves, these would give the style away: a name finds fewer passages than a question
does, since fewer passages have one of its words. So each hop draws its own style, if not told else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from qrag_jax.data.scripted import BridgeQuestion, Draw, renaming
from qrag_jax.environments.query_writing.prompt import Variant
from qrag_jax.environments.query_writing.state import BY_HOP, Pool, QueryState, grown
from qrag_jax.environments.shares import check_shares, drawn_point, name_at
from qrag_jax.errors import InputError, check_least
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import one_line

QUESTION, ENTITY, PASSAGE, BRIDGE = STYLES = ("question", "entity", "passage", "bridge")
_SECTION = "styles"
_STREAM = 3  # of `Draw`; 0 and 1 draw the questions of the two splits, 2 draws demonstrations
_RENAMING_STREAM = 5  # 4 draws few-shot prompts

# Queries → what each finds, best first.
Search = Callable[[Sequence[str]], Sequence[Pool | Failure]]


@dataclasses.dataclass(frozen=True)
class StylesConfig:
    """Section `styles`: shares of the styles of demonstrations, which sum to 1."""

    question: float = 0.25  # the whole question at every hop
    entity: float = 0.25  # the name of the first entity at every hop
    passage: float = 0.25  # the question; then the question and the first passage that was found
    # The name of the first entity; then that of the second one, if a passage that was found says it
    bridge: float = 0.25
    marked: float = 0.5  # share of demonstrated hops whose prompt has the mark of the style
    # Share of the style bridge among marked hops, because it is the hardest to learn; the other
    # styles share the rest as above. 0: as much as in the other hops
    marked_bridge: float = 0.0
    # Each hop draws its own style, so that the bare prompt is the mixture in every state; False:
    # a demonstration keeps its first one
    mixed: bool = True
    # Share of demonstrations whose names are spelled anew, so that they are copied and not known
    renamed: float = 0.0
    most_words: int = 24  # of a query with a passage; the rest of the passage is left out

    def __post_init__(self) -> None:
        check_shares(_SECTION, self, STYLES)
        check_least(_SECTION, self, most_words=1)
        for name in ("marked", "marked_bridge", "renamed"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise InputError(f"config.{_SECTION}.{name} is {share}; use a share, 0 to 1.")

    @property
    def shares(self) -> dict[str, float]:
        """The share of each style, in the order of `STYLES`."""
        return {name: getattr(self, name) for name in STYLES}

    @property
    def marked_shares(self) -> dict[str, float]:
        """The share of each style among marked hops, in the order of `STYLES`."""
        others = 1 - self.bridge
        if not (self.marked_bridge and others):
            return self.shares
        scale = (1 - self.marked_bridge) / others
        scaled = {name: share * scale for name, share in self.shares.items()}
        return scaled | {BRIDGE: self.marked_bridge}


class Style(NamedTuple):
    """How a hop is written: the style's name, and whether the prompt has the style's mark."""

    name: str
    marked: bool

    @property
    def variant(self) -> int:
        """The number of its prompt, where `style_variants` are the variants."""
        return STYLES.index(self.name) + 1 if self.marked else 0


def style_variants() -> tuple[Variant, ...]:
    """The prompts with the marks of the styles, in the order of `STYLES`."""
    return tuple(Variant(name, mark=f"style: {name}") for name in STYLES)


def draw_styles(config: StylesConfig, seed: int, index: int, hops: int) -> tuple[Style, ...]:
    """The style of each hop of demonstration `index`; they depend on the arguments only.

    Args:
        config: the shares.
        seed: from 0 to 2^63 - 1.
        index: from 0; the demonstrations of one question have different ones.
        hops: how many.
    """
    draw = Draw(seed, _STREAM, index)
    styles = [_drawn(config, draw) for _ in range(hops if config.mixed else 1)]
    return tuple(styles) if config.mixed else (styles[0],) * hops


def draw_style(config: StylesConfig, seed: int, index: int) -> Style:
    """The style of the first hop of demonstration `index`; see `draw_styles`."""
    return draw_styles(config, seed, index, 1)[0]


def _drawn(config: StylesConfig, draw: Draw) -> Style:
    point, marked = drawn_point(draw), draw.chance(config.marked)
    return Style(name_at(config.marked_shares if marked else config.shares, point), marked)


@dataclasses.dataclass(frozen=True, slots=True)
class StyledWriter:
    """Writes queries in one style.

    Attributes:
        style: one of `STYLES`.
        most_words: see `StylesConfig`.
    """

    style: str
    most_words: int = StylesConfig.most_words

    def query(self, state: QueryState, question: BridgeQuestion) -> str:
        """The query of a state of this question; it says only what the state shows."""
        if self.style == QUESTION or (self.style == PASSAGE and not state.pool):
            return one_line(question.question)
        if self.style == PASSAGE:
            words = f"{question.question} {state.pool[0].text}".split()
            # A document begins with a heading, whose mark is no word.
            return " ".join([each for each in words if each != "#"][: self.most_words])
        if self.style == BRIDGE and state.hop > 1:
            return self._bridge(state, question)
        return question.entity

    def _bridge(self, state: QueryState, question: BridgeQuestion) -> str:
        """The bridge entity as the first entity's passage says it, if that was found."""
        first, _ = question.supporting
        for each in state.pool:
            # Ids differ from corpus to corpus. Another question may have a passage of this title.
            if each.title == first.title and first.text in each.text:
                return first.said[0]
        return question.entity


class Start(NamedTuple):
    """A demonstration to play.

    Attributes:
        state: of the first hop.
        question: the same question, with all that a script knows of it.
        styles: of its hops, as many as are played.
    """

    state: QueryState
    question: BridgeQuestion
    styles: tuple[Style, ...]


class Written(NamedTuple):
    """One hop to imitate.

    Attributes:
        state: what the query was written for, with the number of its prompt.
        query: what is imitated.
        found: what it found.
    """

    state: QueryState
    query: str
    found: Pool


@dataclasses.dataclass(frozen=True)
class StyledPlay:
    """Plays demonstrations side by side, hop by hop, with one call of the search for each hop.

    Attributes:
        search: queries → what each finds.
        order: of the pool, one of `state.ORDERS`.
        most_words: see `StylesConfig`.
    """

    search: Search
    order: str = BY_HOP
    most_words: int = StylesConfig.most_words

    def play(self, starts: Sequence[Start]) -> list[tuple[Written, ...]]:
        """The hops of each demonstration, in the places of their starts.

        A search that fails ends its demonstration with the hop before, so it has fewer hops than
        styles.
        """
        played: list[list[Written]] = [[] for _ in starts]
        going = dict(enumerate(starts))
        while going := {place: each for place, each in going.items() if each.styles}:
            queries = [self._query(each) for each in going.values()]
            replies = self.search(queries)
            asked = zip([*going.items()], queries, replies, strict=True)
            for (place, each), query, found in asked:
                if isinstance(found, Failure):
                    del going[place]
                    continue
                state, (style, *left) = each.state, each.styles
                played[place].append(Written(state.asked_by(style.variant), query, found))
                after = state.after(grown(state.pool, found, self.order))
                going[place] = each._replace(state=after, styles=tuple(left))
        return [tuple(hops) for hops in played]

    def _query(self, start: Start) -> str:
        writer = StyledWriter(start.styles[0].name, self.most_words)
        return writer.query(start.state, start.question)


def draw_renamed(
    config: StylesConfig, seed: int, index: int, hops: Sequence[Written]
) -> tuple[Written, ...]:
    """The hops of demonstration `index`, in its share of cases with names spelled anew.

    The question, the passages and the queries have the same new names; ids stay.
    """
    draw = Draw(seed, _RENAMING_STREAM, index)
    if not draw.chance(config.renamed):
        return tuple(hops)
    new = renaming(draw)

    def pool(given: Pool) -> Pool:
        return tuple(each._replace(title=new(each.title), text=new(each.text)) for each in given)

    def state(given: QueryState) -> QueryState:
        question = new(given.question)
        return dataclasses.replace(given, question=question, pool=pool(given.pool))

    return tuple(Written(state(hop.state), new(hop.query), pool(hop.found)) for hop in hops)
