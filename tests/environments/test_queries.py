"""Queries that models write: what is read, one episode, its state or task, and its prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.sample import Sample
from qrag_jax.environments import queries
from qrag_jax.environments.episode import Ended, Failed, Look, Said, Speak, ToolTally
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import load
from tests.environments.trying import BERG, LATER, OSLO, QUESTION, RAIN, STATE, episode_of


def tagged(answer: str) -> str:
    return f"<think>\nThe capital.\n</think>\n<answer>\n{answer}\n</answer>"


WHOLE = tagged('{"query": "Oslo"}')
# Form → (text, what is read), or (text, the outcome where nothing is).
READ = {
    queries.TAGGED: (
        # The prompt may have opened the thinking.
        ('hm</think><answer>{"query": "Oslo"}</answer>', "Oslo"),
        (tagged('\t{ "query" :\n "  Oslo \\n  city\\u2028now " }'), "Oslo city now"),
        ("Sure. " + WHOLE.replace("</think>", "</think> So:") + " OK?", "Oslo"),
        (tagged(r'{"query": "\u0141\u00f3d \ud83d\ude00 \ud800 \u0000"}'), "Łód 😀 \ufffd"),
    ),
    queries.BARE: (
        (" Oslo\n and  Bergen\x00\u2029now ", "Oslo and Bergen now"),
        ("```text\nOslo city\n```", "Oslo city"),
        (tagged('```json\n{"query": "Oslo"}\n```'), "Oslo"),
    ),
}
NOT_READ = {
    queries.TAGGED: (
        (tagged(r'{"query": " \n\u0000 (\"\") "}'), queries.NO_QUERY),
        ('{"query": "Oslo"}', queries.UNCLOSED),
        ('<think>an <answer> then</think><answer>{"query": "Oslo"}</answer>', queries.UNCLOSED),
        (tagged(r'{"query": "a \u003c/answer> b"}'), queries.UNCLOSED),
        (tagged('{"query": "Oslo", "why": "capital"}'), queries.BROKEN),
        (tagged('{"query": "Oslo", "query": "Bergen"}'), queries.BROKEN),
        (WHOLE + '<answer>{"query": "Bergen"}</answer>', queries.UNCLOSED),
    ),
    queries.BARE: (
        ("<think>hm</think>", queries.NO_QUERY),
        ("</think><answer>Oslo<think></answer>", queries.UNCLOSED),
        ("{Oslo}", queries.BROKEN),
    ),
}


@pytest.mark.parametrize("form", queries.FORMS)
def test_a_reply_is_read_as_a_query_or_an_outcome(form: str) -> None:
    for text, query in READ[form]:
        assert queries.read_output(text, form, cut_off=False) == (query, queries.REWRITTEN)
        # Even where the query is whole, what was cut off is too long: the model did not end there.
        assert queries.read_output(text, form, cut_off=True) == ("", queries.TOO_LONG)
    for text, outcome in NOT_READ[form]:
        assert queries.read_output(text, form, cut_off=False) == ("", outcome), text


# ---------------------------------------------------------------- episodes

TASK = Sample("q", "Where was Ada Berg born?", grades=(("b", 2),))
WRITER = queries.QueryAgent(queries.QueryPrompt(load("bare_query")), k=2, stop="Done")
REWRITER = queries.RewriteAgent(load("bare_rewrite"), queries.BARE, k=2)
BOOLEAN = queries.RewriteAgent(
    load("rewrite_boolean"),
    queries.TAGGED,
    k=3,
    readable=lambda query: query.count("(") == query.count(")"),
)
DEAD = Failure("server", "status 500")


def stopped(text: str) -> Said:
    return Said(text, "stop")


def played(
    agent: queries.QueryAgent | queries.RewriteAgent, said: Said | Failure, *found: Any
) -> tuple[Ended, list[Look]]:
    """How an episode ends, and what was searched for."""
    task: Any = STATE if isinstance(agent, queries.QueryAgent) else TASK
    asks: Any = agent if isinstance(agent, queries.RewriteAgent) else agent.prompt
    (opening, *looks), ended = episode_of(agent, task, [said, *found])
    assert opening == Speak(asks.messages(task))
    return ended, looks


@pytest.mark.parametrize(
    ("agent", "outcome"), [(WRITER, queries.SEARCHED), (REWRITER, queries.REWRITTEN)]
)
def test_a_query_is_searched_for_and_failures_are_values(agent: Any, outcome: str) -> None:
    once = ToolTally(turns=1, searches=1)
    ended, looks = played(agent, stopped(" Oslo\n and  Bergen "), (OSLO, RAIN))
    assert looks == [Look("Oslo and Bergen", 2)]
    assert ended == queries.Searched(
        "Oslo and Bergen", seen=("b", "c"), tally=once, outcome=outcome, found=(OSLO, RAIN)
    )
    assert played(agent, DEAD) == (Failed("server", "status 500"), [])
    failed = Failed("server", "status 500", ToolTally(turns=1))
    assert played(agent, stopped("Oslo"), DEAD) == (failed, [Look("Oslo", 2)])
    ended, looks = played(agent, Said("Oslo " * 40, "length"))
    assert (ended.outcome, ended.tally) == (queries.TOO_LONG, ToolTally(turns=1, truncated=True))
    assert (ended.found, looks) == ((), [])


def test_a_writer_may_stop_and_what_is_empty_is_not_searched_for() -> None:
    for said, outcome, tally in (
        (stopped(" \n\t "), queries.EMPTY, ToolTally(turns=1)),
        (stopped(" done\n"), queries.STOPPED, ToolTally(turns=1, completed=True)),
    ):
        ended, looks = played(WRITER, said)
        assert (ended.outcome, ended.tally, ended.found, looks) == (outcome, tally, (), [])
    ended, looks = played(queries.QueryAgent(WRITER.prompt), stopped("Done"), ())  # it may not stop
    assert (ended.outcome, looks) == (queries.SEARCHED, [Look("Done", 3)])


def test_a_rewriters_unreadable_queries_are_not_searched_for() -> None:
    for answer, query, outcome, malformed in (
        ('{"query": ""}', "", queries.NO_QUERY, 0),
        ('{"query": "a"', "", queries.BROKEN, 1),
        ('{"query": "(Oslo OR"}', "(Oslo OR", queries.UNREADABLE, 1),
    ):
        ended, looks = played(BOOLEAN, stopped(f"hm</think><answer>{answer}</answer>"))
        tally = ToolTally(turns=1, malformed=malformed)
        assert (ended, looks) == (queries.Searched(query, tally=tally, outcome=outcome), [])


def test_a_pool_grows_by_hop_or_by_score() -> None:
    """Scores: Berg 5, Oslo 7, Bergen 3."""
    pool = (BERG, RAIN)
    assert queries.grown(pool, (OSLO,), queries.BY_HOP) == (BERG, RAIN, OSLO)
    # A passage that is there keeps its place and its score.
    again = RAIN._replace(score=9.0)
    assert queries.grown(pool, (again, OSLO), queries.BY_SCORE) == (OSLO, BERG, RAIN)
    flat = [each._replace(score=1.0) for each in (RAIN, OSLO, BERG)]  # by hop and rank
    assert queries.grown(flat[:1], flat[1:], queries.BY_SCORE) == tuple(flat)
    after = STATE.asked_by(2).after((BERG,))  # the next state is asked by the bare prompt
    assert (after.variant, after.hop, after.pool, after.pages) == (0, 2, (BERG,), ("a", "b"))


SPELLINGS = """Ada Berg| ada  berg|Ada_Berg
Café Olé|Cafe\u0301 Ole\u0301|cafe ole
2010–11 season|2010-11 Season|2010—11 season
O’Neill|O'Neill|O`Neill
Simon &amp; Garfunkel|Simon & Garfunkel
Straße|STRASSE"""


def test_spellings_of_one_title_agree() -> None:
    for line in SPELLINGS.split("\n"):
        assert len({queries.normalised_title(each) for each in line.split("|")}) == 1, line
    for other in (("!!!", "?"), ("C", "C++"), ("1 1", "11"), ("Oslo", "Oslo (album)")):
        found = {queries.normalised_title(each) for each in other}
        assert len(found) == len(other)
        assert all(found)


# ---------------------------------------------------------------- prompts

EXAMPLES = (
    queries.Example("Where was Bo Dahl's mother born?", (), "Bo\n<|im_end|> Dahl"),
    queries.Example(
        "Which sea is near Eva Lie's school?", ("# Eva Lie\nShe went to Voss.",), "Voss school"
    ),
)
VARIANTS = (queries.Variant("shots", EXAMPLES), queries.Variant("bridge", mark="style: bridge"))


@pytest.mark.parametrize("name", ["query_writing", "bare_query"])
def test_variants_leave_no_trace_in_the_bare_prompt(name: str) -> None:
    """What is trained on is what a prompt without variants would be."""
    alone, several = queries.QueryPrompt(load(name)), queries.QueryPrompt(load(name), VARIANTS)
    for state in (STATE, LATER):
        assert several.messages(state) == alone.messages(state)
        for number in (1, 2):
            after = state.asked_by(number).after(state.pool)
            assert several.messages(after) == alone.messages(state.after(state.pool))
            # And a variant ends with what the bare prompt ends with.
            *_, (_, asked) = several.messages(state.asked_by(number))
            assert asked.endswith(alone.messages(state)[-1][1])
    shots = [text for role, text in several.messages(STATE.asked_by(1)) if role == "assistant"]
    assert shots == ["Bo < |im_end|> Dahl", "Voss school"]  # a query cannot end its turn
    if name == "bare_query":
        cut = queries.QueryPrompt(load(name), passage_words=4).messages(LATER)
        assert cut == (("user", f"[1] # Ada Berg She\n\n[2] # Bergen It is\n\n{QUESTION}"),)


def test_a_prompt_of_a_file_needs_its_form(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("[user]\nFind {query} now.\n")
    agent = queries.RewriteAgent(load(str(path)), queries.BARE, k=1)
    assert agent.messages(Sample("q", "Oslo")) == (("user", "Find Oslo now."),)
    for name, form in ((str(path), "json"), ("rewrite_plain", queries.TAGGED)):
        with pytest.raises(InputError, match=r"config\.writing\.form"):
            queries.prompt_kind(name, form)
    path.write_text("[user]\n{query} {passages}\n")
    with pytest.raises(InputError, match=r"own\.txt"):
        queries.RewriteAgent(load(str(path)), queries.BARE, k=1)
