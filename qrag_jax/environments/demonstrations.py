"""Scripted demonstrations of invented questions, for tiny language models that know nothing.

Reinforcement learning and preferences can only choose among what a model already does. Here it gets
things to choose from, in stated shares: tool calls in a good and in flawed ways (RLVR), four styles
of writing a query (LeReT), five of rewriting one (DeepRetrieval). All of them say only what the
context shows, so a model can learn them all; which one is right cannot be seen. The scripts and
their shares are `examples/worlds/demonstrations.py`.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType

from qrag_jax.data.scripted import world
from qrag_jax.environments.queries import Variant
from qrag_jax.errors import Count, Share

# The whole question at every hop; the name of the first entity at every hop; the question, then the
# question and the first passage that was found; or the name of the first entity, then that of the
# second one, if a passage that was found says it.
QUESTION, ENTITY, PASSAGE, BRIDGE = STYLES = ("question", "entity", "passage", "bridge")


def scripts() -> ModuleType:
    """The code of the demonstrations."""
    return world("demonstrations.py")


@dataclasses.dataclass(frozen=True)
class StylesConfig:
    """Section `styles`: how demonstrated queries are written, in four styles of equal shares."""

    marked: Share = 0.5  # share of demonstrated hops whose prompt has the mark of the style
    # Share of the style bridge among marked hops, because it is the hardest to learn; the other
    # styles share the rest. 0: as much as in the other hops
    marked_bridge: Share = 0.0
    # Share of demonstrations whose names are spelled anew, so that they are copied and not known
    renamed: Share = 0.0
    most_words: Count = 24  # of a query with a passage; the rest of the passage is left out


def style_variants() -> tuple[Variant, ...]:
    """The prompts with the marks of the styles, in the order of `STYLES`."""
    return tuple(Variant(name, mark=f"style: {name}") for name in STYLES)
