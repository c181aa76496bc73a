"""Rewards by a language model: a metric of its answer, or its verdict as a judge.

Q-RAG (arXiv 2511.07328), LLM answer metric and LLM judge. The model is asked either once, when an
episode is over, or after every step, as in Q-RAG's code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from qrag_jax.feedback.questions import (
    AUTO,
    JUDGE,
    Asking,
    Question,
    fitted,
    judge_request,
    read_answer,
)
from qrag_jax.feedback.rewards import (
    METRICS,
    Log,
    ModelReward,
    Reward,
    Rewards,
    Unscored,
    sums_of_all,
)
from qrag_jax.llm.config import LlmConfig
from qrag_jax.llm.outcomes import ChatRequest, Counters, Failure, Outcome
from qrag_jax.llm.server.opening import open_model
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.extraction import NoAnswer
from qrag_jax.llm.text.generation import Generation
from qrag_jax.metrics.answers import whole_answers

BABILONG = "babilong"  # the rule of `metrics.answers`


def verdict_of(outcome: Outcome, generation: Generation) -> Reward:
    """1 or 0 as a judge says, or why there is no verdict."""
    verdict = outcome if isinstance(outcome, Failure) else generation.verdict(outcome)
    if isinstance(verdict, Failure | NoAnswer):
        return Unscored(verdict.cause, verdict.message)
    return float(verdict)


def model_rewards(
    ask: Callable[[Sequence[ChatRequest]], list[Outcome]],
    how: Generation,
    metric: str,
    scale: float,
    questions: Sequence[Question],
) -> list[Reward]:
    """The rewards by a model's answers, times `scale` (Q-RAG's `reward_scaling`).

    `ask` never raises for a failure; `metric` is a name in `METRICS`.
    """
    score = METRICS[metric]
    filled = [fitted(question, how) for question in questions]
    fits = [each for each in filled if not isinstance(each, Failure)]
    requests = [how.request(each.messages, how.reads_answer) for each in fits]
    came = iter(ask(requests) if requests else [])
    rewards: list[Reward] = []
    judged: dict[int, ChatRequest] = {}
    judge = None if score is not None else prompts.load(JUDGE)
    for place, (question, each) in enumerate(zip(questions, filled, strict=True)):
        read = read_answer(question, each if isinstance(each, Failure) else next(came), how)
        if isinstance(read, Failure | NoAnswer):
            rewards.append(Unscored(read.cause, read.message))
            continue
        answer, scores = read
        rewards.append(scale * score(scores) if score is not None else 0.0)
        if judge is not None:
            right = whole_answers(question.rule, question.gold)
            judged[place] = judge_request(judge, question.question, right, answer, how)
    for place, said in zip(judged, ask([*judged.values()]) if judged else []):
        verdict = verdict_of(said, how)
        rewards[place] = verdict if isinstance(verdict, Unscored) else scale * verdict
    return rewards


@contextlib.contextmanager
def open_service(
    reward: ModelReward,
    llm: LlmConfig,
    workdir: Path,
    log: Log,
    *,
    never_terminate: bool,
    seed: int,
    host: int = 0,
) -> Iterator[Rewards]:
    """Opens the server that `config.llm` asks for and its client; both end with the block.

    The server starts while the caller continues; `ready` waits for it. For `seed` see `open_model`;
    with `never_terminate` an episode continues after it is complete.
    """
    with open_model(llm, workdir, seed, log, host) as model:

        def ask(requests: Sequence[ChatRequest]) -> list[Outcome]:
            assert model.client is not None
            return model.client.ask_blocking(requests)

        def counts() -> dict[str, float]:
            assert model.client is not None
            return metrics_of_all(model.client.counters())

        prompt = reward.prompt
        text = prompts.load(prompt).fingerprint if prompt != AUTO else ""
        rewards = Rewards(
            partial(model_rewards, ask, model.generation, reward.name, reward.scale),
            Asking(prompt, BABILONG if reward.name == "babilong_em" else AUTO).of,
            reward,
            log,
            ends=not never_terminate,
            batches=reward.staleness + 1,
            lost=model.lost,
            counts=counts,
            provenance={**model.provenance, "config.reward.prompt": f"{prompt} {text}".strip()},
            ready=model.wait,
        )
        with contextlib.closing(rewards):
            yield rewards


def metrics_of_all(own: Counters) -> dict[str, float]:
    """The counters of all hosts' clients together, as metrics; all hosts call this together.

    Counts, tokens and seconds are sums; percentiles are those of all latencies.
    """
    return Counters(sums_of_all(own)).as_metrics()
