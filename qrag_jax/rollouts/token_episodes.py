"""Plays episodes of a language model with tools, hundreds at once: tokens in, tokens out.

What the model sampled stays as it is: the next prompt is the ids so far and, behind them, the ids
of what the environment says. Text is decoded only to be read by the environment.

A sampler on the device computes rows side by side: it is asked when no episode can go on without
it. A server is asked for each turn at once. Searches that wait are one batch, in a thread.
"""

from __future__ import annotations

import dataclasses
import queue
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np

from qrag_jax.environments.episode import (
    Agent,
    Closed,
    Document,
    Ended,
    Failed,
    Look,
    Open,
    Play,
    Reply,
    Said,
    Speak,
    Step,
    ToolTask,
)
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.scaffolds import Scaffold
from qrag_jax.rollouts.agents import Checks
from qrag_jax.rollouts.draw_keys import key_within
from qrag_jax.rollouts.token_sampler import LENGTH, Sampled, SampleRequest
from qrag_jax.rollouts.trajectories import DONE, TRUNCATED, Segment, Turn

_LOOK_EVERY = 0.1  # seconds between looks for a signal to stop


class Sampler(Protocol):
    """Samples turns by one version of the weights.

    Attributes:
        in_rounds: requests are collected until no episode can go on without them.
        version: of the weights.
    """

    in_rounds: bool
    version: str

    def submit(self, requests: Sequence[SampleRequest]) -> list[Future[Sampled | Failure]]:
        """Starts the requests; a failure is a value."""
        ...


class Library(Protocol):
    """What the tools read. It is called from a thread."""

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        """The documents of each search, best first."""
        ...

    def open(self, task: ToolTask, step: Open) -> Document | Failure | None:
        """One document; None if there is none."""
        ...


@dataclasses.dataclass(frozen=True)
class Speech:
    """How text and ids become each other, and how long they may be.

    Attributes:
        tokenizer: of Hugging Face.
        scaffold: its chat template, cut.
        turn: most tokens that a turn may sample.
        room: most tokens of a segment.
    """

    tokenizer: Any
    scaffold: Scaffold
    turn: int
    room: int

    def text(self, sampled: np.ndarray) -> str:
        """The text of sampled ids, without the token that ended the turn."""
        ids = sampled.tolist()
        if ids and ids[-1] in self.scaffold.stop_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False)


class TokenStart(NamedTuple):
    """An episode to play.

    Attributes:
        task: the question.
        key: uint32 `[2]`, data of the PRNG key of its draws.
    """

    task: ToolTask
    key: np.ndarray


class TokenEpisode(NamedTuple):
    """A played episode.

    Attributes:
        ended: how it ended; a `Failed` has no reward.
        segments: what was sampled and observed.
        attempts: how often it was played.
    """

    ended: Ended
    segments: tuple[Segment, ...]
    attempts: int

    @property
    def status(self) -> str:
        """As `TokenTrajectory.status`."""
        if isinstance(self.ended, Failed):
            return self.ended.cause
        return TRUNCATED if self.ended.tally.truncated else DONE


@dataclasses.dataclass
class TokenCounts:
    """What the episodes needed.

    Attributes:
        turns: turns that were sampled.
        batches: calls of the sampler; one for each turn where it is a server.
        searches: searches that were done.
        failed: episodes that failed, attempts that were repeated among them.
    """

    turns: int = 0
    batches: int = 0
    searches: int = 0
    failed: int = 0


