"""Rewards that come from outside the device, whoever gives them, and a user's own reward function.

If there is no reward, the result is a `Failure`, never 0: the episode is asked about again, or left
out and counted. What a language model's answers are worth is in `feedback.llm`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import numbers
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

from qrag_jax.data.sample import LazySamples, Sample
from qrag_jax.errors import FeedbackLost, InputError, Natural, Positive, Share
from qrag_jax.feedback.facts import ANSWER_IN_CHUNK, GROUND_TRUTH, FactReward
from qrag_jax.llm.outcomes import NO_ANSWER_CAUSES, Failure
from qrag_jax.metrics.bootstrap import causes_text
from qrag_jax.runtime import hosts, own_code
from qrag_jax.runtime.interrupt import LOOK_EVERY, StopSignal, wait_for
from qrag_jax.runtime.own_code import OwnCode

LAZY_SAMPLES = 20  # of a lazy data set, checked before any is played
OF_MODEL = (
    "change config.llm.max_tokens, config.llm.cut_off, config.llm.max_prompt_tokens or "
    "config.reward.prompt"
)
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0  # seconds, before asking again
# A user's own code raised, gave no reward, or something that is no number.
OWN_CAUSES = RAISED, NO_REWARD, NO_NUMBER = ("raised", "no_reward", "no_number")
# Asking again, even later, does not change these.
PERMANENT = ("too_long", "filtered", "tool_call", *NO_ANSWER_CAUSES, *OWN_CAUSES)

Log = Callable[[str], None]
T = TypeVar("T")


Reward = float | Failure


# ---------------------------------------------------------------- waiting and asking again


class Checks(Protocol):
    def check(self) -> None: ...  # says whether to go on, as a `StopSignal` does


@dataclasses.dataclass(frozen=True)
class Watch:
    stop: StopSignal
    lost: Callable[[], str]  # why a server was given up; "" if it was not

    def check(self) -> None:
        self.stop.check_alone()
        if why := self.lost():
            raise FeedbackLost(why)


def pause(seconds: float, watch: Checks) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        watch.check()
        time.sleep(LOOK_EVERY)


@dataclasses.dataclass(frozen=True)
class Patience:
    """Tries again what failed, while more than the allowed share of a batch has failed.

    A server that is down for a while costs time, and no questions.
    """

    most: float  # share of a batch that may fail
    watch: Checks  # looked at during a pause
    log: Log
    remedy: str  # what to do if trying again is in vain
    broken: type  # the class of a failure, which has a cause and a message
    hopeless: Sequence[str] = PERMANENT  # causes

    def play(self, starts: Sequence[Any], play: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
        """The episodes of these starts, of which at most the allowed share is broken."""

        def retry(items: list[Any], places: list[int]) -> list[Any]:
            again = dict(zip(places, play([starts[place] for place in places]), strict=True))
            return [again.get(place, e) for place, e in enumerate(items)]

        return self.few_failed(play(starts), retry)

    def few_failed(self, items: list[T], retry: Callable[[list[T], list[int]], list[T]]) -> list[T]:
        """What was found, tried again until at most the allowed share has failed, or `ended` so.

        `retry` takes all of it and the places of the failures, and gives all of it. Raises
        `FeedbackLost` where too many would fail again.
        """
        seconds, most = FIRST_PAUSE, self.most * len(items)
        while True:
            ends: list[Any] = [getattr(e, "ended", e) for e in items]
            places = [place for place, end in enumerate(ends) if isinstance(end, self.broken)]
            if len(places) <= most:
                return items
            failed = [ends[place] for place in places]
            hopeless = [e for e in failed if e.cause in self.hopeless]
            if len(hopeless) > most:
                raise FeedbackLost(
                    f"{len(hopeless)} of {len(items)} episodes have no result, and trying again "
                    f"would change nothing ({_causes(hopeless)}); {self.remedy}"
                )
            self.log(
                f"paused: {len(failed)} of {len(items)} episodes have no result "
                f"({_causes(failed)}); trying again in {seconds:.0f} s. Stopped and given again, "
                "the command goes on from here, with other values of config.llm too."
            )
            pause(seconds, self.watch)
            seconds = min(2 * seconds, LONGEST_PAUSE)
            items = retry(items, places)


def _causes(failed: Sequence[Any]) -> str:
    return f"{causes_text(failed)}; for example: {failed[0].message.rstrip('.')}"


# ---------------------------------------------------------------- settings


# Which of an answer's scores is the reward of a language model; "": a judge decides.
METRICS = {"answer_em": "em", "answer_f1": "f1", "babilong_em": "em", "judge": ""}
OWN, PATH = "own", "config.reward.path"
# Fields that rewards from outside the device read alone.
DEFERRED = ("scale", "completion_threshold", "staleness", "max_failure_share")


def reward_name(name: str, path: str) -> str:
    """The reward of these two fields: a path alone says that it is the user's own function."""
    name = GROUND_TRUTH if name == "gt" else name
    return OWN if name == GROUND_TRUTH and path else name


