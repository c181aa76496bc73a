"""Rewards of played episodes: of their answers and searches, and of models that judge them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from qrag_jax.environments.rag.episode import Finished, Seen
from qrag_jax.feedback import rag_judging
from qrag_jax.feedback.language_model import Unscored
from qrag_jax.feedback.questions import JUDGE
from qrag_jax.feedback.rag import LLM, OF_HOPS, RELEVANCE, Gold, Mixture, Scored
from qrag_jax.llm.outcomes import Outcome, Request
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.generation import Generation
from qrag_jax.policies.plackett_luce import NOTHING
from qrag_jax.retrieval.protocol import Corpus
from qrag_jax.rollouts.agents import Asks, Checks, Episode
from qrag_jax.rollouts.hop_batch import Rewarded
from qrag_jax.rollouts.pool_search import Drawn

_LOOK_EVERY = 0.1  # seconds between looks for a signal to stop


@dataclasses.dataclass(frozen=True)
class Judge:
    """A language model that says whether answers are right."""

    model: Asks
    generation: Generation


def reward_names(mixture: Mixture) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the rewards of episodes and of searches, in the order of `Rewarded`."""
    of_hop = tuple(name for name in mixture.weights if name in (*OF_HOPS, RELEVANCE))
    return tuple(name for name in mixture.weights if name not in of_hop), of_hop


@dataclasses.dataclass(frozen=True)
class AgentRewards:
    """Gives episodes their rewards.

    Attributes:
        mixture: which ones.
        corpus: the passages that were searched.
        judge: for the reward `llm`.
        reranker: for the reward `relevance`.
    """

    mixture: Mixture
    corpus: Corpus
    judge: Judge | None = None
    reranker: Asks | None = None

    def scores(
        self, golds: Sequence[Gold], episodes: Sequence[Episode], watch: Checks
    ) -> list[Scored | Unscored]:
        """The rewards of each episode, without weights, or why it has none.

        Args:
            golds: what is right, for each episode.
            watch: looked at while models are asked.
        """
        verdicts = self._verdicts(golds, episodes, watch)
        relevance = self._relevance(episodes, watch)
        return [
            self.mixture.score(
                gold, each.ended, [hop.names for hop in each.searches], verdict, of_hops
            )
            for gold, each, verdict, of_hops in zip(
                golds, episodes, verdicts, relevance, strict=True
            )
        ]

    def rewarded(
        self, golds: Sequence[Gold], episodes: Sequence[Episode], watch: Checks
    ) -> list[Rewarded]:
        """What is learned from each episode; one without rewards is masked."""
        of_episode, of_hop = reward_names(self.mixture)
        found = []
        for each, scored in zip(episodes, self.scores(golds, episodes, watch), strict=True):
            if isinstance(scored, Unscored):
                found.append(Rewarded(each.searches, None))
                continue
            by_hop = [[scored.hops[name][hop] for name in of_hop] for hop in range(scored.searches)]
            whole = [scored.episode[name] for name in of_episode]
            found.append(Rewarded(each.searches, whole, by_hop))
        return found

    def _verdicts(
        self, golds: Sequence[Gold], episodes: Sequence[Episode], watch: Checks
    ) -> list[float | Unscored | None]:
        """Of the judge on each answer; None where none is needed."""
        judge = self.judge
        if judge is None or LLM not in self.mixture.weights:
            return [None] * len(episodes)
        prompt = prompts.load(JUDGE)
        requests: list[Request | None] = [
            rag_judging.correctness_request(prompt, gold, each.ended.answer, judge.generation)
            if isinstance(each.ended, Finished)
            else None
            for gold, each in zip(golds, episodes, strict=True)
        ]
        return [
            None if outcome is None else rag_judging.correctness(outcome, judge.generation)
            for outcome in _asked(judge.model, requests, watch)
        ]

    def _relevance(
        self, episodes: Sequence[Episode], watch: Checks
    ) -> list[tuple[float | Unscored, ...]]:
        """Of the passages of each search of the finished episodes."""
        if self.reranker is None or RELEVANCE not in self.mixture.weights:
            return [()] * len(episodes)
        searches = [
            [*zip(each.ended.history, each.searches, strict=True)]
            if isinstance(each.ended, Finished)
            else []
            for each in episodes
        ]
        requests: list[Request | None] = [
            rag_judging.relevance_request(hop.sub_query, self._seen(drawn))
            for own in searches
            for hop, drawn in own
        ]
        outcomes: Iterator[Any] = iter(_asked(self.reranker, requests, watch))
        return [tuple(rag_judging.relevance(next(outcomes)) for _ in own) for own in searches]

    def _seen(self, drawn: Drawn) -> list[Seen]:
        """The passages that the agent read."""
        taken = drawn.pool[drawn.actions[drawn.actions != NOTHING]]
        return [Seen(p.name, p.text, p.title) for p in self.corpus.passages(taken)]


def _asked(model: Asks, requests: Sequence[Request | None], watch: Checks) -> list[Outcome | None]:
    """The outcomes of the requests, None for None."""
    sent = [each for each in requests if each is not None]
    future = model.submit(sent)
    try:
        while not concurrent.futures.wait([future], _LOOK_EVERY).done:
            watch.check()
    except BaseException:
        future.cancel()
        raise
    outcomes = iter(future.result())
    return [None if each is None else next(outcomes) for each in requests]
