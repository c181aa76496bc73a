"""The scripted agent: it follows a decomposition, and reads by looking for the right answer."""

from __future__ import annotations

import pytest

from qrag_jax.data.decompositions import Decomposition, SubQuestion
from qrag_jax.environments.rag.episode import (
    FOUND,
    NOT_FOUND,
    Broken,
    Finished,
    Hop,
    Limits,
    Retrieve,
    Seen,
    Task,
)
from qrag_jax.environments.rag.scripted import Scripted, named
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from tests.environments.rag.playing import NORWAY, OSLO, TASK, played, searches

CHAIN = Decomposition(
    (
        SubQuestion("Where was Ada Berg born?", ("Christiania", "Oslo")),
        SubQuestion("Of which country is #1 the capital?", ("Norway", "Kingdom of Norway")),
    ),
    ("Norway", "Noreg"),
)
COMPARED = Decomposition(
    (SubQuestion("Where is Oslo?", ("Norway",)), SubQuestion("Where is Bergen?", ("Norway",))),
    ("yes",),
)
ELSEWHERE = (Seen("p9", "Paris is in France.", "Paris"),)
BORN, CAPITAL = "Where was Ada Berg born?", "Of which country is Oslo the capital?"


def agent(decomposition: Decomposition = CHAIN, max_hops: int = 4) -> Scripted:
    return Scripted({TASK.id: decomposition}, Limits(max_hops=max_hops))


def test_a_chain_is_followed_with_the_answers_that_were_read() -> None:
    steps, ended = played(agent(), [OSLO, NORWAY])
    hops = (Hop(BORN, "Oslo", FOUND), Hop(CAPITAL, "Norway", FOUND))
    assert ended == Finished("Norway", hops)
    assert steps == [Retrieve(BORN, ()), Retrieve(CAPITAL, hops[:1])]


def test_what_was_not_found_is_asked_again() -> None:
    steps, ended = played(agent(), [ELSEWHERE, OSLO, (), NORWAY])
    failed = Hop(BORN, "", NOT_FOUND)
    assert steps[1] == Retrieve(BORN, (failed,))
    assert isinstance(ended, Finished)
    assert ended.answer == "Norway"
    assert [hop.status for hop in ended.history] == [NOT_FOUND, FOUND, NOT_FOUND, FOUND]
    assert searches(steps) == [BORN, BORN, CAPITAL, CAPITAL]


def test_at_the_limit_it_gives_up_with_a_wrong_answer() -> None:
    for replies in ([ELSEWHERE, OSLO, ELSEWHERE], [ELSEWHERE, ELSEWHERE, ELSEWHERE]):
        _, ended = played(agent(max_hops=3), replies)
        assert isinstance(ended, Finished)  # it made its retrievals; the reward is that of ""
        assert (ended.answer, len(ended.history)) == ("", 3)


def test_a_comparison_is_answered_when_everything_was_found() -> None:
    _, ended = played(agent(COMPARED), [NORWAY, NORWAY])
    assert isinstance(ended, Finished)
    assert ended.answer == "yes"
    _, ended = played(agent(COMPARED, max_hops=2), [ELSEWHERE, NORWAY])
    assert isinstance(ended, Finished)
    assert ended.answer == ""


def test_a_search_that_fails_breaks_the_episode() -> None:
    _, ended = played(agent(), [OSLO, Failure("too_long", "too long.")])
    assert isinstance(ended, Broken)
    assert (ended.cause, ended.history) == ("too_long", (Hop(BORN, "Oslo", FOUND),))


def test_questions_that_cannot_be_played_are_refused() -> None:
    with pytest.raises(InputError, match=r"config\.agent\.max_hops"):
        agent(max_hops=1)
    with pytest.raises(InputError, match="question q2"):
        agent().play(Task("q2", "?"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Born in Oslo.", "Oslo"),
        ("Born in OSLO, Norway", "Oslo"),
        ("the Oslo-based singer", "Oslo"),
        ("Oslo/Bergen", "Oslo"),
        ("Osloers, and Oslomarka", ""),
        ("", ""),
    ],
)
def test_an_answer_is_named_as_whole_words(text: str, found: str) -> None:
    assert named(("Oslo", "Kristiania"), ["Something else.", text]) == found


def test_answers_are_named_in_normal_form() -> None:
    assert named(("The U.S. Navy",), ["of the US navy"]) == "The U.S. Navy"
    assert named(("21 May 1900",), ["(21 May 1900 – 3 June 1980)"]) == "21 May 1900"
    assert named(("1 May 1900",), ["21 May 1900"]) == ""
    assert named(("the", "?"), ["the ?"]) == ""  # no word is left of these
    assert named(("Kristiania", "Oslo"), ["Oslo", "Kristiania"]) == "Kristiania"