@dataclasses.dataclass(frozen=True)
class RewardConfig(FactReward):
    """Section `reward`; evaluations return rewards of the facts whatever its name is."""

    # Of the name own: FILE.py:FUNCTION of (question, answers, taken, gold); it runs without sandbox
    path: str = ""
    # Of a language model: name in qrag_jax/llm/text/templates, or a .txt file; auto: by the data
    prompt: str = "auto"
    scale: Positive = 1.0  # factor on the reward
    # None: ask once, at the end. A number: ask after every step; the first reward (times scale)
    # that is not below this number completes the episode, and later steps get no reward
    completion_threshold: Positive | None = None
    # K: updates between playing an episode and learning from it; the rewards may be found
    # meanwhile, while the device continues. 0: strictly on-policy
    staleness: Natural = 1
    max_failure_share: Share = 0.5  # share of a batch without rewards above which the run pauses

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", reward_name(self.name, self.path))
        known = (GROUND_TRUTH, ANSWER_IN_CHUNK, *METRICS, OWN)
        if self.name not in known:
            raise InputError(f"config.reward.name is {self.name!r}; use one of {', '.join(known)}.")
        if self.name == OWN:
            own_code.check_form(self.path, PATH)

    @property
    def is_deferred(self) -> bool:
        """Whether it comes from a language model or a user's code, not from arrays."""
        return self.name == OWN or self.name in METRICS


# ---------------------------------------------------------------- rewards of episodes


class EpisodeRewards(NamedTuple):
    rewards: tuple[float, ...]  # one per step
    kept: int  # steps until the episode ended


def parts_asked(taken: Sequence[int], threshold: float | None) -> list[Sequence[int]]:
    """The chunks in each question about an episode: one, or with a threshold one a step."""
    if threshold is None:
        return [taken]
    return [taken[: step + 1] for step in range(max(len(taken), 1))]


def episode_rewards(
    rewards: Sequence[Reward], steps: int, threshold: float | None, ends: bool = True
) -> EpisodeRewards | Failure:
    """The rewards of an episode's steps by those of its questions, or why it has none.

    Asked once, the last step gets the reward. With a threshold the first reward that is not below
    it completes the episode, and later steps get none, or are cut off if a complete episode `ends`.
    """
    known: list[float] = []
    for reward in rewards:
        if isinstance(reward, Failure):
            return reward
        known.append(reward)
        if threshold is not None and reward >= threshold:
            kept = len(known) if ends else steps
            return EpisodeRewards((*known, *[0.0] * (steps - len(known)))[:steps], kept)
    return EpisodeRewards(tuple([*[0.0] * (steps - len(known)), *known][:steps]), steps)


@dataclasses.dataclass
class Asked:
    questions: list[Any]  # episode by episode, as are their rewards
    future: Future[list[Reward]]
    steps: Sequence[int] = ()  # number of steps of each episode
    counts: Sequence[int] = ()  # number of questions of each episode

    def ready(self) -> bool:
        return self.future.done()


# Of a sample, with the indices of chunks in the order taken; one beyond its chunks is STOP
QuestionOf = Callable[[Sample, Sequence[int]], Any]


