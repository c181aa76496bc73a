"""Scripted demonstrations: their shares, what they may know, and what they find."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from examples.worlds.demonstrations import (
    Demonstration,
    Start,
    Style,
    Written,
    draw_choices,
    draw_renamed,
    draw_rewriting,
    draw_styles,
    play_styled,
    styled_query,
)
from examples.worlds.scripts import bridge_question, talkative_question
from qrag_jax.data.scripted import TalkativeQuestion
from qrag_jax.environments.demonstrations import (
    BRIDGE,
    ENTITY,
    PASSAGE,
    QUESTION,
    DemonstrationsConfig,
    RewriteStylesConfig,
    StylesConfig,
    style_variants,
)
from qrag_jax.environments.episode import Document
from qrag_jax.environments.queries import QueryPrompt, QueryState, grown
from qrag_jax.environments.tasks import bridge_task
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import load
from qrag_jax.llm.text.tool_calls import HERMES, read_calls
from qrag_jax.retrieval.own_documents import DocumentSearch, OwnRetriever
from tests.environments.trying import EXPERT, WorldSearch, world, world_state

DRAWS, STREAM, TASKS, QUESTIONS = 3000, 99, 100, 40


def check_shares(counts: Counter, *shares: Mapping[Any, float]) -> None:
    """Counts of `DRAWS` draws are within four standard deviations of their shares."""
    for name, share in {name: share for each in shares for name, share in each.items()}.items():
        most = 4 * math.sqrt(DRAWS * share * (1 - share))
        assert abs(counts[name] - DRAWS * share) < most, name


def acted(demonstration: Demonstration) -> tuple[list[str], list[str], dict[str, Any]]:
    """The queries, the id of the best document of each, and the arguments of `complete`."""
    retriever, documents = OwnRetriever("bm25"), bridge_task(demonstration.question).documents
    shown: list[str] = []
    queries: list[str] = []
    names: list[str] = []
    while True:
        (call,) = read_calls(demonstration.say(shown), HERMES)
        if call.name == "complete":
            return queries, names, dict(call.arguments)
        queries.append(call.arguments["query"])
        (found,) = retriever.find([DocumentSearch(queries[-1], 1, documents)])
        names += [each.id for each in found]
        texts = [f"Document ID: {each.id}\n{each.text}" for each in found]
        shown.append("\n\n".join(texts) or "Nothing found.")


def test_tool_calls_have_their_shares_and_know_what_was_shown() -> None:
    config, found_both = DemonstrationsConfig(), 0
    for episode in range(300):
        question = bridge_question(0, "train", episode % TASKS)
        choices = draw_choices(config if episode % 4 else EXPERT, 0, episode)
        queries, names, end = acted(Demonstration(question, choices))
        known = {
            question.entity: "search_entity",
            question.question: "search_question",
            " ".join(question.relations): "search_relations",
        }
        assert known[queries[0]] == choices[0]
        assert (len(queries) == 1) == (choices.then == "then_answer")
        assert (queries[-1] == queries[0]) == (choices.then != "then_bridge" or not names)
        passages = [question.passages[int(name)] for name in names]
        texts = [question.question, *(passage.text for passage in passages)]
        assert end["final_answer"] in "\n".join(texts)
        if passages and passages[-1].said[1]:  # the answer was read off what was shown last
            right = end["final_answer"] == passages[-1].said[1]
            assert right == (choices.answer == "answer_right")
        supporting = [p.id for p in dict.fromkeys(passages) if p.is_supporting]
        cited = {"cite_right": supporting, "cite_all": [*dict.fromkeys(names)], "cite_none": []}
        assert end["cited_doc_ids"] == cited[choices.cite]
        if episode % 4 == 0 and names == [passage.id for passage in question.supporting]:
            found_both += end["final_answer"] == question.answer
    assert found_both >= 0.6 * 75  # the expert is right where the passages are found
    drawn = [draw_choices(config, 0, index) for index in range(DRAWS)]
    assert drawn != [draw_choices(config, 1, index) for index in range(DRAWS)]
    # Shares are met, here and of the other kinds.
    check_shares(
        Counter(name for choices in drawn for name in choices[:-1]), *config.decisions.values()
    )
    rewrite = RewriteStylesConfig(0.1, 0.15, 0.2, 0.25, 0.3)
    rewritings = [draw_rewriting(rewrite, 0, index, talkative()) for index in range(DRAWS)]
    check_shares(Counter(style for style, _ in rewritings), rewrite.shares)
    styles = StylesConfig(question=0.1, entity=0.2, passage=0.3, bridge=0.4, marked=0.7)
    pairs = [draw_styles(styles, 0, index, 2) for index in range(DRAWS)]
    for hop in zip(*pairs, strict=True):
        check_shares(Counter(style.name for style in hop), styles.shares)
        check_shares(Counter(style.marked for style in hop), {True: 0.7})
    kept = dataclasses.replace(styles, mixed=False)
    assert draw_styles(kept, 0, 7, 3) == draw_styles(styles, 0, 7, 1) * 3
    # The bridge may have a share of its own behind marks; the others have theirs of the rest.
    marked = dataclasses.replace(styles, marked=1.0, marked_bridge=0.8)
    names = Counter(draw_styles(marked, 0, index, 1)[0].name for index in range(DRAWS))
    check_shares(names, {QUESTION: 0.2 / 6, ENTITY: 0.4 / 6, PASSAGE: 0.6 / 6, BRIDGE: 0.8})


@pytest.mark.parametrize(
    ("config", "field", "share"),
    [
        (DemonstrationsConfig, "search_entity", 0.5),
        (RewriteStylesConfig, "entity", 0.5),
        (StylesConfig, "bridge", 0.75),
    ],
)
def test_shares_that_are_refused(config: Any, field: str, share: float) -> None:
    with pytest.raises(InputError, match=rf"config\..*{field}"):
        config(**{field: share})


@cache
def talkative(index: int = 0) -> TalkativeQuestion:
    return talkative_question(0, "train", index)


@pytest.fixture(scope="module")
def search() -> WorldSearch:
    return WorldSearch(world(QUESTIONS))


def demonstrated(search: WorldSearch, *names: str) -> list[tuple[Written, ...]]:
    """All questions in these styles, one a hop, by the bare prompt."""
    styles = tuple(Style(name, False) for name in names)
    starts = [Start(world_state(each), each, styles) for each in world(QUESTIONS)]
    return play_styled(search, starts)


def document_of(question: int, place: int) -> Document:
    """A supporting passage of a question, as a corpus may have it."""
    passage = world(QUESTIONS)[question].supporting[place]
    return Document("7", passage.title, f"# {passage.title}\n{passage.text}", True)


def test_queries_of_each_style_by_hand() -> None:
    question = world(1)[0]
    first, second = question.supporting
    start, own = world_state(question), document_of(0, 0)
    text = f"{question.question} {first.title} {first.text}"
    wanted = {
        QUESTION: (question.question, question.question),
        ENTITY: (question.entity, question.entity),
        PASSAGE: (question.question, " ".join(text.split()[:24])),
        BRIDGE: (question.entity, question.bridge),
    }
    for style, (one, other) in wanted.items():
        assert styled_query(style, start, question) == one
        assert styled_query(style, start.after((own,)), question) == other
    for pool, said in (
        ((document_of(1, 0), own), question.bridge),
        ((own, document_of(0, 1)), second.title),
        # Only the entity's own passage says it: no other, none of its title, none of its text.
        ((document_of(1, 0), document_of(0, 1)), question.entity),
        ((own._replace(text=document_of(1, 0).text),), question.entity),
        ((own._replace(title="Other"),), question.entity),
    ):
        assert styled_query(BRIDGE, start.after(pool), question) == said
    lines = dataclasses.replace(question, question="Who\nis it?")
    assert styled_query(QUESTION, QueryState("q", "", ()), lines) == "Who is it?"


def test_a_demonstration_with_other_names_is_as_true(search: WorldSearch) -> None:
    """What a style says with the new names, it says of a state with the new names."""
    prompt, config = QueryPrompt(load("bare_query")), StylesConfig(renamed=1.0)
    for number, hops in enumerate(demonstrated(search, QUESTION, BRIDGE)):
        changed = draw_renamed(config, 0, number, hops)
        assert changed == draw_renamed(config, 0, number, hops)
        assert hops == draw_renamed(StylesConfig(), 0, number, hops)
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
    changed = [draw_renamed(StylesConfig(renamed=0.3), 0, index, hops) for index in range(300)]
    assert 60 < len({each[0].query for each in changed}) < 120  # other names each time


def test_a_search_that_fails_ends_its_demonstration(search: WorldSearch) -> None:
    first, other = world(2)

    def failing(queries: Sequence[str]) -> list[Any]:
        found = zip(queries, search(queries), strict=True)
        return [Failure("server", "down") if q == first.bridge else pool for q, pool in found]

    styles = (Style(ENTITY, False), Style(BRIDGE, True))
    starts = [Start(world_state(each), each, styles) for each in (first, other)]
    one, two, none = play_styled(failing, [*starts, starts[0]._replace(styles=())])
    assert [each.query for each in one] == [first.entity]
    assert [each.query for each in two] == [other.entity, other.bridge]
    assert (none, two[1].state.pool) == ((), two[0].found)  # a pool grows from hop to hop
    assert QueryPrompt(load("bare_query"), style_variants()).names[two[1].state.variant] == BRIDGE
