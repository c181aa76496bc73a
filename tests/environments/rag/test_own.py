"""An agent from a file outside the package: what it is sent, and how its faults end an episode."""

from __future__ import annotations

from pathlib import Path

import pytest

from qrag_jax.environments.rag.episode import (
    OWN_CODE,
    Broken,
    Ended,
    Finished,
    Hop,
    Limits,
    Retrieve,
)
from qrag_jax.environments.rag.own import OwnAgent
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from tests.environments.rag.playing import NORWAY, OSLO, TASK, played

CODE = """
sent = []

def good(question, max_searches):
    assert max_searches == 2
    texts = yield question
    sent.append(texts)
    texts = yield "Where is Oslo?", "Oslo"
    sent.append(texts)
    return "Norway"

def once(question, max_searches):
    yield "Oslo"
    return "in Oslo"

def never(question, max_searches):
    return "Norway"
    yield

def raises(question, max_searches):
    yield question
    raise LookupError("no such place")

def plain(question, max_searches):
    return question

def wild(question, max_searches):
    yield ["Oslo", "Bergen"]

def empty(question, max_searches):
    yield " "

def endless(question, max_searches):
    while True:
        yield question

def number(question, max_searches):
    yield question
    return 7

def narrow(question):
    yield question
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_agent.py"
    path.write_text(CODE)
    return path


def agent(file: Path, name: str) -> OwnAgent:
    return OwnAgent.load(f"{file}:{name}", Limits(max_hops=2))


def test_it_searches_reads_and_answers(file: Path) -> None:
    own = agent(file, "good")
    steps, ended = played(own, [OSLO, NORWAY])
    first, second = Hop(TASK.question, "Oslo"), Hop("Where is Oslo?", "Norway")
    assert steps == [Retrieve(TASK.question, ()), Retrieve("Where is Oslo?", (first,))]
    assert ended == Finished("Norway", (first, second))
    sent = own.code.function.__globals__["sent"]  # type: ignore[attr-defined]
    assert sent == [[passage.whole for passage in found] for found in (OSLO, NORWAY)]
    _, ended = played(agent(file, "once"), [OSLO])
    assert ended == Finished("in Oslo", (Hop("Oslo", "in Oslo"),))


def end_of(own: OwnAgent, replies: list) -> Ended:
    """The end of an episode, which may come before its first search."""
    if replies:
        return played(own, replies)[1]
    with pytest.raises(StopIteration) as at_once:
        next(own.play(TASK))
    return at_once.value.value


@pytest.mark.parametrize(
    ("name", "replies", "says"),
    [
        ("raises", [OSLO], "raised LookupError: no such place."),
        ("plain", [], "no generator; yield the searches."),
        ("wild", [], "yielded ['Oslo', 'Bergen'], no text to search for."),
        ("empty", [], "yielded ' ', no text to search for."),
        ("endless", [OSLO, NORWAY], "searched more than 2 times (config.agent.max_hops)."),
        ("number", [OSLO], "returned 7, no text."),
    ],
)
def test_its_faults_break_the_episode(file: Path, name: str, replies: list, says: str) -> None:
    ended = end_of(agent(file, name), replies)
    assert isinstance(ended, Broken)
    assert ended.cause == OWN_CODE
    assert ended.message.startswith(f"{file}:{name} ")
    assert ended.message.endswith(says)


def test_other_ends_are_those_of_every_agent(file: Path) -> None:
    ended = end_of(agent(file, "never"), [])
    assert isinstance(ended, Broken)
    assert ended.cause == "no_retrieval"
    _, ended = played(agent(file, "good"), [Failure("server", "it is away")])
    assert isinstance(ended, Broken)
    assert (ended.cause, ended.message) == ("server", "it is away")


def test_a_file_that_cannot_be_used(file: Path) -> None:
    with pytest.raises(InputError, match=r"config\.agent\.path"):
        agent(file, "narrow")
    with pytest.raises(InputError, match="function other"):
        agent(file, "other")