@dataclasses.dataclass
class Rewards:
    """Asks for the rewards of episodes on threads, and waits until enough have arrived."""

    score: Callable[[Sequence[Any]], list[Reward]]  # one reward per question, in order
    question: QuestionOf
    settings: RewardConfig
    log: Log
    ends: bool = True  # whether a complete episode ends, see `episode_rewards`
    batches: int = 1  # that are scored at the same time
    lost: Callable[[], str] = lambda: ""  # why the server was given up; "" if it was not
    counts: Callable[[], dict[str, float]] = dict  # the metrics of what is asked
    remedy: str = OF_MODEL  # against failures that asking again does not change
    # settings on which answers depend besides the questions, as JSON
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)
    # waits for the server; raises `Stopped` if the run is to stop first
    ready: Callable[[StopSignal], object] = lambda stop: None

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.batches, thread_name_prefix="feedback")

    def check(self, samples: Sequence[Sample]) -> None:
        """Checks that the answers of one source's samples can be scored."""
        # Lazy samples are all alike.
        for sample in samples[: LAZY_SAMPLES if isinstance(samples, LazySamples) else None]:
            self.question(sample, ())

    def begin(self, samples: Sequence[Sample], taken: Sequence[Sequence[int]]) -> Asked:
        """Asks for the rewards of one episode of each sample, by the chunks taken."""
        parts = [parts_asked(chunks, self.settings.completion_threshold) for chunks in taken]
        questions = [
            self.question(sample, part)
            for sample, requests in zip(samples, parts, strict=True)
            for part in requests
        ]
        future = self._pool.submit(self.score, questions)
        return Asked(questions, future, [*map(len, taken)], [*map(len, parts)])

    def wait(self, asked: Asked, stop: StopSignal) -> list[EpisodeRewards | Failure]:
        """The rewards of each episode, of which at most the allowed share is `Failure`.

        Raises `Stopped`, or `FeedbackLost` if the server was given up or too many would fail again.
        """
        watch = Watch(stop, self.lost)

        def arrived() -> list[EpisodeRewards | Failure]:
            rewards = wait_for(asked.future, watch.check)
            left, threshold = iter(rewards), self.settings.completion_threshold
            return [
                episode_rewards([*itertools.islice(left, count)], steps, threshold, self.ends)
                for steps, count in zip(asked.steps, asked.counts, strict=True)
            ]

        def again(_: Any, __: list[int]) -> list[EpisodeRewards | Failure]:
            rewards = asked.future.result()
            asked.future = self._pool.submit(self._passing, asked.questions, rewards)
            return arrived()

        share = self.settings.max_failure_share
        patience = Patience(share, watch, self.log, self.remedy, Failure)
        return patience.few_failed(arrived(), again)

    def close(self) -> None:
        """Cancels batches that have not begun; the threads end with their requests."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _passing(self, questions: Sequence[Any], known: Sequence[Reward]) -> list[Reward]:
        failed = [(n, r) for n, r in enumerate(known) if isinstance(r, Failure)]
        lost = [n for n, r in failed if r.cause not in PERMANENT]
        again = dict(zip(lost, self.score([questions[n] for n in lost]), strict=True))
        return [again.get(place, reward) for place, reward in enumerate(known)]


def sums_of_all(counts: Mapping[str, float]) -> dict[str, float]:
    """Sums over the hosts, each of which has names of its own; all hosts call this together."""
    total = Counter[str]()
    for counted in hosts.values_of_each(dict(counts)):
        total.update(counted)
    return {name: float(count) for name, count in total.items()}


# ---------------------------------------------------------------- a user's own function
# `question` is a text; `answers`, `taken` (the chunks, in the order taken) and `gold` (the
# supporting ones, if the data know them) are lists of texts. If it returns no finite number, the
# episode is left out of the update and counted, never scored 0. It runs in this process, one call
# at a time, next to the device, without a sandbox.

TAKES = ("question", "answers", "taken", "gold")


def number_of(code: OwnCode, call: Callable[[], Any], name: str) -> Reward:
    """The number that a user's function gives for the question of this name, or why not."""
    try:
        value = call()
    except (Exception, SystemExit) as error:
        return Failure(RAISED, f"{code.spec} raised for {name}: {own_code.reason_of(error)}")
    if value is None:
        return Failure(NO_REWARD, f"{code.spec} gave no reward (None) for {name}")
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        return Failure(NO_NUMBER, f"{code.spec} gave {value!r:.60} for {name}, no finite number")
    return float(value)


@contextlib.contextmanager
def open_own(
    reward: RewardConfig, *, never_terminate: bool, log: Callable[[str], None]
) -> Iterator[Rewards]:
    """Scores with the user's function; see `llm.open_service`."""
    code = own_code.load(reward.path, PATH, TAKES)
    log(f"rewards by {code.spec}, which runs in this process, without a sandbox")
    failures = Counter[str]()

    def one(sample: Sample, taken: Sequence[int]) -> Reward:
        chunks = sample.chunks  # an index beyond them is STOP
        texts = {
            "question": sample.question,
            "answers": list(sample.answers),
            "taken": [chunks[index] for index in taken if index < len(chunks)],
            "gold": [chunks[index] for index in sample.support],
        }
        value = number_of(code, lambda: code.function(**texts), sample.id)
        if isinstance(value, Failure):
            failures[value.cause] += 1
            return value
        return reward.scale * value

    rewards = Rewards(
        lambda every: [one(*q) for q in every],
        lambda sample, taken: (sample, taken),
        reward,
        log,
        ends=not never_terminate,
        counts=lambda: sums_of_all({f"reward/failures_{why}": n for why, n in failures.items()}),
        remedy=f"mend {code.spec}, or raise config.reward.max_failure_share",
        provenance={PATH: f"{code.spec} {code.digest}"},
    )
    with contextlib.closing(rewards):
        yield rewards
