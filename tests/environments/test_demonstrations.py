"""Scripted demonstrations under other names, and after a failed search; queries are pinned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from examples.worlds.demonstrations import Start, Style, draw_renamed, play_styled
from qrag_jax.environments.queries import (
    BRIDGE,
    ENTITY,
    QUESTION,
    QueryPrompt,
    StylesConfig,
    grown,
    style_variants,
)
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import load
from tests.environments.trying import WorldSearch, world, world_state


def starts(count: int, *styles: Style) -> list[Start]:
    return [Start(world_state(each), each, styles) for each in world(count)]


def test_renamed_demonstrations_stay_true() -> None:
    """What a style says with the new names, it says of a state with the new names."""
    prompt, search = QueryPrompt(load("bare_query")), WorldSearch(world(12))
    played = play_styled(search, starts(12, Style(QUESTION, False), Style(BRIDGE, False)))
    for number, hops in enumerate(played):
        changed = draw_renamed(StylesConfig(renamed=1.0), 0, number, hops)
        for old, new in zip(hops, changed, strict=True):
            assert new.query != old.query
            assert new.state.pages == old.state.pages
            ((_, before),) = prompt.messages(old.state)
            ((_, after),) = prompt.messages(new.state)
            # Words stand for each other one to one, in the prompt and in the query.
            read = {*zip(f"{before} {old.query}".split(), f"{after} {new.query}".split())}
            assert len(read) == len({one for one, _ in read}) == len({two for _, two in read})
        # What one hop found is what the next one shows, with the same names.
        assert changed[1].state.pool == grown(changed[0].state.pool, changed[0].found, "hop")


def test_a_search_that_fails_ends_its_demonstration() -> None:
    search, (first, other) = WorldSearch(world(4)), world(2)

    def failing(queries: Sequence[str]) -> list[Any]:
        found = zip(queries, search(queries), strict=True)
        return [Failure("server", "down") if q == first.bridge else pool for q, pool in found]

    one, two = play_styled(failing, starts(2, Style(ENTITY, False), Style(BRIDGE, True)))
    assert [each.query for each in one] == [first.entity]
    assert [each.query for each in two] == [other.entity, other.bridge]
    assert two[1].state.pool == two[0].found
    assert QueryPrompt(load("bare_query"), style_variants()).names[two[1].state.variant] == BRIDGE
