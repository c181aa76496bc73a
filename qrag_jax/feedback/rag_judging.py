"""Rewards that models give: a verdict on an answer, and scores of the passages of a search."""

from __future__ import annotations

import json
from collections.abc import Sequence

from qrag_jax.environments.episode import Seen
from qrag_jax.feedback.language_model import Unscored
from qrag_jax.feedback.questions import judge_request
from qrag_jax.feedback.rag import Gold
from qrag_jax.llm.outcomes import ChatRequest, Failure, Outcome, RerankRequest
from qrag_jax.llm.text.extraction import NoAnswer
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import Prompt
from qrag_jax.metrics.answers import normalise, whole_answers


def correctness_request(
    prompt: Prompt, gold: Gold, answer: str, generation: Generation
) -> ChatRequest | None:
    """Asks a judge about an answer; None for an answer without a word, which is wrong.

    Args:
        prompt: "judge", or another one with its slots.
        gold: what is right.
        answer: the episode's.
        generation: how verdicts are sampled and read.
    """
    if not normalise(answer):
        return None
    right = whole_answers(gold.rule, gold.answers)
    return judge_request(prompt, gold.question, right, answer, generation)


def correctness(outcome: Outcome, generation: Generation) -> float | Unscored:
    """1 or 0 as the judge says, or why there is no verdict."""
    verdict = outcome if isinstance(outcome, Failure) else generation.verdict(outcome)
    if isinstance(verdict, Failure | NoAnswer):
        return Unscored(verdict.cause, verdict.message)
    return float(verdict)


def relevance_request(sub_query: str, passages: Sequence[Seen]) -> RerankRequest | None:
    """Asks a reranking model about the passages of a search; None if there are none."""
    texts = tuple(passage.whole for passage in passages)
    return RerankRequest(sub_query, texts) if texts else None


def relevance(outcome: Outcome | None) -> float | Unscored:
    """The mean score of the passages; 0 if there are none.

    Models score in [0, 1]; another score is kept in that range.
    """
    if outcome is None:
        return 0.0
    if isinstance(outcome, Failure):
        return Unscored(outcome.cause, outcome.message)
    scores = [min(max(float(score), 0.0), 1.0) for score in json.loads(outcome.text)]
    return sum(scores) / len(scores)