class TokenRollout:
    """Plays the episodes of an agent with tools.

    Args:
        agent: what the environment says and reads.
        sampler: the model.
        library: what is searched.
        speech: between text and ids.
        stop: looked at while this waits.
        attempts: an episode that fails is played again, so often in all.

    Attributes:
        counts: over all calls of `play`.
    """

    def __init__(
        self,
        agent: Agent,
        sampler: Sampler,
        library: Library,
        speech: Speech,
        *,
        stop: Checks,
        attempts: int = 2,
    ) -> None:
        self.counts = TokenCounts()
        self._agent, self._sampler, self._library = agent, sampler, library
        self._speech, self._stop, self._attempts = speech, stop, attempts

    def play(self, starts: Sequence[TokenStart]) -> list[TokenEpisode]:
        """Plays the episodes side by side; each is returned in the place of its start.

        Raises:
            Stopped: the run is told to stop; requests in flight are cancelled.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="search") as thread:
            course = _Course(self, thread)
            try:
                return course.run(starts)
            finally:
                course.close()


class _Playing:
    """One episode while it is played."""

    def __init__(self, start: TokenStart, agent: Agent, attempt: int) -> None:
        self.start, self.attempt = start, attempt
        self.ended: Ended | None = None
        self.segments: list[list[Turn]] = []
        self._play: Play = agent.play(start.task)
        self._talk: list[tuple[str, str]] = []  # all messages so far
        self._before: list[np.ndarray] = []  # the ids of the segment so far
        self._observed = np.zeros(0, np.int32)  # those that the next turn answers

    def advance(self, reply: Reply, *, first: bool) -> Step | None:
        """What it asks for next; None: it has ended."""
        try:
            return next(self._play) if first else self._play.send(reply)
        except StopIteration as end:
            self.ended = end.value
            return None

    def request(self, step: Speak, speech: Speech) -> SampleRequest | None:
        """What is sampled next; None: there is no room for a turn."""
        scaffold = speech.scaffold
        follows = bool(self._talk) and (
            scaffold.append_only or all(role != "user" for role, _ in step.messages)
        )
        self._talk += step.messages
        if follows:
            self._observed = scaffold.after(self.segments[-1][-1].sampled, step.messages)
        else:
            self._observed = scaffold.opening(tuple(self._talk))
            self._before = []
            self.segments.append([])
        ids = np.concatenate([*self._before, self._observed]).astype(np.int32)
        left = speech.room - len(ids)
        if left >= 1:
            # Positions of a rewritten segment were drawn at before, so it has a key of its own.
            key = key_within(self.start.key, self.attempt - 1, len(self.segments) - 1)
            return SampleRequest(ids, key, min(speech.turn, left))
        if len(self._talk) == len(step.messages):
            raise InputError(
                f"the prompt of question {self.start.task.id!r} has {len(ids)} tokens, and "
                f"config.sampling.room is {speech.room}; raise it, up to the model's positions, or "
                "shorten the prompt."
            )
        return None

    def take(self, sampled: Sampled, speech: Speech, version: str) -> Said:
        """Keeps a turn; returns what the environment reads."""
        turn = Turn(self._observed, sampled.ids, sampled.log_probs, sampled.finish, version)
        self.segments[-1].append(turn)
        self._before += [turn.observed, turn.sampled]
        text = speech.text(sampled.ids)
        self._talk.append(("assistant", text))
        return Said(text, "length" if sampled.finish == LENGTH else "stop")

    @property
    def episode(self) -> TokenEpisode:
        """The played episode."""
        assert self.ended is not None
        segments = tuple(tuple(segment) for segment in self.segments if segment)
        return TokenEpisode(self.ended, segments, self.attempt)


class _Course:
    """Plays one list of episodes."""

    def __init__(self, rollout: TokenRollout, thread: ThreadPoolExecutor) -> None:
        self._agent, self._sampler = rollout._agent, rollout._sampler
        self._library, self._speech = rollout._library, rollout._speech
        self._stop, self._attempts = rollout._stop, rollout._attempts
        self._counts, self._thread = rollout.counts, thread
        self._arrived: queue.SimpleQueue[Hashable] = queue.SimpleQueue()
        self._flying: dict[Hashable, tuple[list[_Playing], Future[Any]]] = {}
        self._ready: deque[tuple[_Playing, Reply, bool]] = deque()
        self._speaking: list[tuple[_Playing, SampleRequest]] = []
        self._looking: list[tuple[_Playing, Look | Open]] = []

    def run(self, starts: Sequence[TokenStart]) -> list[TokenEpisode]:
        """Plays them to their ends."""
        playing = [_Playing(start, self._agent, 1) for start in starts]
        place = {id(each): number for number, each in enumerate(playing)}
        self._ready.extend((each, None, True) for each in playing)
        while self._ready or self._speaking or self._looking or self._flying:
            self._stop.check()
            while self._ready:
                each, reply, first = self._ready.popleft()
                again = self._advance(each, reply, first=first)
                if again is not None:
                    number = place.pop(id(each))
                    playing[number], place[id(again)] = again, number
                    self._ready.append((again, None, True))
            self._search()
            if self._speaking and not (self._sampler.in_rounds and self._flying):
                self._sample()
            self._collect()
        return [each.episode for each in playing]

    def close(self) -> None:
        """Cancels what is in flight."""
        for _, future in self._flying.values():
            future.cancel()

    def _advance(self, each: _Playing, reply: Reply, *, first: bool) -> _Playing | None:
        """Goes on with an episode; returns the one that takes its place if it is repeated."""
        step = each.advance(reply, first=first)
        if isinstance(step, Speak):
            request = each.request(step, self._speech)
            if request is None:
                self._ready.append((each, Said("", "length"), False))
            else:
                self._speaking.append((each, request))
        elif isinstance(step, Look | Open):
            self._looking.append((each, step))
        elif isinstance(each.ended, Failed):
            self._counts.failed += 1
            if each.attempt < self._attempts:
                return _Playing(each.start, self._agent, each.attempt + 1)
        return None

    def _sample(self) -> None:
        waiting, self._speaking = self._speaking, []
        futures = self._sampler.submit([request for _, request in waiting])
        self._counts.turns += len(waiting)
        self._counts.batches += 1 if self._sampler.in_rounds else len(waiting)
        for (each, _), future in zip(waiting, futures, strict=True):
            self._fly([each], future)

    def _search(self) -> None:
        if not self._looking:
            return
        waiting, self._looking = self._looking, []
        steps = [(each.start.task, step) for each, step in waiting]
        self._counts.searches += len(waiting)
        self._fly([each for each, _ in waiting], self._thread.submit(self._found, steps))

    def _found(self, steps: Sequence[tuple[ToolTask, Look | Open]]) -> list[Reply]:
        """In the thread: what the tools give."""
        looks = [(task, step) for task, step in steps if isinstance(step, Look)]
        found = iter(self._library.look(looks)) if looks else iter(())
        return [
            next(found) if isinstance(step, Look) else self._library.open(task, step)
            for task, step in steps
        ]

    def _fly(self, waiting: list[_Playing], future: Future[Any]) -> None:
        name = object()
        self._flying[name] = waiting, future
        future.add_done_callback(lambda _: self._arrived.put(name))

    def _collect(self) -> None:
        """Takes all that has arrived; waits a little if nothing has."""
        wait = bool(self._flying) and not self._ready
        while True:
            try:
                name = self._arrived.get(wait, _LOOK_EVERY)
            except queue.Empty:
                return
            wait = False
            waiting, future = self._flying.pop(name)
            result = future.result()
            if isinstance(result, Sampled):
                (each,) = waiting
                said = each.take(result, self._speech, self._sampler.version)
                self._ready.append((each, said, False))
            elif isinstance(result, Failure):
                self._ready.append((waiting[0], result, False))
            else:
                self._ready.extend((each, one, False) for each, one in zip(waiting, result))


def facts_of(ended: Ended) -> Mapping[str, Any]:
    """What is logged of an episode."""
    found: dict[str, Any] = {"tally": dataclasses.asdict(ended.tally)}
    if isinstance(ended, Closed):
        return found | {"answer": ended.answer, "cited": [*ended.cited], "seen": [*ended.seen]}
    return found | {"message": ended.message}
