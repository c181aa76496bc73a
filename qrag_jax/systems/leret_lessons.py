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


class PairLesson(NamedTuple):
    """A pair to learn from.

    Attributes:
        better, worse: the two queries of one state, behind the same prompt.
        weight: of the pair in the loss.
    """

    better: Segment
    worse: Segment
    weight: float


@dataclasses.dataclass(frozen=True)
class Lessons:
    """What one iteration learns from.

    Attributes:
        imitated: a prompt and the query that is imitated, each.
        pairs: of queries.
        too_long: states that were left out, because prompt and query have more tokens than fit.
    """

    imitated: list[Segment]
    pairs: list[PairLesson]
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
    lessons = Lessons([], [], 0)
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
            lessons.imitated.append(turns[each.target])
        lessons.pairs.extend(
            PairLesson(turns[pair.winner], turns[pair.loser], pair.weight) for pair in each.pairs
        )
    return dataclasses.replace(lessons, too_long=too_long)


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
    """Refuses a stage that has nothing to learn from.

    Raises:
        InputError: there is nothing.
    """
    if not count:
        raise InputError(
            f"the tries gave no {what} for the stage {stage}; use more or other prompts "
            "(config.tries.prompts), more tries of each (config.tries.samples) at a higher "
            "config.sampling.temperature, or leave the stage out."
        )
