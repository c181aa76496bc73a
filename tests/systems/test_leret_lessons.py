"""Lessons out of hand-made pairs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from qrag_jax.environments.query_writing.prompt import QueryPrompt, Variant
from qrag_jax.errors import InputError
from qrag_jax.feedback.preference_pairs import PAIRED, TIED, Pair, StatePairs
from qrag_jax.feedback.tries import StateKey, Try
from qrag_jax.llm.text import prompts
from qrag_jax.rollouts.token_episodes import Speech
from qrag_jax.systems.leret_lessons import (
    check_some,
    imitation_batch,
    lessons_of,
    pairs_batch,
)
from tests.environments.query_writing.trying import LATER, STATE, tiny_speech

PROMPT = QueryPrompt(prompts.load("bare_query"), (Variant("one", mark="style: one"),))
SHOWN = {StateKey(0, 1, 0): STATE, StateKey(3, 2, 0): LATER.asked_by(1)}
FIRST, SECOND = SHOWN


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    return tiny_speech(tmp_path_factory.mktemp("lm") / "model")


def query(at: StateKey, *ids: int, reward: float = 0.5) -> Try:
    return Try(
        *at, 1, 0, f"query {ids}", ids, (-1.0,) * len(ids), "stop", "searched", reward=reward
    )


def state(at: StateKey, *ids: tuple[int, ...], pairs=(), target: int | None = None) -> StatePairs:
    queries = tuple(query(at, *each) for each in ids)
    given = tuple(Pair(*each) for each in pairs)
    return StatePairs(
        at, queries, ((1,),) * len(ids), given, target, PAIRED if pairs else TIED, 2, 0
    )


def test_queries_are_learned_behind_the_bare_prompt(speech: Speech) -> None:
    states = [
        state(FIRST, (5, 6, 1), (7, 1), (8, 1), pairs=[(2, 0, 1.0), (1, 0, 0.25)], target=2),
        state(SECOND, (9, 1), (4, 4, 1), pairs=[(1, 0, 1.0)]),
    ]
    found = lessons_of(states, SHOWN, PROMPT, speech)
    openings = [speech.scaffold.opening(PROMPT.messages(each)) for each in (STATE, LATER)]
    (best,) = found.imitated
    assert best.question == 0
    ((turn,),) = (best.best,)
    np.testing.assert_array_equal(turn.observed, openings[0])
    assert turn.sampled.tolist() == [8, 1]
    told = [
        (p.better[0].sampled.tolist(), p.worse[0].sampled.tolist(), p.weight, p.question)
        for p in found.pairs
    ]
    assert told == [
        ([8, 1], [5, 6, 1], 1.0, 0),
        ([7, 1], [5, 6, 1], 0.25, 0),
        ([4, 4, 1], [9, 1], 1.0, 3),
    ]
    np.testing.assert_array_equal(found.pairs[2].worse[0].observed, openings[1])
    assert found.too_long == 0


def test_the_longest_rows_are_of_every_state(speech: Speech) -> None:
    states = [state(FIRST, (5, 6, 1), (7, 1)), state(SECOND, (9, 1))]
    found = lessons_of(states, SHOWN, PROMPT, speech)
    assert (found.imitated, found.pairs) == ([], [])
    rows = [len(each.better[0].observed) + len(each.better[0].sampled) for each in found.longest]
    opening = speech.scaffold.opening(PROMPT.messages(LATER))
    assert max(rows) == len(opening) + 3
    assert all(each.better == each.worse for each in found.longest)


def test_what_does_not_fit_is_counted(speech: Speech) -> None:
    longest = len(speech.scaffold.opening(PROMPT.messages(LATER)))
    narrow = dataclasses.replace(speech, room=longest + 2)
    states = [
        state(FIRST, (5, 1), target=0),
        state(SECOND, (9, 9, 1), (4, 1), pairs=[(1, 0, 1.0)], target=1),
    ]
    found = lessons_of(states, SHOWN, PROMPT, narrow)
    assert (len(found.imitated), len(found.pairs), found.too_long) == (1, 0, 1)


def test_states_of_which_nothing_is_learned_are_left_out(speech: Speech) -> None:
    nothing = StatePairs(None, (), (), (), None, TIED, 0, 0)
    found = lessons_of([nothing, state(FIRST, (5, 1))], SHOWN, PROMPT, speech)
    assert (found.imitated, found.pairs, found.too_long) == ([], [], 0)


def test_batches(speech: Speech) -> None:
    states = [state(FIRST, (5, 6, 1), (7, 1), pairs=[(1, 0, 1.0)], target=1)]
    found = lessons_of(states, SHOWN, PROMPT, speech)
    opening = speech.scaffold.opening(PROMPT.messages(STATE)).tolist()
    batch = pairs_batch(found.pairs, speech.room)
    rows = [batch.tokens[n, : batch.lengths[n]].tolist() for n in range(2)]
    assert rows == [[*opening, 7, 1], [*opening, 5, 6, 1]]
    assert batch.episode[:2].tolist() == [0, 1]
    assert (batch.leader[1], batch.shared[1]) == (0, len(opening))
    assert batch.loss_mask.sum(axis=1).tolist()[:2] == [2, 3]
    one = imitation_batch([each.best for each in found.imitated], speech.room)
    assert one.tokens[0, : one.lengths[0]].tolist() == [*opening, 7, 1]
    assert one.loss_mask.sum() == 2


def test_a_stage_without_lessons_is_refused() -> None:
    check_some(1, "pairs", "preference")
    with pytest.raises(InputError, match="the tries gave no pairs for the stage preference; use"):
        check_some(0, "pairs", "preference")
