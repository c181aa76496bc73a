"""Rewards that come from outside the device: a language model's answers, or a user's own function.

The reward of a model is a metric of its answer, or its verdict as a judge (Q-RAG, arXiv 2511.07328,
LLM answer metric and LLM judge). It is asked either once, when an episode is over, or after every
step, as in Q-RAG's code (`Completion`). If there is no reward, the result is `Unscored`, never 0:
the episode is asked about again, or left out and counted.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from qrag_jax.data.sample import LazySamples, Sample
from qrag_jax.errors import (
    FeedbackLost,
    Natural,
    Positive,
    Share,
)
from qrag_jax.feedback.facts import FactReward
from qrag_jax.feedback.questions import (
    AUTO,
    JUDGE,
    Asking,
    Question,
    fitted,
    judge_request,
    read_answer,
)
from qrag_jax.llm import counters
from qrag_jax.llm.config import LlmConfig, ServedConfig
from qrag_jax.llm.outcomes import ChatRequest, Failure, Outcome
from qrag_jax.llm.server.opening import LOOK_EVERY, PendingModel, Place, open_model
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.extraction import NO_ANSWER_CAUSES, NoAnswer
from qrag_jax.llm.text.generation import Generation
from qrag_jax.metrics.answers import Scores, whole_answers
from qrag_jax.metrics.summaries import causes_text
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import StopSignal

BABILONG = "babilong"  # the rule of `metrics.answers`
LAZY_SAMPLES = 20  # of a lazy data set, checked before any is played
OF_MODEL = (
    "change config.llm.max_tokens, config.llm.cut_off, config.llm.max_prompt_tokens or "
    "config.reward.prompt"
)
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0  # seconds, before asking again
# A user's own code (`feedback.own`) raised, gave no reward, or something that is no number.
OWN_CAUSES = RAISED, NO_REWARD, NO_NUMBER = ("raised", "no_reward", "no_number")
# Asking again does not change these: the prompt is too long, the server's filter withholds the
# answer, the model calls a tool, no answer can be read from the text, or a user's own code failed.
PERMANENT = ("too_long", "filtered", "tool_call", *NO_ANSWER_CAUSES, *OWN_CAUSES)

Log = Callable[[str], None]
T = TypeVar("T")


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


def verdict_of(outcome: Outcome, generation: Generation) -> Reward:
    """1 or 0 as a judge says, or why there is no verdict."""
    verdict = outcome if isinstance(outcome, Failure) else generation.verdict(outcome)
    if isinstance(verdict, Failure | NoAnswer):
        return Unscored(verdict.cause, verdict.message)
    return float(verdict)


# ---------------------------------------------------------------- waiting and asking again


class Checks(Protocol):
    """Says whether to go on, such as a `StopSignal`."""

    def check(self) -> None:
        """Raises an error if not."""
        ...


@dataclasses.dataclass(frozen=True)
class Watch:
    """Looks at the signal, and whether a server was given up."""

    stop: Checks
    lost: Callable[[], str]  # why the server was given up; "" if it was not

    def check(self) -> None:
        """See `Checks`."""
        self.stop.check()
        if why := self.lost():
            raise FeedbackLost(why)


def pause(seconds: float, watch: Checks) -> None:
    """Waits, and looks at the signal meanwhile."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        watch.check()
        time.sleep(LOOK_EVERY)


