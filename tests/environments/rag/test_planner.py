"""The planner in several steps: ASK, STOP, and the answer put together at the end."""

from __future__ import annotations

import dataclasses

import pytest

from qrag_jax.environments.rag.episode import (
    FOUND,
    Broken,
    Complete,
    Finished,
    Hop,
    Limits,
    Retrieve,
)
from qrag_jax.environments.rag.planner import Planner
from qrag_jax.environments.rag.reading import Reader
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import UNREAD, Answer, Failure
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import load
from tests.environments.rag.playing import NORWAY, OSLO, TASK, asked, how, played

BORN, CAPITAL = "Where was Ada Berg born?", "Of which country is Oslo the capital?"
ASK = f'{{"action": "ASK", "sub_query": "{BORN}", "strategy": "NEXT"}}'
ASK_2 = f'```json\n{{"action": "ask", "sub_query": "{CAPITAL}", "strategy": "REPHRASE"}}\n```'
STOP = '{"action": "STOP", "sub_query": "", "strategy": "NEXT"}'
READ, READ_2 = (f'{{"status": "FOUND", "answer": "{answer}"}}' for answer in ("Oslo", "Norway"))
SAID = "Both steps were found.\nFinal answer: Norway"
HOPS = (Hop(BORN, "Oslo", FOUND), Hop(CAPITAL, "Norway", FOUND))


def agent(max_hops: int = 4) -> Planner:
    generation = Generation()
    reader = Reader(load("rag_qa"), generation)
    steps, synthesis = load("rag_steps"), load("rag_synthesis")
    return Planner(steps, synthesis, reader, generation, Limits(max_hops=max_hops))


def test_an_episode() -> None:
    steps, ended = played(agent(), [ASK, OSLO, READ, ASK_2, NORWAY, READ_2, STOP, SAID])
    assert ended == Finished("Norway", HOPS)
    assert steps[1] == Retrieve(BORN, ())
    assert steps[4] == Retrieve(CAPITAL, HOPS[:1])
    question = f"Question: <question>{TASK.question}</question>\n\nSteps"
    assert asked(steps[0])[1][1] == f"{question} so far:\n\n<steps>\nnone\n</steps>"
    assert asked(steps[3])[1][1] == (
        f"{question} so far:\n\n<steps>\n1. {BORN}\n   FOUND: Oslo\n</steps>"
    )
    assert asked(steps[-1])[1][1] == (
        f"{question}:\n\n<steps>\n1. {BORN}\n   FOUND: Oslo\n2. {CAPITAL}\n   FOUND: Norway\n"
        "</steps>"
    )
    shared = [step.shared for step in steps if isinstance(step, Complete)]
    assert shared == [True, False, False, False, False, False]


def test_at_the_limit_the_answer_is_put_together() -> None:
    _, ended = played(agent(max_hops=1), [ASK, OSLO, READ, SAID])
    assert ended == Finished("Norway", HOPS[:1])


BAD_STEPS = [
    ("Ask where she was born.", 'no JSON object with an "action"'),
    ('{"sub_query": "x"}', 'no JSON object with an "action"'),
    ('{"action": "SEARCH", "sub_query": "x"}', "neither ASK nor STOP"),
    ('{"action": "ASK"}', 'no sub-question in "sub_query"'),
    ('{"action": "ASK", "sub_query": "?"}', 'no sub-question in "sub_query"'),
    ('{"action": "ASK", "sub_query": ["x"]}', 'no sub-question in "sub_query"'),
    ("<think>" + ASK, "thinking did not end"),
    (Answer(ASK[:40], finish_reason="length"), 'no JSON object with an "action"'),
]


@pytest.mark.parametrize(("bad", "wrong"), BAD_STEPS)
def test_a_step_that_cannot_be_read_is_corrected_once(bad: str | Answer, wrong: str) -> None:
    steps, ended = played(agent(), [bad, ASK, OSLO, READ, STOP, SAID])
    assert ended == Finished("Norway", HOPS[:1])
    assert (how(steps[0], bad), how(steps[1], ASK)) == (UNREAD, "read")
    assert asked(steps[1])[:2] == asked(steps[0])
    assert wrong in asked(steps[1])[-1][1]
    _, ended = played(agent(), [ASK, OSLO, READ, bad, bad])
    assert isinstance(ended, Broken)
    assert (ended.cause, ended.history) == ("malformed_call", HOPS[:1])


def test_to_stop_before_the_first_step_is_no_episode() -> None:
    _, ended = played(agent(), [STOP, ASK, OSLO, READ, STOP, SAID])
    assert ended == Finished("Norway", HOPS[:1])
    _, ended = played(agent(), [STOP, STOP])
    assert isinstance(ended, Broken)
    assert ended.cause == "no_retrieval"


REPLIES = [ASK, OSLO, READ, STOP, SAID]


@pytest.mark.parametrize("place", range(len(REPLIES)))
def test_a_call_or_a_search_that_fails_breaks_the_episode(place: int) -> None:
    _, ended = played(agent(), [*REPLIES[:place], Failure("server", "HTTP 500.")])
    assert isinstance(ended, Broken)
    assert (ended.cause, ended.history) == ("server", HOPS[: place // 3])


def test_prompts_with_other_slots_are_refused() -> None:
    for name in ("steps", "synthesis"):
        with pytest.raises(InputError, match=r"judge\.txt"):
            dataclasses.replace(agent(), **{name: load("judge")})
