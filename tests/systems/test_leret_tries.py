"""Tries of LeReT: hop by hop, their prompts, lessons of them, a play that is broken off."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from qrag_jax.environments.episode import Document, Failed, Look
from qrag_jax.environments.queries import (
    BY_HOP,
    BY_PASSAGE,
    QueryAgent,
    QueryPrompt,
    QueryState,
    Variant,
)
from qrag_jax.errors import InputError
from qrag_jax.feedback.pairs import PoolScores, QueryRewardConfig
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text import prompts
from qrag_jax.rollouts.query_tries import Scoring
from qrag_jax.rollouts.token_episodes import Speech, TokenEpisode, TokenStart
from qrag_jax.runtime.interrupt import Stopped
from qrag_jax.systems.leret_tries import TRIES, HopPlayer
from tests.environments.trying import BERG, OSLO, RAIN, STATE, tiny_speech
from tests.systems.leret_run import FIRST_SFT, STOP, Trained, said, tries_of

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
def speech() -> Speech:
    return tiny_speech()


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
            else said(AGENT, LIBRARY, speech, start.task, text)
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
    assert [row.made.query for row in second if row.made] == ["oslo", "oslo"]
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


def player(leret_trained: Trained, calls: list[int], stop_at: int = 0) -> Callable[..., Any]:
    """Plays by the weights of the first tries; is told to stop in call number `stop_at`."""
    system, state = leret_trained.system, leret_trained.states[FIRST_SFT]
    play = system.by_device(jax.device_put(state.params, system.param_shardings), STOP)

    def counted(starts: Sequence[Any]) -> list[TokenEpisode]:
        calls.append(len(starts))
        if len(calls) == stop_at:
            raise Stopped("SIGTERM")
        return play(starts)

    return counted


@pytest.mark.parametrize("stop_at", [2, 3])
def test_tries_that_were_broken_off_go_on(
    leret_trained: Trained, tmp_path: Path, stop_at: int
) -> None:
    maker = dataclasses.replace(leret_trained.system.tries, workdir=tmp_path)
    calls: list[int] = []
    with pytest.raises(Stopped):
        maker.iteration(1, player(leret_trained, calls, stop_at), STOP)
    with pytest.raises(InputError, match=r"hop-\d\.jsonl"):  # without weights
        maker.iteration(1, None, STOP)
    found = maker.iteration(1, player(leret_trained, calls), STOP)
    assert len(calls) == 1 + 4  # parts of 3 questions; only the one that was broken off is repeated
    assert [TRIES.to_json(each) for each in found.tries] == [
        TRIES.to_json(each) for each in tries_of(leret_trained.system, 1)
    ]
    kept = tmp_path / "tries" / "iteration-1" / "hop-2.jsonl"
    own = leret_trained.system.workdir / "tries" / "iteration-1" / "hop-2.jsonl"
    assert kept.read_bytes() == own.read_bytes()


def test_draws_depend_on_stream_hop_and_question_alone(speech: Speech) -> None:
    def keys(states: Sequence[QueryState], stream: int) -> list[bytes]:
        play, asked = model(speech, *[["rain"] * len(states)] * 2)
        PLAYER.by_model(states, play, stream)
        return [start.key.tobytes() for each in asked for start in each]

    one, two = keys([STATE, OTHER], 1), keys([STATE, OTHER], 2)
    assert len({*one, *two}) == 8
    assert keys([STATE], 1) == one[::2]