@dataclasses.dataclass(frozen=True)
class Patience:
    """Tries again what failed, while more than the allowed share of a batch has failed.

    A server that is down for a while costs time, and no questions: episodes without a reward are
    masked only where they are few.

    Attributes:
        what, again: of the episodes, for the lines.
    """

    most: float  # share of a batch that may fail
    watch: Checks  # looked at during a pause
    log: Log  # receives lines for people
    remedy: str  # what to do if trying again is in vain
    broken: type  # the class of a failure, which has a cause and a message
    hopeless: Sequence[str] = PERMANENT  # causes that trying again, even later, does not change
    what: str = "broke"
    again: str = "playing them again"

    def play(self, starts: Sequence[Any], play: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
        """The episodes of these starts, of which at most the allowed share is broken."""

        def retry(found: list[Any], places: list[int]) -> list[Any]:
            again = dict(zip(places, play([starts[place] for place in places]), strict=True))
            return [again.get(place, each) for place, each in enumerate(found)]

        return self.few_failed(play(starts), retry)

    def few_failed(self, found: list[T], retry: Callable[[list[T], list[int]], list[T]]) -> list[T]:
        """What was got, of which at most the allowed share has failed.

        `found` may have failures in it, or things that `ended` in one; `retry` takes all of it and
        the places of the failures, and gives all of it, these tried again. Raises `FeedbackLost`
        where too many would fail again.
        """
        seconds = FIRST_PAUSE
        while True:
            ends = [getattr(each, "ended", each) for each in found]
            failed: dict[int, Any] = {
                n: each for n, each in enumerate(ends) if isinstance(each, self.broken)
            }
            if len(failed) <= self.most * len(found):
                return found
            hopeless = [each for each in failed.values() if each.cause in self.hopeless]
            if len(hopeless) > self.most * len(found):
                raise FeedbackLost(
                    f"{len(hopeless)} of {len(found)} episodes {self.what}, and {self.again} would "
                    f"change nothing ({_causes(hopeless)}); {self.remedy}"
                )
            self.log(
                f"paused: {len(failed)} of {len(found)} episodes {self.what} "
                f"({_causes([*failed.values()])}); {self.again} in {seconds:.0f} s. Stopped and "
                "given again, the command goes on from here, with other values of config.llm too."
            )
            pause(seconds, self.watch)
            seconds = min(2 * seconds, LONGEST_PAUSE)
            found = retry(found, [*failed])


def _causes(failed: Sequence[Any]) -> str:
    """How many failed for which cause, and one message."""
    return f"{causes_text(failed)}; for example: {failed[0].message.rstrip('.')}"


# ---------------------------------------------------------------- settings


@dataclasses.dataclass(frozen=True)
class DeferredReward(FactReward):
    """What rewards of a language model and of a user's own code have in common.

    The fields of `FactReward` are for the returns of evaluations that ask neither.
    """

    scale: Positive = 1.0  # factor on the reward
    # None: ask once, at the end. A number: ask after every step; the first reward (times scale)
    # that is not below this number completes the episode, and later steps get no reward
    completion_threshold: Positive | None = None
    # K: updates between playing an episode and learning from it; the rewards may be found
    # meanwhile, while the device continues. 0: strictly on-policy
    staleness: Natural = 1
    max_failure_share: Share = 0.5  # share of a batch without rewards above which the run pauses


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


# ---------------------------------------------------------------- scores of questions


class Asks(Protocol):
    """Asks a language model: one outcome per request, in order; never raises for a failure."""

    def ask_blocking(self, requests: Sequence[ChatRequest]) -> list[Outcome]:
        """Asks, and waits for the outcomes."""
        ...


@dataclasses.dataclass(frozen=True)
class LlmReward:
    """Scores questions by a language model."""

    asks: Asks  # the model
    generation: Generation  # how answers are sampled and read
    metric: str  # a name in `METRICS`
    scale: float = 1.0  # factor on the reward (Q-RAG's `reward_scaling`)

    def __call__(self, questions: Sequence[Question]) -> list[Reward]:
        """One reward per question, in order."""
        how, score = self.generation, METRICS[self.metric]
        filled = [fitted(question, how) for question in questions]
        outcomes = self._ask(
            [
                each if isinstance(each, Failure) else how.request(each.messages, how.reads_answer)
                for each in filled
            ]
        )
        rewards: list[Reward] = []
        answers: dict[int, str] = {}
        for place, (question, outcome) in enumerate(zip(questions, outcomes, strict=True)):
            read = read_answer(question, outcome, how)
            if isinstance(read, Failure | NoAnswer):
                rewards.append(Unscored(read.cause, read.message))
                continue
            answers[place], scores = read
            rewards.append(self.scale * score(scores) if score is not None else 0.0)
        if score is None:
            for place, verdict in self._verdicts(questions, answers).items():
                rewards[place] = verdict
        return rewards

    def _verdicts(
        self, questions: Sequence[Question], answers: Mapping[int, str]
    ) -> dict[int, Reward]:
        """The judge's rewards of the answers, by their places."""
        judge = prompts.load(JUDGE)
        requests = [
            judge_request(
                judge,
                questions[place].question,
                whole_answers(questions[place].rule, questions[place].gold),
                answer,
                self.generation,
            )
            for place, answer in answers.items()
        ]
        verdicts = (verdict_of(each, self.generation) for each in self._ask(requests))
        return {
            place: each if isinstance(each, Unscored) else self.scale * each
            for place, each in zip(answers, verdicts, strict=True)
        }

    def _ask(self, wanted: Sequence[ChatRequest | Failure]) -> list[Outcome]:
        """Asks the requests; returns the outcomes in order, a `Failure` as it is."""
        sent = [request for request in wanted if not isinstance(request, Failure)]
        came = iter(self.asks.ask_blocking(sent) if sent else ())
        return [each if isinstance(each, Failure) else next(came) for each in wanted]


class Scorer:
    """Scores batches of questions on threads, while the caller continues.

    `score` gives one reward per question; so many `batches` are scored at the same time.
    """

    def __init__(self, score: Callable[[Sequence[Any]], list[Reward]], batches: int = 1) -> None:
        self._score = score
        self._pool = ThreadPoolExecutor(batches, thread_name_prefix="feedback")

    def begin(
        self, questions: Sequence[Any], known: Sequence[Reward] | None = None
    ) -> Future[list[Reward]]:
        """Starts to score; the future has one reward per question, in order.

        Of questions with the rewards `known`, only those whose failure may pass are asked again.
        """
        return self._pool.submit(self._rewards, questions, known)

    def close(self) -> None:
        """Cancels batches that have not begun; the threads end with their requests."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _rewards(self, questions: Sequence[Any], known: Sequence[Reward] | None) -> list[Reward]:
        if known is None:
            return self._score(questions)
        rewards = [*known]
        lost = [
            place
            for place, each in enumerate(rewards)
            if isinstance(each, Unscored) and not each.permanent
        ]
        for place, reward in zip(lost, self._score([questions[p] for p in lost]), strict=True):
            rewards[place] = reward
        return rewards


# ---------------------------------------------------------------- rewards of episodes


@dataclasses.dataclass(frozen=True)
class EpisodeRewards:
    """The rewards of one episode."""

    rewards: tuple[float, ...]  # one per step
    kept: int  # number of steps until the episode ended


@dataclasses.dataclass(frozen=True)
class Completion:
    """When a model is asked about an episode, and what completes it."""

    # None: the model is asked at the end, and the last step gets the reward. A number: the model is
    # asked after every step, and the first reward that is not below this number completes the
    # episode; later steps get no reward
    threshold: float | None = None
    # whether a complete episode ends there. Earlier steps do not depend on later ones, so the later
    # ones can be cut off after the answers have arrived
    ends: bool = True

    def parts(self, taken: Sequence[int]) -> list[Sequence[int]]:
        """The chunks that the model sees in each question about an episode, in the order taken."""
        if self.threshold is None:
            return [taken]
        # The model is also asked about an episode without steps, because it counts in the batch.
        return [taken[: step + 1] for step in range(max(len(taken), 1))]

    def episodes(
        self, rewards: Sequence[Reward], steps: Sequence[int]
    ) -> list[EpisodeRewards | Unscored]:
        """The rewards of each episode's steps, or why it has none.

        `rewards` are those of the questions of all episodes, in order, `steps` of the episodes.
        """
        found, first = [], 0
        for count in steps:
            questions = 1 if self.threshold is None else max(count, 1)
            found.append(self._episode(rewards[first : first + questions], count))
            first += questions
        return found

    def _episode(self, rewards: Sequence[Reward], steps: int) -> EpisodeRewards | Unscored:
        known: list[float] = []
        for reward in rewards:
            if isinstance(reward, Unscored):
                return reward
            known.append(reward)
            if self.threshold is not None and reward >= self.threshold:
                kept = len(known) if self.ends else steps
                return EpisodeRewards((*known, *[0.0] * (steps - len(known)))[:steps], kept)
        # If the model is asked once, the last step gets the reward.
        return EpisodeRewards(tuple([*[0.0] * (steps - len(known)), *known][:steps]), steps)


@dataclasses.dataclass
class Asked:
    """Episodes whose rewards were asked for."""

    questions: list[Any]  # of all episodes, in order
    future: Future[list[Reward]]  # the rewards of the questions
    steps: list[int] = dataclasses.field(default_factory=list)  # number of steps of each episode

    def ready(self) -> bool:
        """Whether all rewards have arrived, or failed."""
        return self.future.done()


QuestionOf = Callable[[Sample, Sequence[int]], Any]  # of a sample with the chunks taken


@dataclasses.dataclass(frozen=True)
class Rewards:
    """Asks for the rewards of episodes, and waits until enough of a batch have arrived."""

    scorer: Scorer  # scores the questions
    question: QuestionOf  # makes them
    # share of a batch without rewards above which the run pauses and asks again
    max_failure_share: float
    log: Log  # receives lines for people
    lost: Callable[[], str] = lambda: ""  # why the server was given up; "" if it was not
    counts: Callable[[], dict[str, float]] = dict  # the metrics of the client
    # after which steps the model is asked, and when an episode is complete
    completion: Completion = Completion()
    remedy: str = OF_MODEL  # what the user can do about failures that asking again does not change

    def begin(self, samples: Sequence[Sample], taken: Sequence[Sequence[int]]) -> Asked:
        """Asks for the rewards of one episode of each sample.

        `taken` are chunk indices in the order taken; an index beyond a sample's chunks is STOP.
        """
        questions = [
            self.question(sample, part)
            for sample, chunks in zip(samples, taken, strict=True)
            for part in self.completion.parts(chunks)
        ]
        return Asked(questions, self.scorer.begin(questions), list(map(len, taken)))

    def wait(self, asked: Asked, stop: StopSignal) -> list[EpisodeRewards | Unscored]:
        """Waits for the rewards of each episode, in order; at most the allowed share is `Unscored`.

        Raises `Stopped`, or `FeedbackLost` if the server was given up or too many would fail again.
        """
        watch = Watch(stop, self.lost)

        def arrived() -> list[EpisodeRewards | Unscored]:
            while not concurrent.futures.wait([asked.future], LOOK_EVERY).done:
                watch.check()
            return self.completion.episodes(asked.future.result(), asked.steps)

        def again(_: Any, __: list[int]) -> list[EpisodeRewards | Unscored]:
            asked.future = self.scorer.begin(asked.questions, asked.future.result())
            return arrived()

        words = {"what": "have no reward", "again": "asking again"}
        share, remedy = self.max_failure_share, self.remedy
        patience = Patience(share, watch, self.log, remedy, Unscored, **words)
        return patience.few_failed(arrived(), again)


# ---------------------------------------------------------------- the server


def leave_room(llm: LlmConfig | ServedConfig) -> None:
    """Keeps JAX from taking the GPU memory that our own server needs on the same GPUs.

    It sets XLA_PYTHON_CLIENT_MEM_FRACTION. This has no effect after JAX has used a device, or if
    the user has set the variable.
    """
    if not llm.url and llm.server is not None and not llm.server.devices:
        left = max(0.95 - llm.server.memory_share, 0.05)
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{left:.2f}")


@dataclasses.dataclass(frozen=True)
class PendingService:
    """A server that may still be starting."""

    # waits for the server; raises `Stopped` if the run is to stop first
    ready: Callable[[StopSignal], Rewards]
    question: QuestionOf  # how questions are made
    provenance: dict[str, Any]  # settings on which answers depend besides the questions, as JSON

    def check(self, samples: Sequence[Sample]) -> None:
        """Checks that the answers of one source's samples can be scored, before any is played.

        `LazySamples` are all alike, so only the first few of them are checked.
        """
        few = slice(LAZY_SAMPLES if isinstance(samples, LazySamples) else None)
        for sample in samples[few]:
            self.question(sample, ())


@contextlib.contextmanager
def open_service(
    reward: ModelReward, llm: LlmConfig, place: Place, log: Log, *, never_terminate: bool, seed: int
) -> Iterator[PendingService]:
    """Opens the server that `config.llm` asks for and its client; both end with the block.

    The server starts while the caller continues. For `seed` see `open_model`; with
    `never_terminate` an episode continues after it is complete.
    """
    question = Asking(reward.prompt, BABILONG if reward.name == "babilong_em" else AUTO).of
    with open_model(llm, place, seed, log) as pending, contextlib.ExitStack() as stack:

        def ready(stop: StopSignal) -> Rewards:
            model = pending.ready(stop)
            score = LlmReward(model.client, pending.generation, reward.name, reward.scale)
            scorer = Scorer(score, reward.staleness + 1)
            stack.callback(scorer.close)
            return Rewards(
                scorer,
                question,
                reward.max_failure_share,
                log,
                lost=model.lost,
                counts=lambda: metrics_of_all(model.client.counters()),
                completion=Completion(reward.completion_threshold, not never_terminate),
                remedy=OF_MODEL + model.kept,
            )

        yield PendingService(ready, question, _provenance(reward.prompt, pending))


def _provenance(prompt: str, model: PendingModel) -> dict[str, Any]:
    own = prompts.load(prompt).fingerprint if prompt != AUTO else ""
    return {**model.provenance, "config.reward.prompt": f"{prompt} {own}".strip()}


def metrics_of_all(own: counters.Counters) -> dict[str, float]:
    """The counters of all hosts' clients together, as metrics; all hosts call this together.

    Counts, tokens and seconds are sums; percentiles are those of all latencies.
    """
    return counters.Counters.of_all(hosts.texts_of_each(own.as_text())).as_metrics()


def sums_of_all(counts: Mapping[str, int]) -> dict[str, float]:
    """Sums over the hosts, each of which has names of its own; all hosts call this together."""
    total = Counter[str]()
    for text in hosts.texts_of_each(json.dumps(counts)):
        total.update(json.loads(text))
    return {name: float(count) for name, count in total.items()}
