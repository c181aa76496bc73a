"""Runs the language model that gives rewards: its server, its client, and the requests."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import jax

from qrag_jax.data.lazy_samples import LazySamples
from qrag_jax.data.sample import Sample
from qrag_jax.feedback.completion import Completion, EpisodeRewards
from qrag_jax.feedback.deferred_reward import metrics_of_all
from qrag_jax.feedback.language_model import (
    BABILONG,
    LanguageModelFeedback,
    ModelReward,
    Reward,
    Unscored,
)
from qrag_jax.feedback.questions import AUTO, Asking
from qrag_jax.llm.config import LlmConfig, ServedConfig
from qrag_jax.llm.server.opening import LOOK_EVERY, PendingModel, Place, open_model
from qrag_jax.llm.text import prompts
from qrag_jax.metrics.answer_table import causes_text
from qrag_jax.runtime.interrupt import StopSignal

LAZY_SAMPLES = 20  # of a lazy data set, checked before any is played
OF_MODEL = (
    "change config.llm.max_tokens, config.llm.cut_off, config.llm.max_prompt_tokens or "
    "config.reward.prompt"
)
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0  # seconds, before asking again

Log = Callable[[str], None]


class Scorer(Protocol):
    """Gives rewards on threads of its own; `LanguageModelFeedback` is one."""

    def begin(
        self, questions: Sequence[Any], known: Sequence[Reward] | None = None
    ) -> Future[list[Reward]]:
        """Starts to score; `known` are rewards of an earlier call."""
        ...


class Asks(Protocol):
    """Makes the question that a `Scorer` takes; `feedback.questions.Asking` is one."""

    def of(self, sample: Sample, taken: Sequence[int]) -> Any:
        """The question of a sample with the chunks taken; InputError: it can have no reward."""
        ...


class FeedbackLost(RuntimeError):
    """No more rewards can be obtained; the message is one sentence for the user."""


@dataclasses.dataclass
class Asked:
    """Episodes whose rewards were asked for.

    Attributes:
        questions: of all episodes, in order.
        future: the rewards of the questions.
        steps: number of steps of each episode.
    """

    questions: list[Any]
    future: Future[list[Reward]]
    steps: list[int] = dataclasses.field(default_factory=list)

    def ready(self) -> bool:
        """Whether all rewards have arrived, or failed."""
        return self.future.done()


class Rewards:
    """Asks for the rewards of episodes, and waits until enough of a batch have arrived."""

    def __init__(
        self,
        feedback: Scorer,
        asking: Asks,
        max_failure_share: float,
        log: Log,
        *,
        lost: Callable[[], str] = lambda: "",
        counts: Callable[[], dict[str, float]] = dict,
        completion: Completion | None = None,
        remedy: str = OF_MODEL,
    ) -> None:
        """
        Args:
            feedback: scores the questions.
            asking: how the questions are asked.
            max_failure_share: share of a batch without rewards above which the run pauses and asks
                again.
            log: receives lines for people.
            lost: returns why the server was given up; "" if it was not.
            counts: returns the metrics of the client.
            completion: after which steps the model is asked, and when an episode is complete.
            remedy: what the user can do about failures that asking again does not change.
        """
        self._remedy = remedy
        self.counts, self._completion = counts, completion or Completion()
        self._feedback, self._asking, self._log = feedback, asking, log
        self._max_failure_share, self._lost = max_failure_share, lost

    def begin(self, samples: Sequence[Sample], taken: Sequence[Sequence[int]]) -> Asked:
        """Asks for the rewards of episodes.

        Args:
            samples: one per episode.
            taken: chunk indices in the order taken; an index beyond a sample's chunks is STOP.
        """
        questions = [
            self._asking.of(sample, part)
            for sample, chunks in zip(samples, taken, strict=True)
            for part in self._completion.parts(chunks)
        ]
        return Asked(questions, self._feedback.begin(questions), list(map(len, taken)))

    def wait(self, asked: Asked, stop: StopSignal) -> list[EpisodeRewards | Unscored]:
        """Waits for the rewards of each episode, in order; at most the allowed share is `Unscored`.

        Raises:
            Stopped: the run is to stop.
            FeedbackLost: the server was given up, or too many episodes would fail again.
        """
        pause = FIRST_PAUSE
        while True:
            while not concurrent.futures.wait([asked.future], LOOK_EVERY).done:
                stop.check()
                if lost := self._lost():
                    raise FeedbackLost(lost)
            rewards = asked.future.result()
            episodes = self._completion.episodes(rewards, asked.steps)
            failed = [episode for episode in episodes if isinstance(episode, Unscored)]
            if len(failed) <= self._max_failure_share * len(episodes):
                return episodes
            for_ever = [reward for reward in failed if reward.permanent]
            if len(for_ever) > self._max_failure_share * len(episodes):
                raise FeedbackLost(
                    f"{len(for_ever)} of {len(episodes)} episodes have no reward, and asking again "
                    f"would change nothing ({causes_text(for_ever)}; for example: "
                    f"{for_ever[0].message.rstrip('.')}); {self._remedy}"
                )
            self._log(
                f"paused: {len(failed)} of {len(episodes)} episodes have no reward "
                f"({causes_text(failed)}; for example: {failed[0].message.rstrip('.')}); asking "
                f"again in {pause:.0f} s. Stopped and given again, the command goes on from here, "
                "with other values of config.llm too."
            )
            ends = time.monotonic() + pause
            while time.monotonic() < ends:
                stop.check()
                time.sleep(LOOK_EVERY)
            pause = min(2 * pause, LONGEST_PAUSE)
            asked.future = self._feedback.begin(asked.questions, rewards)


def leave_room(llm: LlmConfig | ServedConfig) -> None:
    """Keeps JAX from taking the GPU memory that our own server needs on the same GPUs.

    It sets XLA_PYTHON_CLIENT_MEM_FRACTION. This has no effect after JAX has used a device, or if
    the user has set the variable.
    """
    if not llm.url and llm.server is not None and not llm.server.devices:
        left = max(0.95 - llm.server.memory_share, 0.05)
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{left:.2f}")


@dataclasses.dataclass(frozen=True)
class ServiceConfig:
    """Settings of the rewards of a language model.

    Attributes:
        reward: section of the config.
        llm: section of the config.
        never_terminate: whether an episode continues after it is complete.
        seed: of sampling if the temperature is not 0 and `llm.seed` is None.
        cache: folder for the digests of models.
    """

    reward: ModelReward
    llm: LlmConfig
    never_terminate: bool
    seed: int
    cache: Path


@contextlib.contextmanager
def open_service(config: ServiceConfig, workdir: Path, log: Log) -> Iterator[PendingService]:
    """Opens the server that `config.llm` asks for and its client; both end with the block.

    The server starts while the caller continues.
    """
    reward = config.reward
    metric = reward.name
    asking = Asking(reward.prompt, BABILONG if metric == "babilong_em" else AUTO)
    place = Place(workdir, config.cache, jax.process_index())
    with (
        open_model(config.llm, place, config.seed, log) as pending,
        contextlib.ExitStack() as stack,
    ):

        def ready(stop: StopSignal) -> Rewards:
            model = pending.ready(stop)
            feedback = LanguageModelFeedback(
                model.client, pending.generation, metric, reward.scale, reward.staleness + 1
            )
            stack.callback(feedback.close)
            return Rewards(
                feedback,
                asking,
                reward.max_failure_share,
                log,
                lost=model.lost,
                counts=lambda: metrics_of_all(model.client.counters()),
                remedy=OF_MODEL + model.kept,
                completion=Completion(reward.completion_threshold, not config.never_terminate),
            )

        yield PendingService(ready, asking, _provenance(reward.prompt, pending))


@dataclasses.dataclass(frozen=True)
class PendingService:
    """A server that may still be starting.

    Attributes:
        ready: waits for the server; raises `Stopped` if the run is to stop first.
        asking: how questions are asked.
        provenance: settings on which answers depend besides the questions, as JSON.
    """

    ready: Callable[[StopSignal], Rewards]
    asking: Asks
    provenance: dict[str, Any]

    def check(self, samples: Sequence[Sample]) -> None:
        """Checks that the answers of one source's samples can be scored, before any is played.

        `LazySamples` are all alike, so only the first few of them are checked.
        """
        few = slice(LAZY_SAMPLES if isinstance(samples, LazySamples) else None)
        for sample in samples[few]:
            self.asking.of(sample, ())


def _provenance(prompt: str, model: PendingModel) -> dict[str, Any]:
    own = prompts.load(prompt).fingerprint if prompt != AUTO else ""
    return {**model.provenance, "config.reward.prompt": f"{prompt} {own}".strip()}
