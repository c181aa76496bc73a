"""Scripted demonstrations: shares are met, nothing is known that was not shown, what they find."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest

from qrag_jax.data.generators.bridge_world import BridgeQuestion, bridge_question
from qrag_jax.data.generators.dropped_words import FUNCTION_WORDS, words_of
from qrag_jax.data.generators.invented_names import Draw
from qrag_jax.data.generators.talkative import TalkativeQuestion, talkative_question
from qrag_jax.environments.query_rewriting.styles import (
    COPY,
    NO_STOP_WORDS,
    SOME_WORDS,
    WRONG_CLAUSE,
    RewriteStylesConfig,
    draw_rewriting,
    rewritten,
)
from qrag_jax.environments.query_rewriting.styles import (
    ENTITY as ENTITY_WORDS,
)
from qrag_jax.environments.query_rewriting.styles import (
    STYLES as REWRITE_STYLES,
)
from qrag_jax.environments.query_rewriting.styles import (
    draw_style as draw_rewrite_style,
)
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
from qrag_jax.environments.shares import drawn
from qrag_jax.environments.tools.demonstrations import (
    EXPERT,
    Choices,
    Demonstration,
    DemonstrationsConfig,
    draw_choices,
)
from qrag_jax.environments.tools.documents import bridge_task
from qrag_jax.environments.tools.episode import Document
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import load
from qrag_jax.llm.text.tool_calls import FORMATS, HERMES, ToolCall, read_calls
from qrag_jax.retrieval.own_documents import Wanted, own_retriever
from tests.environments.query_writing.trying import WorldSearch, world, world_state

DRAWS, STREAM, TASKS, QUESTIONS = 3000, 99, 100, 40


def near(count: int, draws: int, share: float, name: Any = "") -> None:
    """A count is within four standard deviations of its share."""
    assert abs(count - draws * share) < 4 * math.sqrt(draws * share * (1 - share)), name


def test_names_are_drawn_by_their_shares() -> None:
    shares = {"a": 0.5, "none": 0.0, "b": 0.3, "c": 0.2, "last": 0.0}
    counts = Counter(drawn(shares, Draw(0, STREAM, index)) for index in range(DRAWS))
    assert counts.keys() == {"a", "b", "c"}
    for name in counts:
        near(counts[name], DRAWS, shares[name], name)
    draw, other = Draw(0, 99, 0), Draw(0, 99, 0)
    drawn({"a": 0.5, "b": 0.5}, draw)  # takes one number
    other.below(2)
    assert [draw.below(1000) for _ in range(5)] == [other.below(1000) for _ in range(5)]


@pytest.mark.parametrize(
    ("config", "given", "named"),
    [
        (DemonstrationsConfig, {"search_entity": 0.5}, "search_entity"),
        (DemonstrationsConfig, {"then_bridge": -0.2, "then_again": 0.8}, "then_bridge"),
        (RewriteStylesConfig, {"entity": 0.5}, "entity"),
        (RewriteStylesConfig, {"copy": math.nan}, "copy"),
        (StylesConfig, {"bridge": 0.5}, "bridge"),
        (StylesConfig, {"entity": -0.25, "bridge": 0.75}, "entity"),
        (StylesConfig, {"marked": 1.5}, "marked"),
        (StylesConfig, {"marked_bridge": -0.1}, "marked_bridge"),
        (StylesConfig, {"renamed": math.nan}, "renamed"),
    ],
)
def test_shares_that_are_refused(config: Any, given: dict[str, float], named: str) -> None:
    with pytest.raises(InputError, match=rf"config\..*{named}"):
        config(**given)


# With tools


Best = Callable[[str], list[str]]


class Acted(NamedTuple):
    """An episode: its queries, the ids of what each found, and the arguments of `complete`."""

    queries: list[str]
    found: list[list[str]]
    end: dict[str, Any]


@pytest.fixture(scope="module")
def questions() -> list[BridgeQuestion]:
    return [bridge_question(0, "train", i) for i in range(TASKS)]


@pytest.fixture(scope="module")
def searches(questions: list[BridgeQuestion]) -> list[Best]:
    """For each question, the search that gives the id of its best document."""

    retriever = own_retriever("bm25")

    def search_in(question: BridgeQuestion) -> Best:
        documents = bridge_task(question).documents

        def search(query: str) -> list[str]:
            (found,) = retriever.find([Wanted(query, 1, documents)])
            assert not isinstance(found, Failure)
            return [document.id for document in found]

        return search

    return [search_in(question) for question in questions]


def acted(demonstration: Demonstration, search: Best) -> Acted:
    texts = {
        document.id: document.text for document in bridge_task(demonstration.question).documents
    }
    queries: list[str] = []
    found: list[list[str]] = []
    while True:
        shown = [
            "\n\n".join(f"Document ID: {name}\n{texts[name]}" for name in ids) or "Nothing found."
            for ids in found
        ]
        (call,) = read_calls(demonstration.say(shown), HERMES)
        assert isinstance(call, ToolCall)
        if call.name == "complete":
            return Acted(queries, found, dict(call.arguments))
        assert call.name == "retrieve_documents"
        queries.append(call.arguments["query"])
        found.append(search(queries[-1]))


def test_shares_of_tool_calls_are_met(
    questions: list[BridgeQuestion], searches: list[Best]
) -> None:
    config = DemonstrationsConfig()
    done: Counter[str] = Counter()
    for episode in range(DRAWS):
        choices = draw_choices(config, 0, episode)
        question = questions[episode % TASKS]
        queries, found, end = acted(Demonstration(question, choices), searches[episode % TASKS])
        done[_first(queries[0], question)] += 1
        done[_then(queries)] += 1
        done.update([choices.answer, choices.cite])
        passages = [question.passages[int(name)] for ids in found for name in ids]
        if passages:  # the answer was read off what was shown last
            last = passages[-1]
            if last.said[1]:
                right = end["final_answer"] == last.said[1]
                assert right == (choices.answer == "answer_right")
            assert end["final_answer"] in (*last.names, last.said[1])
        shown = list(dict.fromkeys(p.id for p in passages))
        supporting = [p.id for p in dict.fromkeys(passages) if p.is_supporting]
        cited = {"cite_right": supporting, "cite_all": shown, "cite_none": []}
        assert end["cited_doc_ids"] == cited[choices.cite]
        assert end["reasoning"]
    for shares in config.decisions.values():
        assert sum(done[name] for name in shares) == DRAWS
        for name, share in shares.items():
            near(done[name], DRAWS, share, name)


def _first(query: str, question: BridgeQuestion) -> str:
    known = {
        question.entity: "search_entity",
        question.question: "search_question",
        " ".join(question.relations): "search_relations",
    }
    return known[query]


def _then(queries: list[str]) -> str:
    if len(queries) == 1:
        return "then_answer"
    assert len(queries) == 2
    return "then_again" if queries[0] == queries[1] else "then_bridge"


def test_the_expert_is_right_where_the_passages_are_found(
    questions: list[BridgeQuestion], searches: list[Best]
) -> None:
    found_both = 0
    for i, (question, search) in enumerate(zip(questions, searches)):
        expert = Demonstration(question, draw_choices(EXPERT, 0, i))
        queries, found, end = acted(expert, search)
        first, second = (passage.id for passage in question.supporting)
        assert queries[0] == question.entity
        if found[0] == [first]:
            assert queries[1] == f"{question.bridge} {question.relations[1]}"
            if found[1] == [second]:
                found_both += 1
                assert end["final_answer"] == question.answer
                assert sorted(end["cited_doc_ids"]) == sorted([first, second])
    assert found_both >= 0.7 * TASKS


def test_a_demonstration_knows_only_what_was_shown(
    questions: list[BridgeQuestion], searches: list[Best]
) -> None:
    for i, (question, search) in enumerate(zip(questions, searches)):
        choices = draw_choices(DemonstrationsConfig(), 1, i)
        queries, found, end = acted(Demonstration(question, choices), search)
        texts = [question.question, *(question.passages[int(n)].text for ids in found for n in ids)]
        assert end["final_answer"] in "\n".join(texts)
        if choices.then == "then_bridge":
            assert queries[1].removesuffix(f" {question.relations[1]}") in "\n".join(texts[:2])


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_found_and_every_form(form: str, questions: list[BridgeQuestion]) -> None:
    question = questions[0]
    choices = Choices("search_relations", "then_bridge", "answer_other", "cite_all", 0.5)
    demonstration = Demonstration(question, choices, form)
    first, second, third = (
        read_calls(demonstration.say(["Nothing found."] * turn), form)[0] for turn in range(3)
    )
    assert first == second
    assert isinstance(third, ToolCall)
    assert third.name == "complete"
    assert third.arguments["final_answer"] == question.entity


def test_choices_depend_on_seed_and_index_only() -> None:
    config = DemonstrationsConfig()
    several = [draw_choices(config, 0, i) for i in range(50)]
    assert several == [draw_choices(config, 0, i) for i in range(50)]
    assert several != [draw_choices(config, 1, i) for i in range(50)]
    assert {draw_choices(EXPERT, 5, i)[:-1] for i in range(50)} == {
        ("search_entity", "then_bridge", "answer_right", "cite_right")
    }


# Rewritings


@cache
def talkative(index: int = 0) -> TalkativeQuestion:
    return talkative_question(0, "train", index)


def written(style: str, index: int, number: int = 0) -> str:
    return rewritten(style, talkative(index), Draw(0, STREAM, number))


def test_styles_say_only_words_of_the_question_in_one_line() -> None:
    for index in range(40):
        shown = set(words_of(talkative(index).question))
        for style in REWRITE_STYLES:
            said = written(style, index)
            if style in (COPY, NO_STOP_WORDS, SOME_WORDS):  # words keep their order
                words = iter(words_of(talkative(index).question))
                assert all(word in words for word in words_of(said))
            assert set(words_of(said)) <= shown, style
            assert said
            assert "\n" not in said


def test_what_each_style_leaves_out() -> None:
    for index in range(40):
        each = talkative(index)
        words = words_of(each.question)
        assert written(COPY, index) == each.question
        stopped = words_of(written(NO_STOP_WORDS, index))
        assert Counter(words) - Counter(stopped) == Counter(
            word for word in words if word.lower() in FUNCTION_WORDS
        )
        assert len(words_of(written(SOME_WORDS, index))) == round(0.6 * len(words))
        assert written(ENTITY_WORDS, index) == f"{each.entity} {each.relation}"
        others = {f"{clause.name} {clause.words}" for clause in each.clauses}
        assert {written(WRONG_CLAUSE, index, number) for number in range(20)} == others
        assert all(each.entity not in other for other in others)


def test_shares_of_rewritings_are_met() -> None:
    config = RewriteStylesConfig(0.1, 0.15, 0.2, 0.25, 0.3)
    counts = Counter(draw_rewrite_style(config, 0, index) for index in range(DRAWS))
    for name, share in config.shares.items():
        near(counts[name], DRAWS, share, name)
    only = RewriteStylesConfig(0, 0, 0, 1, 0)
    assert {draw_rewrite_style(only, 3, index) for index in range(50)} == {ENTITY_WORDS}


def test_a_demonstration_depends_on_seed_and_index_only() -> None:
    config = RewriteStylesConfig()

    def several(seed: int) -> list[tuple[str, str]]:
        return [draw_rewriting(config, seed, index, talkative()) for index in range(50)]

    assert several(0) == several(0) != several(1)
    assert [each[0] for each in several(0)] == [draw_rewrite_style(config, 0, n) for n in range(50)]


def test_what_is_chosen_within_a_style_does_not_depend_on_its_draw() -> None:
    """The number that chose the last style was high; the clause is chosen by another one."""
    config = RewriteStylesConfig(0.5, 0, 0, 0, 0.5)
    drawn = [draw_rewriting(config, 0, index, talkative()) for index in range(1000)]
    counts = Counter(each.query for each in drawn if each.style == WRONG_CLAUSE)
    assert len(counts) == 2
    for count in counts.values():
        near(count, counts.total(), 0.5)


# Queries of hops


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
    lines = dataclasses.replace(question, question="Who\nis it?")
    assert StyledWriter(QUESTION).query(QueryState("q", "", ()), lines) == "Who is it?"


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
    search.calls.clear()
    ((one, two, three),) = StyledPlay(search, order=order).play([start])
    assert [len(call) for call in search.calls] == [1, 1, 1]  # one call a hop
    assert (one.state, [one.found]) == (start.state, search([question.question]))
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


def test_the_bridge_has_a_share_of_its_own_behind_marks() -> None:
    config = StylesConfig(0.1, 0.2, 0.3, 0.4, marked=0.6, marked_bridge=0.8)
    drawn = [draw_style(config, 0, index) for index in range(DRAWS)]
    # Of the rest, 0.2, the other styles have what 0.1, 0.2 and 0.3 are of 0.6.
    behind = {QUESTION: 0.2 / 6, ENTITY: 0.4 / 6, PASSAGE: 0.6 / 6, BRIDGE: 0.8}
    for marked, wanted in ((True, behind), (False, config.shares)):
        counts = Counter(each.name for each in drawn if each.marked is marked)
        for name, share in wanted.items():
            near(counts[name], counts.total(), share, (marked, name))
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
    near(changed, 400, 0.3)
    assert drawn == [draw_renamed(StylesConfig(renamed=0.3), 0, n, hops) for n in range(400)]
    assert len({each[0].query for each in drawn}) > 100  # other names each time
    assert all(draw_renamed(StylesConfig(), 0, index, hops) == hops for index in range(50))


def test_styles_of_hops_are_drawn_apart_or_together_by_seed_and_index() -> None:
    config = StylesConfig(question=0.1, entity=0.2, passage=0.3, bridge=0.4, marked=0.7)
    pairs = [draw_styles(config, 0, index, 2) for index in range(DRAWS)]
    first = [draw_style(config, 0, index) for index in range(DRAWS)]
    assert [each[0] for each in pairs] == first
    assert first[:50] != [draw_style(config, 1, index) for index in range(50)]
    near(sum(each.marked for each in first), DRAWS, 0.7)
    both = Counter((one.name, other.name) for one, other in pairs)
    for one, share in config.shares.items():
        for other, then in config.shares.items():
            near(both[one, other], DRAWS, share * then, (one, other))
    kept = dataclasses.replace(config, mixed=False)
    for index in range(50):
        assert draw_styles(kept, 0, index, 3) == (draw_style(config, 0, index),) * 3
