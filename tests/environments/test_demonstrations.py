"""Scripted demonstrations under other names; their queries are pinned."""

from __future__ import annotations

from examples.worlds.demonstrations import Start, Style, draw_renamed, play_styled
from qrag_jax.environments.queries import BRIDGE, QUESTION, QueryPrompt, StylesConfig, grown
from qrag_jax.llm.text.prompts import load
from tests.environments.trying import WorldSearch, world, world_state


def test_renamed_demonstrations_stay_true() -> None:
    """What a style says with the new names, it says of a state with the new names."""
    prompt, search = QueryPrompt(load("bare_query")), WorldSearch(world(12))
    styles = (Style(QUESTION, False), Style(BRIDGE, False))
    played = play_styled(search, [Start(world_state(each), each, styles) for each in world(12)])
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
