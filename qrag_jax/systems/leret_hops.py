"""Plays questions hop by hop, by a query writer or by a rule, and scores the pool of each hop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from qrag_jax.environments.query_writing.state import SEARCHED, STOPPED, QueryState, grown
from qrag_jax.environments.tools.episode import Look
from qrag_jax.evaluators.query_scores import HopRow
from qrag_jax.feedback.tries import StateKey
from qrag_jax.llm.outcomes import Failure
from qrag_jax.rollouts.corpus_library import CorpusLibrary
from qrag_jax.rollouts.draw_keys import draw_keys
from qrag_jax.rollouts.query_tries import Asked, Scoring, state_after, try_of
from qrag_jax.rollouts.token_episodes import TokenEpisode, TokenStart

Play = Callable[[Sequence[TokenStart]], list[TokenEpisode]]
Rows = list[list[HopRow]]  # by hop, then by question


@dataclasses.dataclass(frozen=True)
class HopPlayer:
    """Plays all hops of questions side by side.

    Attributes:
        hops: how many.
        k: passages that a query finds.
        library: what is searched.
        scoring: of pools.
        seed: of the draws.
    """

    hops: int
    k: int
    library: CorpusLibrary
    scoring: Scoring
    seed: int

    def by_model(
        self, states: Sequence[QueryState], play: Play, stream: int, variant: int = 0
    ) -> Rows:
        """The course of each question by a model.

        A query that is empty, too long or failed finds nothing, and the next hop asks again.

        Args:
            states: of the first hop.
            play: plays tries by the model.
            stream: another one has other draws.
            variant: number of the prompt that asks.
        """
        now, rows = [*states], list[list[HopRow]]()
        ended = [False] * len(now)
        for hop in range(1, self.hops + 1):
            before, going = [*now], [place for place, over in enumerate(ended) if not over]
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), stream), hop)
            keys = np.asarray(draw_keys(key, np.array(going, np.uint32), 1))[:, 0]
            asked = [Asked(StateKey(p, hop, 0), now[p].asked_by(variant), 0) for p in going]
            starts = [TokenStart(a.state, key) for a, key in zip(asked, keys, strict=True)]
            episodes = play(starts) if starts else []
            row = [self._row(each, each) for each in now]
            for place, each, episode in zip(going, asked, episodes, strict=True):
                made = try_of(each, episode, self.scoring)
                ended[place] = made.outcome == STOPPED
                after = now[place]
                if made.outcome == SEARCHED:
                    grown_state = state_after(after, made, self.library.named)
                    now[place] = after = dataclasses.replace(grown_state, hop=hop)
                read = sum(len(t.observed) for s in episode.segments for t in s)
                query = made.query
                more = {"made": made, "read": read, "outcome": made.outcome}
                row[place] = self._row(before[place], after, query, **more)
            now = [each.after(each.pool) for each in now]
            rows.append(row)
        return rows

    def by_rule(self, states: Sequence[QueryState], write: Callable[[QueryState], str]) -> Rows:
        """The course of each question where a rule writes the queries."""
        now, rows = [*states], list[list[HopRow]]()
        for _ in range(self.hops):
            before, queries = [*now], [write(each) for each in now]
            asked = [(each, Look(query, self.k)) for each, query in zip(now, queries)]
            found = self.library.look(asked)
            outcomes = [each.cause if isinstance(each, Failure) else "" for each in found]
            for place, documents in enumerate(found):
                if not isinstance(documents, Failure):
                    pool = grown(now[place].pool, documents, self.scoring.order)
                    now[place] = dataclasses.replace(now[place], pool=pool)
            every = zip(before, now, queries, outcomes, strict=True)
            rows.append(
                [self._row(one, new, text, outcome=cause) for one, new, text, cause in every]
            )
            now = [each.after(each.pool) for each in now]
        return rows

    def _row(self, before: QueryState, after: QueryState, query: str = "", **more: Any) -> HopRow:
        return HopRow(self.scoring.pool_scores(before, after.pool), query, before, after, **more)
