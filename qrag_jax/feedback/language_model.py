"""Rewards from a language model that answers questions from the chunks of an episode.

The reward is a metric of the answer, or the model's verdict as a judge (Q-RAG, arXiv 2511.07328,
LLM answer metric and LLM judge). `feedback.completion` says which steps get the rewards. If there
is no reward, the result is `Unscored`, never 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from qrag_jax.errors import InputError, check_known
from qrag_jax.feedback.deferred_reward import DeferredReward
from qrag_jax.feedback.questions import (
    JUDGE,
    Question,
    fitted,
    judge_request,
    read_answer,
)
from qrag_jax.llm.outcomes import ChatRequest, Failure, Outcome
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.extraction import NO_ANSWER_CAUSES, NoAnswer
from qrag_jax.llm.text.generation import Generation
from qrag_jax.metrics.answers import Scores, whole_answers

BABILONG = "babilong"  # the rule of `metrics.answers`


class Asks(Protocol):
    """Asks a language model: one outcome per request, in order; never raises for a failure."""

    def ask_blocking(self, requests: Sequence[ChatRequest]) -> list[Outcome]:
        """Asks, and waits for the outcomes."""
        ...


# Causes that asking again does not change: the prompt is too long, the server's filter withholds
# the answer, the model calls a tool, or no answer can be read from the text.
# A user's own code (`feedback.own_reward`) raised, gave no reward, or something that is no number.
OWN_CAUSES = RAISED, NO_REWARD, NO_NUMBER = ("raised", "no_reward", "no_number")
PERMANENT = ("too_long", "filtered", "tool_call", *NO_ANSWER_CAUSES, *OWN_CAUSES)


@dataclasses.dataclass(frozen=True)
class Unscored:
    """Why an episode has no reward; `cause` is a short word for counting."""

    cause: str
    message: str

    @property
    def permanent(self) -> bool:
        """Whether asking again would fail again."""
        return self.cause in PERMANENT


Reward = float | Unscored
# How the reward is made from an answer's scores; None: a judge decides.
METRICS: dict[str, Callable[[Scores], float] | None] = {
    "answer_em": lambda scores: scores.em,
    "answer_f1": lambda scores: scores.f1,
    "babilong_em": lambda scores: scores.em,
    "judge": None,
}


@dataclasses.dataclass(frozen=True)
class ModelReward(DeferredReward):
    """Section `reward`, for rewards from the language model of section `llm`."""

    prompt: str = "auto"  # name in qrag_jax/llm/text/templates, or a .txt file; auto: by the data

    def __post_init__(self) -> None:
        check_known("reward", self, "name", METRICS)
        super().__post_init__()


class LanguageModelFeedback:
    """Scores batches of questions on separate threads, while the caller continues.

    Attributes:
        metric: a name in `METRICS`.
        scale: factor on the reward (Q-RAG's `reward_scaling`).
        generation: how answers are sampled and read.
    """

    def __init__(
        self,
        asks: Asks,
        generation: Generation,
        metric: str,
        scale: float = 1.0,
        batches_at_once: int = 2,
    ) -> None:
        """
        Raises:
            InputError: the metric is unknown.
        """
        if metric not in METRICS:
            raise InputError(f"the reward {metric!r} is unknown; use one of {', '.join(METRICS)}")
        self.metric, self.scale, self.generation = metric, scale, generation
        self._asks, self._judge = asks, prompts.load(JUDGE)
        self._pool = ThreadPoolExecutor(batches_at_once, thread_name_prefix="feedback")

    def begin(
        self, questions: Sequence[Question], known: Sequence[Reward] | None = None
    ) -> Future[list[Reward]]:
        """Starts to score; the future has one reward per question, in order.

        Args:
            questions: what the model is asked.
            known: rewards of an earlier call. Only the questions without a reward whose failure may
                pass are asked again.
        """
        return self._pool.submit(self._rewards, questions, known)

    def close(self) -> None:
        """Cancels batches that have not begun; the threads end with their requests."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _rewards(
        self, questions: Sequence[Question], known: Sequence[Reward] | None
    ) -> list[Reward]:
        rewards: list[Reward | None] = [None] * len(questions)
        for place, reward in enumerate(known or ()):
            asks_again = isinstance(reward, Unscored) and not reward.permanent
            rewards[place] = None if asks_again else reward
        todo = [place for place, reward in enumerate(rewards) if reward is None]
        requests, drawn = (
            [fitted(questions[place], self.generation) for place in todo],
            self.generation,
        )
        outcomes = self._ask(
            [
                made
                if isinstance(made, Failure)
                else drawn.request(made.messages, drawn.reads_answer)
                for made in requests
            ]
        )
        answers: dict[int, str] = {}
        for place, outcome in zip(todo, outcomes, strict=True):
            read = read_answer(questions[place], outcome, self.generation)
            if isinstance(read, Failure | NoAnswer):
                rewards[place] = Unscored(read.cause, read.message)
                continue
            answers[place], scores = read
            score = METRICS[self.metric]
            if score is not None:
                rewards[place] = self.scale * score(scores)
        if METRICS[self.metric] is None:
            self._judge_answers(questions, answers, rewards)
        complete = [reward for reward in rewards if reward is not None]
        assert len(complete) == len(questions)
        return complete

    def _judge_answers(
        self, questions: Sequence[Question], answers: dict[int, str], rewards: list[Reward | None]
    ) -> None:
        """Asks the judge whether each answer is right, and fills in the rewards."""
        requests = [
            judge_request(
                self._judge,
                questions[place].question,
                whole_answers(questions[place].rule, questions[place].gold),
                answer,
                self.generation,
            )
            for place, answer in answers.items()
        ]
        for place, outcome in zip(answers, self._ask(requests), strict=True):
            verdict = outcome if isinstance(outcome, Failure) else self.generation.verdict(outcome)
            if isinstance(verdict, Failure | NoAnswer):
                rewards[place] = Unscored(verdict.cause, verdict.message)
            else:
                rewards[place] = self.scale * verdict

    def _ask(self, wanted: Sequence[ChatRequest | Failure]) -> list[Outcome]:
        """Asks the requests; returns the outcomes in order, a `Failure` as it is."""
        sent = [request for request in wanted if not isinstance(request, Failure)]
        came = iter(self._asks.ask_blocking(sent) if sent else ())
        return [each if isinstance(each, Failure) else next(came) for each in wanted]
