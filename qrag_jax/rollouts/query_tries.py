"""Played hops of a query writer as tries, and the states that the next hop begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from qrag_jax.environments.episode import Document, Failed
from qrag_jax.environments.queries import (
    SEARCHED,
    STOPPED,
    Pool,
    QueryState,
    Searched,
    grown,
    key_of,
)
from qrag_jax.feedback.pool_scores import PoolScores, QueryRewardConfig
from qrag_jax.feedback.tries import StateKey, Try
from qrag_jax.rollouts.token_episodes import TokenEpisode


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How a try is scored.

    Attributes:
        scores: of the pool after the hop.
        reward: what of it is learned from.
        order: of the pool, one of `queries.ORDERS`.
        gold_by: what a page is known by, one of `queries.KEYS`.
    """

    scores: PoolScores
    reward: QueryRewardConfig
    order: str
    gold_by: str

    def pool_scores(self, state: QueryState, pool: Pool) -> dict[str, float]:
        """Scores of a pool after the state's hop."""
        pages = [key_of(each, self.gold_by) for each in pool]
        return self.scores.of(pages, state.pages, state.hop)


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """One try to make.

    Attributes:
        at: which state.
        state: the state, with the number of the prompt that asks.
        draw: number of the draw among those of this prompt.
    """

    at: StateKey
    state: QueryState
    draw: int


def try_of(asked: Asked, episode: TokenEpisode, scoring: Scoring) -> Try:
    """What a played hop came to; a failure has no reward."""
    state, ended = asked.state, episode.ended
    turns = [turn for segment in episode.segments for turn in segment]
    sampled = turns[-1].sampled.tolist() if turns else []
    log_probs = turns[-1].log_probs.tolist() if turns else []
    pool, scores, reward = state.pool, dict[str, float](), None
    found: tuple[tuple[str, float], ...] = ()
    if isinstance(ended, Failed):
        outcome, query = ended.cause, ""
    else:
        assert isinstance(ended, Searched)
        outcome, query = ended.outcome, ended.answer
        found = tuple((each.id, each.score) for each in ended.found)
        pool = grown(state.pool, ended.found, scoring.order)
        if outcome in (SEARCHED, STOPPED):
            scores = scoring.pool_scores(state, pool)
            reward = scoring.reward.of_hop(scores, searched=outcome == SEARCHED)
    return Try(
        **asked.at._asdict(),
        variant=state.variant,
        draw=asked.draw,
        query=query,
        sampled=tuple(sampled),
        log_probs=tuple(log_probs),
        finish=turns[-1].finish if turns else "",
        outcome=outcome,
        found=found,
        pool=tuple(each.id for each in pool),
        scores=scores,
        reward=reward,
        version=turns[-1].version if turns else "",
    )


Opened = Callable[[QueryState, Sequence[str]], Sequence[Document]]  # (state, ids) → passages


def state_after(state: QueryState, each: Try, opened: Opened) -> QueryState:
    """The state that the next hop begins with, if this try goes on.

    Args:
        opened: gives passages by their ids.
    """
    known = {document.id: document for document in state.pool}
    scores = dict(each.found)
    new = [name for name in each.pool if name not in known]
    for document in opened(state, new):
        known[document.id] = document._replace(score=scores[document.id])
    return state.after(tuple(known[name] for name in each.pool))
