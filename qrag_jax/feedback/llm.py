"""Rewards by a language model: a metric of its answer, or its verdict as a judge.

Q-RAG (arXiv 2511.07328), LLM answer metric and LLM judge. The model is asked either once, when an
episode is over, or after every step, as in Q-RAG's code. If there is no answer (the call failed,
the prompt is too long, the text cannot be read), the result is a value with a `cause`, never a
wrong answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from qrag_jax.data.records import distinct
from qrag_jax.data.sample import Sample
from qrag_jax.data.sources import BABILONG, answer_rule
from qrag_jax.errors import InputError
from qrag_jax.feedback.rewards import METRICS, Log, Reward, RewardConfig, Rewards, sums_of_all
from qrag_jax.llm.config import LlmConfig
from qrag_jax.llm.outcomes import ChatRequest, Counters, Failure, Outcome, reads_by
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import Prompt
from qrag_jax.metrics import answers
from qrag_jax.metrics.answers import Scores

AUTO = "auto"
JUDGE = "judge"


@dataclasses.dataclass(frozen=True)
class Question:
    id: str  # the sample's id
    question: str  # the question's text
    # (index in the document, text) pairs in the order taken, the oldest first; for prompts that
    # tell a story, in the order of the document
    chunks: tuple[tuple[int, str], ...]
    gold: tuple[str, ...]  # the right answers
    rule: str  # how the answer is scored
    prompt: Prompt  # how the question is asked
    hops: int  # number of facts that the answer needs
    type: str  # of the question; "" if unknown


@functools.cache
def _prompt(name: str) -> Prompt:
    prompt = prompts.load(name)
    prompt.with_chunks("", [])  # check that it can be filled
    return prompt


@dataclasses.dataclass(frozen=True)
class Asking:
    """How the questions of data sets are asked and scored."""

    # A name or a file; "auto": that of the task for BABILong documents, "open_qa" for others
    prompt: str = AUTO
    metric: str = AUTO  # a rule of `metrics.answers`; "auto": that of the data set

    def of(self, sample: Sample, taken: Sequence[int]) -> Question:
        """The question of a sample, with the chunks that were taken; see `question`.

        `taken` are chunk indices in the order taken; an index beyond the chunks is STOP.
        """
        chunks = [(index, sample.chunks[index]) for index in taken if index < len(sample.chunks)]
        return self.question(sample.source, sample, chunks)

    def question(
        self, place: str, sample: Sample, chunks: Sequence[tuple[int, str]], type_: str = ""
    ) -> Question:
        """The question of one sample, with (index, text) pairs of chunks in the order taken.

        `place` is for errors. Of MuSiQue and BABILong, ids say the hops and the type.
        """
        right = distinct(sample.answers)
        if not right:
            raise InputError(f"{place}: sample {sample.id} has no right 'answer'; give one")
        usual = answer_rule(sample.source)
        rule = usual if self.metric == AUTO else self.metric
        try:
            answers.score(rule, sample.id, sample.question, "", right)  # check that it can be
        except InputError as error:
            raise InputError(f"{place}: sample {sample.id}: {error}") from None
        named = {"babilong", "musique"} & {rule, usual}
        kind, hops_of_id = answers.kind_of(sample.id) if named else ("", 0)
        task = kind if "babilong" in named and not hops_of_id else ""
        name = self.prompt if self.prompt != AUTO else f"babilong_{task}" if task else "open_qa"
        prompt = _prompt(name)
        return Question(
            id=sample.id,
            question=sample.question,
            chunks=tuple(sorted(chunks) if prompt.chunk_slot == "facts" else chunks),
            gold=right,
            rule=rule,
            prompt=prompt,
            hops=hops_of_id or len(sample.support),
            type=type_ or kind,
        )


def fitted(question: Question, generation: Generation) -> prompts.Fitted | Failure:
    """Fills the prompt with as much of the chunks as the token budget allows."""
    texts = [text for _, text in question.chunks]
    budget = generation.max_prompt_tokens if generation.count else 0
    count = generation.count or (lambda messages: 0)
    return prompts.fit(question.prompt, question.question, texts, budget, count)


def read_answer(
    question: Question, outcome: Outcome, generation: Generation
) -> tuple[str, Scores] | Failure:
    answer = outcome if isinstance(outcome, Failure) else generation.final_answer(outcome)
    if isinstance(answer, Failure):
        return answer
    scored = answers.score(question.rule, question.id, question.question, answer, question.gold)
    return answer, scored


def judge_request(
    prompt: Prompt, question: str, golds: Sequence[str], prediction: str, generation: Generation
) -> ChatRequest:
    texts = {"question": question, "golds": "; ".join(golds), "prediction": prediction}
    return generation.request(prompt.fill(texts), reads_by(generation.verdict))


# ---------------------------------------------------------------- rewards


def verdict_of(outcome: Outcome, generation: Generation) -> Reward:
    """1 or 0 as a judge says, or why there is no verdict."""
    verdict = outcome if isinstance(outcome, Failure) else generation.verdict(outcome)
    return verdict if isinstance(verdict, Failure) else float(verdict)


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
    field = METRICS[metric]
    filled = [fitted(question, how) for question in questions]
    fits = [f for f in filled if not isinstance(f, Failure)]
    requests = [how.request(f.messages, how.reads_answer) for f in fits]
    came = iter(ask(requests) if requests else [])
    rewards: list[Reward] = []
    judged: dict[int, ChatRequest] = {}
    judge = None if field else prompts.load(JUDGE)
    for place, (question, prompt) in enumerate(zip(questions, filled, strict=True)):
        read = read_answer(question, prompt if isinstance(prompt, Failure) else next(came), how)
        if isinstance(read, Failure):
            rewards.append(read)
            continue
        answer, scores = read
        rewards.append(scale * getattr(scores, field) if field else 0.0)
        if judge is not None:
            right = answers.whole_answers(question.rule, question.gold)
            judged[place] = judge_request(judge, question.question, right, answer, how)
    for place, said in zip(judged, ask([*judged.values()]) if judged else []):
        verdict = verdict_of(said, how)
        rewards[place] = verdict if isinstance(verdict, Failure) else scale * verdict
    return rewards


@contextlib.contextmanager
def open_service(
    reward: RewardConfig,
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
    from qrag_jax.llm.server.server import open_model  # what scores answers starts none

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


def metrics_of_all(counters: Counters) -> dict[str, float]:
    """The counters of all hosts' clients together, as metrics; all hosts call this together.

    Counts, tokens and seconds are sums; percentiles are those of all latencies.
    """
    return Counters(float, sums_of_all(counters)).as_metrics()
