"""Scripted demonstrations of invented questions, for tiny language models that know nothing.

Reinforcement learning and preferences can only choose among what a model already does. Here it gets
things to choose from, in stated shares: tool calls in a good and in flawed ways (RLVR), four styles
of writing a query (LeReT), five of rewriting one (DeepRetrieval). All of them say only what the
context shows, so a model can learn them all; which one is right cannot be seen. These are their
sections of configs; the scripts are `examples/worlds/demonstrations.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from types import ModuleType

from qrag_jax.data.scripted import world
from qrag_jax.environments.queries import Variant
from qrag_jax.errors import Count, InputError, Share, Weight

QUESTION, ENTITY, PASSAGE, BRIDGE = STYLES = ("question", "entity", "passage", "bridge")
REWRITE_STYLES = ("copy", "no_stop_words", "some_words", "entity", "wrong_clause")


def scripts() -> ModuleType:
    """The code of the demonstrations."""
    return world("demonstrations.py")


def _check_shares(section: str, settings: object, names: Iterable[str]) -> None:
    """Refuses shares of one decision that do not sum to 1."""
    *most, last = names
    total = sum(getattr(settings, name) for name in (*most, last))
    if not abs(total - 1) <= 1e-6:
        raise InputError(
            f"config.{section}.{', '.join(most)} and {last} sum to {total:g}; change them so that "
            "they sum to 1."
        )


@dataclasses.dataclass(frozen=True)
class DemonstrationsConfig:
    """Section `demonstrations`: shares of what episodes do. Those of one decision sum to 1."""

    search_entity: Weight = 0.6  # the first query is the first entity's name,
    search_question: Weight = 0.2  # or the question,
    search_relations: Weight = 0.2  # or the words of both relations
    then_bridge: Weight = 0.4  # then the bridge's name with the second relation is searched for,
    then_again: Weight = 0.2  # or the first query once more,
    then_answer: Weight = 0.4  # or nothing
    answer_right: Weight = 0.7  # the answer is what the passage gives for the second relation,
    answer_other: Weight = 0.3  # or another name in it
    cite_right: Weight = 1 / 3  # cited are the supporting passages among those shown,
    cite_all: Weight = 1 / 3  # or all shown,
    cite_none: Weight = 1 / 3  # or none

    def __post_init__(self) -> None:
        for shares in self.decisions.values():
            _check_shares("demonstrations", self, shares)

    @property
    def decisions(self) -> dict[str, dict[str, float]]:
        """The shares by decision: "search", "then", "answer", "cite" → field's name → share."""
        found: dict[str, dict[str, float]] = {}
        for field in dataclasses.fields(self):
            decision = field.name.partition("_")[0]
            found.setdefault(decision, {})[field.name] = getattr(self, field.name)
        return found


@dataclasses.dataclass(frozen=True)
class StylesConfig:
    """Section `styles`: shares of the styles of demonstrations, which sum to 1."""

    question: Weight = 0.25  # the whole question at every hop
    entity: Weight = 0.25  # the name of the first entity at every hop
    passage: Weight = 0.25  # the question; then the question and the first passage that was found
    # The name of the first entity; then that of the second one, if a passage that was found says it
    bridge: Weight = 0.25
    marked: Share = 0.5  # share of demonstrated hops whose prompt has the mark of the style
    # Share of the style bridge among marked hops, because it is the hardest to learn; the other
    # styles share the rest as above. 0: as much as in the other hops
    marked_bridge: Share = 0.0
    # Each hop draws its own style, so that the bare prompt is the mixture in every state; False:
    # a demonstration keeps its first one
    mixed: bool = True
    # Share of demonstrations whose names are spelled anew, so that they are copied and not known
    renamed: Share = 0.0
    most_words: Count = 24  # of a query with a passage; the rest of the passage is left out

    def __post_init__(self) -> None:
        _check_shares("styles", self, STYLES)

    @property
    def shares(self) -> dict[str, float]:
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


def style_variants() -> tuple[Variant, ...]:
    """The prompts with the marks of the styles, in the order of `STYLES`."""
    return tuple(Variant(name, mark=f"style: {name}") for name in STYLES)


@dataclasses.dataclass(frozen=True)
class RewriteStylesConfig:
    """Section `styles`: shares of the styles of demonstrations, which sum to 1."""

    copy: Weight = 0.2  # the question as it is
    no_stop_words: Weight = 0.2  # its words without function words
    some_words: Weight = 0.2  # a random 60 % of its words, in their order
    entity: Weight = 0.2  # the name of the entity, and the words by which it is asked about
    # the name, and what is said of it, of one clause about somebody else
    wrong_clause: Weight = 0.2

    def __post_init__(self) -> None:
        _check_shares("styles", self, REWRITE_STYLES)

    @property
    def shares(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in REWRITE_STYLES}
