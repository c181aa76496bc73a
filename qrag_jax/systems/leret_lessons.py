"""What LeReT learns from the tries of an iteration: queries to imitate, and pairs to prefer.

Both are learned with the bare prompt, whichever prompt the model was asked by: this is how what the
prompts brought about becomes the model's own. Queries keep the ids that were sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from qrag_jax.environments.query_writing.prompt import QueryPrompt
from qrag_jax.environments.query_writing.state import QueryState
from qrag_jax.errors import InputError
from qrag_jax.feedback.preference_pairs import StatePairs
from qrag_jax.feedback.tries import StateKey, Try
from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.token_episodes import Speech
from qrag_jax.rollouts.token_sampler import STOP
from qrag_jax.rollouts.trajectories import (
    DONE,
    SCORED,
    BatchRules,
    Segment,
    TokenTrajectory,
    Turn,
    token_batch,
)

PAIR = 2  # rows of a pair: the winner, then the loser
_MEASURED = 8  # states whose prompts are measured for the longest


class BestLesson(NamedTuple):
    """A query to imitate.

    Attributes:
        best: the best query of a state, behind its prompt.
        question: its number.
    """

    best: Segment
    question: int


class PairLesson(NamedTuple):
    """A pair to learn from.

    Attributes:
        better, worse: the two queries of one state, behind the same prompt.
        weight: of the pair in the loss.
        question: its number.
    """

    better: Segment
    worse: Segment
    weight: float
    question: int


@dataclasses.dataclass(frozen=True)
class Lessons:
    """What one iteration learns from.

    Attributes:
        imitated: a prompt and the query that is imitated, each.
        pairs: of queries.
        longest: the longest rows that the tries might have given, two of a state. The shape of
            blocks is chosen with them, so that iterations whose lessons differ share a program.
        too_long: states that were left out, because prompt and query have more tokens than fit.
    """

    imitated: list[BestLesson]
    pairs: list[PairLesson]
    longest: list[PairLesson]
    too_long: int


def lessons_of(
    states: Sequence[StatePairs],
    shown: Mapping[StateKey, QueryState],
    prompt: QueryPrompt,
    speech: Speech,
) -> Lessons:
    """The lessons of all states.

    Args:
        states: what is learned at each.
        shown: the states themselves.
        prompt: asks by its bare form.
    """
    lessons = Lessons([], [], _longest(states, shown, prompt, speech), 0)
    too_long = 0
    for each in states:
        if each.at is None or (each.target is None and not each.pairs):
            continue
        opening = speech.scaffold.opening(prompt.messages(shown[each.at].asked_by(0)))
        longest = max(len(query.sampled) for query in each.queries)
        if len(opening) + longest > speech.room:
            too_long += 1
            continue
        turns = [(_turn(opening, query),) for query in each.queries]
        if each.target is not None:
            lessons.imitated.append(BestLesson(turns[each.target], each.at.question))
        lessons.pairs.extend(
            PairLesson(turns[pair.winner], turns[pair.loser], pair.weight, each.at.question)
            for pair in each.pairs
        )
    return dataclasses.replace(lessons, too_long=too_long)


def _longest(
    states: Sequence[StatePairs],
    shown: Mapping[StateKey, QueryState],
    prompt: QueryPrompt,
    speech: Speech,
) -> list[PairLesson]:
    asked = {each.at: each.queries for each in states if each.at is not None and each.queries}
    queries = [query for own in asked.values() for query in own]
    if not queries:
        return []
    longest = max(queries, key=lambda query: len(query.sampled))

    def characters(at: StateKey) -> int:
        return sum(len(text) for _, text in prompt.messages(shown[at].asked_by(0)))

    found = []
    # Texts of more characters have more tokens, or nearly so many.
    for at in sorted(asked, key=characters)[-_MEASURED:]:
        opening = speech.scaffold.opening(prompt.messages(shown[at].asked_by(0)))
        if len(opening) + len(longest.sampled) <= speech.room:
            turn = (_turn(opening, longest),)
            found.append(PairLesson(turn, turn, 1.0, at.question))
    return found


def _turn(opening: np.ndarray, query: Try) -> Turn:
    ids = np.array(query.sampled, np.int32)
    return Turn(opening, ids, np.zeros(len(ids), np.float32), STOP)


def imitation_batch(segments: Sequence[Segment], room: int) -> TokenBatch:
    """The arrays of queries to imitate, an episode each."""
    rows = [_row(segment, number) for number, segment in enumerate(segments)]
    return token_batch(rows, BatchRules(1, (), SCORED, room))


def pairs_batch(pairs: Sequence[PairLesson], room: int) -> TokenBatch:
    """The arrays of pairs: episodes 2g and 2g + 1 are the better and the worse query of pair g."""
    rows = [
        _row(segment, number)
        for number, pair in enumerate(pairs)
        for segment in (pair.better, pair.worse)
    ]
    return token_batch(rows, BatchRules(PAIR, (), SCORED, room))


def _row(segment: Segment, group: int) -> TokenTrajectory:
    return TokenTrajectory(group, 0, 1, (segment,), DONE)


def check_some(count: int, what: str, stage: str) -> None:
    """Refuses a stage that has nothing to learn from."""
    if not count:
        raise InputError(
            f"the tries gave no {what} for the stage {stage}; use more or other prompts "
            "(config.tries.prompts), more tries of each (config.tries.samples) at a higher "
            "config.sampling.temperature, or leave the stage out."
        )
