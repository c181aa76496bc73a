"""Questions played hop by hop, by a stand-in for a model and by rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from qrag_jax.environments.query_writing.agent import QueryAgent
from qrag_jax.environments.query_writing.prompt import QueryPrompt, Variant
from qrag_jax.environments.query_writing.state import BY_HOP, BY_PASSAGE, QueryState
from qrag_jax.environments.tools.episode import Document, Failed, Look
from qrag_jax.feedback.pool_scores import PoolScores, QueryRewardConfig
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text import prompts
from qrag_jax.rollouts.query_tries import Scoring
from qrag_jax.rollouts.token_episodes import Speech, TokenEpisode, TokenStart
from qrag_jax.systems.leret_hops import HopPlayer
from tests.environments.query_writing.trying import BERG, OSLO, RAIN, STATE, tiny_speech
from tests.systems.query_play import said

FOUND = {"ada berg": (BERG, RAIN), "oslo": (OSLO, BERG), "rain": (RAIN,)}
OTHER = dataclasses.replace(STATE, id="r", question="Where does it rain?")


class Shelf:
    """Finds what is written above."""

    def look(self, asked: Sequence[tuple[Any, Look]]) -> list[tuple[Document, ...] | Failure]:
        return [self._found(step) for _, step in asked]

    def _found(self, step: Look) -> tuple[Document, ...] | Failure:
        if step.query == "broken":
            return Failure("timeout", "no reply.")
        return FOUND.get(step.query, ())[: step.most]

    def named(self, _: Any, names: Sequence[str]) -> tuple[Document, ...]:
        every = {each.id: each for each in (BERG, OSLO, RAIN)}
        return tuple(every[name]._replace(score=0.0) for name in names)


LIBRARY: Any = Shelf()
SCORING = Scoring(PoolScores(2, 3), QueryRewardConfig(), BY_HOP, BY_PASSAGE)
PLAYER = HopPlayer(2, 2, LIBRARY, SCORING, seed=3)
PROMPT = QueryPrompt(prompts.load("bare_query"), (Variant("one", mark="style: one"),))
AGENT = QueryAgent(PROMPT, 2, stop="enough")


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    return tiny_speech(tmp_path_factory.mktemp("lm") / "model")


def model(
    speech: Speech, *queries: Sequence[str]
) -> tuple[Callable[..., list[TokenEpisode]], list[list[TokenStart]]]:
    """Writes these queries, hop by hop; and what it was asked."""
    asked: list[list[TokenStart]] = []

    def play(starts: Sequence[TokenStart]) -> list[TokenEpisode]:
        asked.append([*starts])
        texts = queries[len(asked) - 1]
        return [
            TokenEpisode(Failed("timeout", "no reply."), (), 1)
            if text == "fails"
            else said(AGENT, LIBRARY, speech, start, text)
            for start, text in zip(starts, texts, strict=True)
        ]

    return play, asked


def pools(rows: Sequence[Any]) -> list[list[str]]:
    return [[each.id for each in row.after.pool] for row in rows]


def test_pools_grow_hop_by_hop(speech: Speech) -> None:
    play, asked = model(speech, ["ada berg", "rain"], ["oslo", "oslo"])
    first, second = PLAYER.by_model([STATE, OTHER], play, stream=1)
    assert pools(first) == [["a", "c"], ["c"]]
    assert pools(second) == [["a", "c", "b"], ["c", "b", "a"]]
    assert [row.scores["recall"] for row in (*first, *second)] == [0.5, 0.0, 1.0, 1.0]
    assert second[0].scores["ap"] == pytest.approx((1 / 1 + 2 / 3) / 2)
    assert second[1].scores["ap_min"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert [row.query for row in second] == ["oslo", "oslo"]
    assert first[0].before.hop == 1
    hops = [[start.task.hop for start in each] for each in asked]  # type: ignore[attr-defined]
    assert hops == [[1, 1], [2, 2]]
    opening = speech.scaffold.opening(PROMPT.messages(STATE))
    assert (first[0].read, second[0].read > len(opening)) == (len(opening), True)
    assert first[0].made is not None
    assert len(first[0].made.sampled) > 1


def test_nothing_is_found_without_a_query_and_the_next_hop_asks_again(speech: Speech) -> None:
    play, asked = model(speech, ["", "fails", "broken"], ["ada berg", "oslo", "oslo"])
    first, second = PLAYER.by_model([STATE] * 3, play, stream=1)
    assert pools(first) == [[], [], []]
    assert [row.made.outcome for row in first if row.made] == ["no_query", "timeout", "timeout"]
    assert [row.scores["recall"] for row in first] == [0, 0, 0]
    assert pools(second) == [["a", "c"], ["b", "a"], ["b", "a"]]
    assert [start.task.hop for start in asked[1]] == [2, 2, 2]  # type: ignore[attr-defined]


def test_a_search_that_ended_is_not_asked_again(speech: Speech) -> None:
    play, asked = model(speech, ["enough", "rain"], ["oslo"])
    second = PLAYER.by_model([STATE, OTHER], play, stream=1)[1]
    assert [len(each) for each in asked] == [2, 1]
    assert asked[1][0].task.id == "r"
    assert second[0].made is None
    assert (second[0].query, second[0].read, pools(second)[0]) == ("", 0, [])
    assert second[0].scores["ap"] == 0
    play, asked = model(speech, ["enough"])
    rows = PLAYER.by_model([STATE], play, stream=1)
    assert (len(asked), len(rows)) == (1, 2)


def test_draws_depend_on_stream_hop_and_question_alone(speech: Speech) -> None:
    def keys(states: Sequence[QueryState], stream: int) -> list[tuple[int, ...]]:
        queries = [["rain"] * len(states)] * 2
        play, asked = model(speech, *queries)
        PLAYER.by_model(states, play, stream)
        return [tuple(start.key.tolist()) for each in asked for start in each]

    one, two = keys([STATE, OTHER], 1), keys([STATE, OTHER], 2)
    assert len({*one, *two}) == 8
    assert keys([STATE], 1) == one[::2]
    assert np.asarray(one).shape == (4, 2)


def test_a_prompt_asks_at_every_hop(speech: Speech) -> None:
    play, asked = model(speech, ["rain"], ["oslo"])
    PLAYER.by_model([STATE], play, stream=1, variant=1)
    assert [start.task.variant for each in asked for start in each] == [1, 1]  # type: ignore[attr-defined]


def test_rules_write_queries_too() -> None:
    def write(state: QueryState) -> str:
        if state.id == "r":
            return "broken"
        return "oslo" if state.pool else "ada berg"

    first, second = PLAYER.by_rule([STATE, OTHER], write)
    assert pools(first) == [["a", "c"], []]
    assert pools(second) == [["a", "c", "b"], []]
    assert [row.query for row in second] == ["oslo", "broken"]
    assert all(row.made is None and row.read == 0 for row in (*first, *second))
    assert [row.outcome for row in second] == ["", "timeout"]
    assert second[0].before.hop == 2
    assert second[0].scores["all_gold"] == 1
