"""Scripted demonstrations of query writing: their shares, what they may know, what they find."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import pytest

from qrag_jax.environments.query_writing.prompt import QueryPrompt
from qrag_jax.environments.query_writing.state import ORDERS, Pool, QueryState, grown
from qrag_jax.environments.query_writing.styles import (
    BRIDGE,
    ENTITY,
    PASSAGE,
    QUESTION,
    STYLES,
    Start,
    Style,
    StyledPlay,
    StyledWriter,
    StylesConfig,
    Written,
    draw_renamed,
    draw_style,
    draw_styles,
    style_variants,
)
from qrag_jax.environments.tools.episode import Document
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import load
from tests.environments.query_writing.trying import WorldSearch, world, world_state

QUESTIONS, DRAWS = 40, 4000


@pytest.fixture(scope="module")
def search() -> WorldSearch:
    return WorldSearch(world(QUESTIONS))


def demonstrated(search: WorldSearch, *names: str) -> list[tuple[Written, ...]]:
    """All questions in these styles, one a hop, by the bare prompt."""
    styles = tuple(Style(name, False) for name in names)
    starts = [Start(world_state(each), each, styles) for each in world(QUESTIONS)]
    return StyledPlay(search).play(starts)


def document_of(question: int, place: int) -> Document:
    """A supporting passage of a question, as a corpus may have it."""
    passage = world(QUESTIONS)[question].supporting[place]
    return Document("7", passage.title, f"# {passage.title}\n{passage.text}", True)


def all_gold(hops: Sequence[Written]) -> bool:
    pool = grown(hops[-1].state.pool, hops[-1].found, "hop")
    return set(hops[0].state.pages) <= {each.id for each in pool}


def test_queries_of_each_style_by_hand() -> None:
    question = world(1)[0]
    first, second = question.supporting
    start = world_state(question)
    later = start.after((document_of(0, 0),))
    text = f"{question.question} {first.title} {first.text}"
    wanted = {
        QUESTION: (question.question, question.question),
        ENTITY: (question.entity, question.entity),
        PASSAGE: (question.question, " ".join(text.split()[:24])),
        BRIDGE: (question.entity, question.bridge),
    }
    for style, (one, other) in wanted.items():
        writer = StyledWriter(style)
        assert (writer.query(start, question), writer.query(later, question)) == (one, other)
    assert StyledWriter(PASSAGE, 5).query(later, question) == " ".join(text.split()[:5])
    # A third hop is as the second one.
    third = later.after((*later.pool, document_of(0, 1)))
    assert StyledWriter(BRIDGE).query(third, question) == second.title


def test_the_bridge_is_read_off_the_entitys_own_passage_alone() -> None:
    question, writer = world(1)[0], StyledWriter(BRIDGE)
    own = document_of(0, 0)

    def query(*pool: Document) -> str:
        return writer.query(world_state(question).after(pool), question)

    assert query(document_of(1, 0), own) == question.bridge
    assert query() == query(document_of(1, 0), document_of(0, 1)) == question.entity
    # A passage of the same title that says other things does not say it.
    assert query(own._replace(text=document_of(1, 0).text)) == question.entity
    assert query(own._replace(title="Other")) == question.entity


def test_what_hop_two_sees_is_what_hop_one_found(search: WorldSearch) -> None:
    search.calls.clear()
    played = demonstrated(search, ENTITY, BRIDGE)
    assert [len(call) for call in search.calls] == [QUESTIONS, QUESTIONS]  # one call a hop
    for question, (one, two) in zip(world(QUESTIONS), played, strict=True):
        assert (one.state, one.query) == (world_state(question), question.entity)
        assert [one.found] == search([question.entity])
        assert two.state == one.state.after(one.found)
        assert [two.found] == search([two.query])


def test_a_style_says_only_what_its_state_shows(search: WorldSearch) -> None:
    prompt = QueryPrompt(load("bare_query"))
    for style in STYLES:
        for hops in demonstrated(search, QUESTION, style):
            for each in hops:
                ((_, shown),) = prompt.messages(each.state)
                words = set(shown.lower().replace("?", " ").replace(".", " ").split())
                said = each.query.lower().replace("?", " ").replace(".", " ").split()
                assert set(said) <= words


def test_one_style_finds_both_pages(search: WorldSearch) -> None:
    """The figures that the experiment rests on, on a smaller corpus."""
    shares = {
        style: sum(map(all_gold, demonstrated(search, style, style))) / QUESTIONS
        for style in STYLES
    }
    assert shares[QUESTION] <= 0.05
    assert shares[ENTITY] <= 0.05
    assert 0 < shares[PASSAGE] <= 0.35
    assert shares[BRIDGE] >= 0.97
    # Whatever found the first page.
    assert sum(map(all_gold, demonstrated(search, QUESTION, BRIDGE))) >= 0.95 * QUESTIONS


@pytest.mark.parametrize("order", ORDERS)
def test_a_pool_grows_from_hop_to_hop(search: WorldSearch, order: str) -> None:
    question = world(1)[0]
    styles = tuple(Style(name, False) for name in (QUESTION, BRIDGE, ENTITY))
    start = Start(world_state(question), question, styles)
    ((one, two, three),) = StyledPlay(search, order=order).play([start])
    assert two.state.pool == grown((), one.found, order)
    assert three.state.pool == grown(two.state.pool, two.found, order)
    # So that this can fail: each hop alone finds less than both.
    assert {each.id for each in two.found} < {each.id for each in three.state.pool}


def test_a_search_that_fails_ends_its_demonstration(search: WorldSearch) -> None:
    first, other = world(2)

    def failing(queries: Sequence[str]) -> list[Pool | Failure]:
        found: list[Pool | Failure] = [*search(queries)]
        return [
            Failure("server", "down") if query == first.bridge else each
            for query, each in zip(queries, found, strict=True)
        ]

    styles = (Style(ENTITY, False), Style(BRIDGE, True))
    starts = [Start(world_state(each), each, styles) for each in (first, other)]
    one, two, none = StyledPlay(failing).play([*starts, starts[0]._replace(styles=())])
    assert [each.query for each in one] == [first.entity]
    assert [each.query for each in two] == [other.entity, other.bridge]
    assert none == ()


def test_marks_are_prompts(search: WorldSearch) -> None:
    prompt = QueryPrompt(load("bare_query"), style_variants())
    assert prompt.names == ("bare", *STYLES)
    question = world(1)[0]
    for name in STYLES:
        styles = (Style(name, True), Style(name, False))
        (hops,) = StyledPlay(search).play([Start(world_state(question), question, styles)])
        marked, bare = (prompt.messages(each.state)[-1][1] for each in hops)
        assert marked.startswith(f"style: {name}\n(none yet)\n")
        assert "style:" not in bare
        assert prompt.names[hops[0].state.variant] == name


def test_shares_are_met() -> None:
    config = StylesConfig(question=0.1, entity=0.2, passage=0.3, bridge=0.4, marked=0.7)
    drawn = [draw_style(config, 0, index) for index in range(DRAWS)]
    wanted = config.shares | {"marked": 0.7}
    counts = Counter(each.name for each in drawn)
    counts["marked"] = sum(each.marked for each in drawn)
    for name, share in wanted.items():
        sigma = math.sqrt(DRAWS * share * (1 - share))
        assert abs(counts[name] - DRAWS * share) < 4 * sigma, name
    # A style is marked as often as any other.
    of_bridge = [each.marked for each in drawn if each.name == BRIDGE]
    assert abs(sum(of_bridge) / len(of_bridge) - 0.7) < 4 * math.sqrt(0.21 / len(of_bridge))


def test_the_bridge_has_a_share_of_its_own_behind_marks() -> None:
    config = StylesConfig(0.1, 0.2, 0.3, 0.4, marked=0.6, marked_bridge=0.8)
    drawn = [draw_style(config, 0, index) for index in range(DRAWS)]
    # Of the rest, 0.2, the other styles have what 0.1, 0.2 and 0.3 are of 0.6.
    behind = {QUESTION: 0.2 / 6, ENTITY: 0.4 / 6, PASSAGE: 0.6 / 6, BRIDGE: 0.8}
    for marked, wanted in ((True, behind), (False, config.shares)):
        counts = Counter(each.name for each in drawn if each.marked is marked)
        for name, share in wanted.items():
            sigma = math.sqrt(counts.total() * share * (1 - share))
            assert abs(counts[name] - counts.total() * share) < 4 * sigma, (marked, name)
    same = [draw_style(dataclasses.replace(config, marked_bridge=0.4), 0, n) for n in range(200)]
    assert same == [
        draw_style(dataclasses.replace(config, marked_bridge=0), 0, n) for n in range(200)
    ]
    only = StylesConfig(question=0, entity=0, passage=0, bridge=1, marked=1, marked_bridge=0.5)
    assert {draw_style(only, 3, index) for index in range(50)} == {Style(BRIDGE, True)}


def test_a_demonstration_with_other_names_is_as_true(search: WorldSearch) -> None:
    """What a style says with the new names, it says of a state with the new names."""
    prompt, config = QueryPrompt(load("bare_query")), StylesConfig(renamed=1.0)
    for style in STYLES:
        for number, hops in enumerate(demonstrated(search, QUESTION, style)):
            changed = draw_renamed(config, 0, number, hops)
            assert len(changed) == len(hops)
            for old, new in zip(hops, changed, strict=True):
                assert new.query != old.query
                assert new.state.question != old.state.question
                kept = (new.state.id, new.state.variant, new.state.hop, new.state.pages)
                assert kept == (old.state.id, old.state.variant, old.state.hop, old.state.pages)
                assert [each.id for each in new.found] == [each.id for each in old.found]
                ((_, before),) = prompt.messages(old.state)
                ((_, after),) = prompt.messages(new.state)
                # Words stand for each other one to one, in the prompt and in the query.
                read = [*zip(f"{before} {old.query}".split(), f"{after} {new.query}".split())]
                assert (
                    len({*read}) == len({one for one, _ in read}) == len({two for _, two in read})
                )
            # What one hop found is what the next one shows, with the same names.
            pool = grown(changed[0].state.pool, changed[0].found, "hop")
            assert changed[1].state.pool == pool


def test_names_change_in_their_share_of_demonstrations(search: WorldSearch) -> None:
    hops = demonstrated(search, ENTITY, BRIDGE)[0]
    drawn = [draw_renamed(StylesConfig(renamed=0.3), 0, index, hops) for index in range(400)]
    changed = sum(each != hops for each in drawn)
    assert abs(changed - 120) < 4 * math.sqrt(400 * 0.3 * 0.7)
    assert drawn == [draw_renamed(StylesConfig(renamed=0.3), 0, n, hops) for n in range(400)]
    assert len({each[0].query for each in drawn}) > 100  # other names each time
    assert all(draw_renamed(StylesConfig(), 0, index, hops) == hops for index in range(50))


def test_draws_depend_on_seed_and_index_only() -> None:
    config = StylesConfig()
    several = [draw_style(config, 0, index) for index in range(50)]
    assert several == [draw_style(config, 0, index) for index in range(50)]
    assert several != [draw_style(config, 1, index) for index in range(50)]
    only = StylesConfig(question=0, entity=0, passage=0, bridge=1, marked=0)
    assert {draw_style(only, 3, index) for index in range(50)} == {Style(BRIDGE, False)}


def test_hops_draw_their_styles_apart_or_together() -> None:
    config = StylesConfig()
    pairs = [draw_styles(config, 0, index, 2) for index in range(DRAWS)]
    assert [each[0] for each in pairs] == [draw_style(config, 0, index) for index in range(DRAWS)]
    share = 1 / len(STYLES) ** 2
    sigma = math.sqrt(DRAWS * share * (1 - share))
    counts = Counter((one.name, other.name) for one, other in pairs)
    assert len(counts) == len(STYLES) ** 2
    assert all(abs(count - DRAWS * share) < 4 * sigma for count in counts.values())
    kept = dataclasses.replace(config, mixed=False)
    for index in range(50):
        assert draw_styles(kept, 0, index, 3) == (draw_style(config, 0, index),) * 3


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"bridge": 0.5}, "config.styles.question, entity, passage and bridge sum to 1.25;"),
        ({"entity": math.nan}, "config.styles.entity is nan"),
        ({"entity": -0.25, "bridge": 0.75}, "config.styles.entity is -0.25; it must be at least 0"),
        ({"marked": 1.5}, "config.styles.marked is 1.5; use a share, 0 to 1."),
        ({"marked_bridge": -0.1}, "config.styles.marked_bridge is -0.1; use a share, 0 to 1."),
        ({"renamed": math.nan}, "config.styles.renamed is nan; use a share, 0 to 1."),
        ({"most_words": 0}, "config.styles.most_words is 0; it must be at least 1."),
    ],
)
def test_shares_that_are_refused(given: dict[str, float], told: str) -> None:
    with pytest.raises(InputError) as caught:
        StylesConfig(**given)
    assert str(caught.value).startswith(told)
    assert str(caught.value).count(". ") == 0


def test_a_question_on_two_lines_is_one_query() -> None:
    question = dataclasses.replace(world(1)[0], question="Who\nis it?")
    assert StyledWriter(QUESTION).query(QueryState("q", "", ()), question) == "Who is it?"
