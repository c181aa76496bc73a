"""One rewriting, played by hand and through the rollout of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from qrag_jax.environments.query_rewriting.agent import RewriteAgent
from qrag_jax.environments.query_rewriting.output import (
    BARE,
    BROKEN,
    NO_QUERY,
    REWRITTEN,
    SEVERAL,
    TAGGED,
    TOO_LONG,
    UNCLOSED,
    UNREADABLE,
)
from qrag_jax.environments.query_rewriting.prompt import RewritePrompt
from qrag_jax.environments.query_rewriting.task import RewriteTask, Rewritten
from qrag_jax.environments.tools.episode import (
    Document,
    Ended,
    Failed,
    Look,
    Open,
    Said,
    Speak,
    ToolTally,
    ToolTask,
)
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import load
from qrag_jax.rollouts.token_episodes import Speech, TokenEpisode, TokenRollout, TokenStart
from qrag_jax.rollouts.trajectories import DONE, TRUNCATED
from tests.environments.query_writing.trying import OSLO, RAIN, tiny_speech
from tests.rollouts.test_token_episodes import Never, Told

TASK = RewriteTask.judged("q", "Where was Ada Berg born?", {"b": 2})
PROMPT = RewritePrompt(load("bare_rewrite"))


def balanced(query: str) -> bool:
    return query.count("(") == query.count(")")


WORDS = RewriteAgent(PROMPT, BARE, k=2)
JSON = RewriteAgent(RewritePrompt(load("rewrite_boolean")), TAGGED, k=3, readable=balanced)
DEAD = Failure("server", "status 500")


def by_hand(agent: RewriteAgent, said: Said | Failure, found: Any = None) -> tuple[Ended, list]:
    """How an episode ends, and what was searched for."""
    play, looked = agent.play(TASK), []
    assert next(play) == Speak(agent.prompt.messages(TASK))
    reply: Any = said
    while True:
        try:
            step = play.send(reply)
        except StopIteration as end:
            return end.value, looked
        assert isinstance(step, Look)
        looked.append((step.query, step.most))
        reply = found


def test_a_query_is_searched_for() -> None:
    ended, looked = by_hand(WORDS, Said(" Oslo\n city ", "stop"), (OSLO, RAIN))
    assert looked == [("Oslo city", 2)]
    assert ended == Rewritten(
        answer="Oslo city",
        seen=("b", "c"),
        tally=ToolTally(turns=1, searches=1),
        outcome=REWRITTEN,
        found=(OSLO, RAIN),
    )


def test_only_the_query_is_searched_for() -> None:
    text = '<think>Ada Berg?</think>\n<answer>{"query": "(Oslo\\n OR \\"Ada\\")"}</answer>'
    ended, looked = by_hand(JSON, Said(text, "stop"), ())
    assert looked == [('(Oslo OR "Ada")', 3)]
    assert ended == Rewritten('(Oslo OR "Ada")', tally=ToolTally(turns=1, searches=1))


@pytest.mark.parametrize(
    ("answer", "outcome", "malformed"),
    [
        ('{"query": ""}', NO_QUERY, 0),
        ('{"query": "a"', BROKEN, 1),
        ('{"query": ["a", "b"]}', SEVERAL, 1),
        ("</answer>", UNCLOSED, 1),
    ],
)
def test_without_a_query_nothing_is_searched_for(answer: str, outcome: str, malformed: int) -> None:
    ended, looked = by_hand(JSON, Said(f"hm</think><answer>{answer}</answer>", "stop"))
    tally = ToolTally(turns=1, malformed=malformed)
    assert (ended, looked) == (Rewritten("", tally=tally, outcome=outcome), [])


def test_a_query_that_the_search_cannot_read() -> None:
    text = 'hm</think><answer>{"query": "(Oslo OR"}</answer>'
    ended, looked = by_hand(JSON, Said(text, "stop"))
    tally = ToolTally(turns=1, malformed=1)
    assert (ended, looked) == (Rewritten("(Oslo OR", tally=tally, outcome=UNREADABLE), [])
    # A search for words reads it.
    ended, looked = by_hand(WORDS, Said("(Oslo OR", "stop"), ())
    assert looked == [("(Oslo OR", 2)]


def test_failures_are_values() -> None:
    assert by_hand(WORDS, DEAD) == (Failed("server", "status 500"), [])
    ended, looked = by_hand(WORDS, Said("Oslo", "stop"), DEAD)
    assert ended == Failed("server", "status 500", ToolTally(turns=1))
    assert looked == [("Oslo", 2)]


class Shelf:
    """Finds Oslo for every query but one."""

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        return [DEAD if step.query == "dead" else (OSLO,) for _, step in asked]

    def open(self, task: ToolTask, step: Open) -> Document | None:
        raise AssertionError


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    return tiny_speech(tmp_path_factory.mktemp("lm"))


def played(speech: Speech, say: Callable[[str], str | Failure], **options: Any) -> TokenEpisode:
    sampler = Told(speech, say, in_rounds=True)
    rollout = TokenRollout(WORDS, sampler, Shelf(), speech, stop=Never(), **options)
    (episode,) = rollout.play([TokenStart(TASK, np.zeros(2, np.uint32))])
    return episode


def test_as_an_episode_of_tokens(speech: Speech) -> None:
    episode = played(speech, lambda text: "Oslo " + text.split()[-1].strip(".?"))
    assert isinstance(episode.ended, Rewritten)
    assert episode.ended.answer.startswith("Oslo")
    assert (episode.ended.found, episode.status) == ((OSLO,), DONE)
    ((turn,),) = episode.segments
    np.testing.assert_array_equal(turn.observed, speech.scaffold.opening(PROMPT.messages(TASK)))


def test_what_is_cut_off_is_too_long(speech: Speech) -> None:
    episode = played(speech, lambda _: "Oslo " * 40)
    tally = ToolTally(turns=1, truncated=True)
    assert episode.ended == Rewritten("", tally=tally, outcome=TOO_LONG)
    assert episode.status == TRUNCATED


def test_a_search_that_fails_is_tried_again(speech: Speech) -> None:
    episode = played(speech, lambda _: "dead", attempts=3)
    assert isinstance(episode.ended, Failed)
    assert episode.attempts == 3


def test_an_agent_that_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match=r"config\.writing\.k is 0"):
        RewriteAgent(PROMPT, BARE, k=0)
    with pytest.raises(InputError, match=r"config\.writing\.form"):
        RewriteAgent(PROMPT, "json", k=1)
