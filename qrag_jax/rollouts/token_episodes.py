"""Plays episodes of agents, hundreds at once.

- A language model on a server answers when it answers. What depends on a question alone is asked
  once for all its episodes.
- Searches of the policy that wait by then are one call of the device.
- Where the policy speaks, tokens go in and come out. What it sampled stays as it is: the next
  prompt is the ids so far and, behind them, the ids of what the environment says. Text is decoded
  only to be read by the environment.
- What tools read is one batch, in a thread.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import numpy as np

from qrag_jax.environments.episode import (
    MALFORMED_CALL,
    NO_RETRIEVAL,
    OWN_CODE,
    Agent,
    Call,
    Closed,
    Complete,
    Document,
    Ended,
    Failed,
    Look,
    Open,
    Reply,
    Retrieve,
    Said,
    Speak,
    ToolTask,
)
from qrag_jax.environments.queries import Searched
from qrag_jax.errors import InputError
from qrag_jax.feedback.rewards import PERMANENT, Checks
from qrag_jax.llm.outcomes import Failure, Outcome, Request
from qrag_jax.llm.text.prompts import Messages
from qrag_jax.llm.text.scaffolds import Scaffold
from qrag_jax.rollouts import trajectories
from qrag_jax.rollouts.pool_search import Ask, Drawn
from qrag_jax.rollouts.schedule import Counts, Playing, Schedule, key_within
from qrag_jax.runtime import hosts
from qrag_jax.runtime.bounded_json import plain, typed
from qrag_jax.runtime.interrupt import LOOK_EVERY

if TYPE_CHECKING:
    from qrag_jax.environments.tool_functions import ToolFunctions

# Playing again, even later, does not change these.
HOPELESS = (*PERMANENT, NO_RETRIEVAL, MALFORMED_CALL, OWN_CODE)
GATHER = 0.02  # seconds in which further searches may join a batch

Search = Callable[[Sequence[Ask]], Sequence[Drawn | Failure]]


class Asks(Protocol):
    """Asks a language model: one outcome per request, in their order; a failure raises no error."""

    def submit(self, requests: Sequence[Request]) -> Future[list[Outcome]]: ...


class Library(Protocol):
    """What the tools read. It is called from a thread."""

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        """The documents of each search, best first."""
        ...

    def open(self, task: ToolTask, step: Open) -> tuple[Document, ...] | Failure:
        """One document; () if there is none. Called if the agent's tools open documents."""
        ...


@dataclasses.dataclass(frozen=True)
class Speech:
    """How text and ids become each other, and how long they may be."""

    tokenizer: Any  # of Hugging Face
    scaffold: Scaffold  # its chat template, cut
    turn: int  # most tokens that a turn may sample
    room: int  # most tokens of a segment

    def text(self, sampled: np.ndarray) -> str:
        ids = sampled.tolist()
        if ids and ids[-1] in self.scaffold.stop_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def turn_of(self, observed: np.ndarray, text: str) -> trajectories.Turn:
        """A turn in which the policy says this text and ends, without log-probabilities."""
        sampled = np.append(self.scaffold.ids(text), np.int32(self.scaffold.stop_ids[0]))
        nothing = np.zeros(len(sampled), np.float32)
        return trajectories.Turn(observed, sampled, nothing, trajectories.STOP)


class Start(NamedTuple):
    task: Any  # a `Task`, as the agent plays it
    key: np.ndarray  # uint32 `[2]`, data of the PRNG key of the episode's draws
    # equal for the episodes of one question that are compared. Requests that depend on the question
    # alone are made once for all of them.
    group: Hashable = None


class Episode(NamedTuple):
    ended: Ended | Searched  # how it ended; a `Failed` has no reward
    segments: tuple[trajectories.Segment, ...]  # what the policy said and read in the last attempt
    attempts: int  # how often it was played
    searches: tuple[Drawn, ...] = ()  # those of the policy in the last attempt

    @property
    def status(self) -> str:
        """As `TokenTrajectory.status`."""
        if isinstance(self.ended, Failed):
            return self.ended.cause
        return trajectories.TRUNCATED if self.ended.tally.truncated else trajectories.DONE


class AgentRollout(Schedule):
    """Plays the episodes of an agent, whose steps say what is needed of the arguments.

    Args:
        attempts: an episode that breaks is played again, so often in all.
        sampler: of the policy's turns; `speech` is between them and text.
        library: what the tools read.
        functions: of the user, which are tools, too.
        search: the policy's; a search waits for those of other episodes for `GATHER` seconds.
        model: the language model of a server.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        stop: Checks,
        attempts: int = 2,
        counts: Counts | None = None,
        sampler: trajectories.Sampler | None = None,
        speech: Speech | None = None,
        library: Library | None = None,
        functions: ToolFunctions | None = None,
        search: Search | None = None,
        model: Asks | None = None,
    ) -> None:
        super().__init__(attempts, counts or Counts())
        self._agent, self._stop, self._model, self._functions = agent, stop, model, functions
        parts: tuple[Any, ...] = sampler, speech, library, search
        self.sampler, self._speech, self._library, self._search = parts
        # What depends on a question alone, by group and request.
        self._shared: dict[Hashable, Future[list[Outcome]]] = {}
        self._retrieving: list[tuple[Playing, Ask]] = []
        self._since = 0.0  # when the first of these began to wait
        self._looking: list[tuple[Playing, tuple[ToolTask, Look | Open]]] = []

    def play(self, starts: Sequence[Start]) -> list[Episode]:
        """Plays the episodes side by side; each is returned in the place of its start."""
        self._shared.clear()
        with (
            ThreadPoolExecutor(1, thread_name_prefix="search") as self._thread,
            ThreadPoolExecutor(1, thread_name_prefix="call") as self._caller,
        ):
            return self.run(starts, self._stop)

    def episode(self, start: Start, attempt: int) -> Generator[Any, Any, Episode]:
        """Asks for what `take` knows."""
        talk: list[tuple[str, str]] = []  # all messages so far
        segments, searches = list[list[trajectories.Turn]](), list[Drawn]()
        key, play = key_within(start.key, attempt - 1), self._agent.play(start.task)
        reply: Any = None
        while True:
            try:
                step = play.send(reply)
            except StopIteration as end:
                whole = tuple(tuple(segment) for segment in segments if segment)
                return Episode(end.value, whole, attempt, tuple(searches))
            if isinstance(step, Complete):
                reply = yield from self._completed(start, attempt, step)
            elif isinstance(step, Retrieve):
                reply = yield Ask(start.task.question, step, key)
                if isinstance(reply, Drawn):
                    searches.append(reply)
                    reply = reply.passages
            elif isinstance(step, Speak):
                reply = yield from self._said(start, attempt, step.messages, talk, segments)
            else:
                reply = yield start.task, step

    def _said(
        self,
        start: Start,
        attempt: int,
        messages: Messages,
        talk: list[tuple[str, str]],
        segments: list[list[trajectories.Turn]],
    ) -> Generator[trajectories.SampleRequest, trajectories.Sampled | Failure, Said | Failure]:
        """A turn of the policy behind these messages; it is added to talk and segments."""
        speech, scaffold = self._speech, self._speech.scaffold
        asks = any(role == "user" for role, _ in messages)
        follows = bool(talk) and (scaffold.append_only or not asks)
        talk += messages
        if follows:
            observed = scaffold.after(segments[-1][-1].sampled, messages)
        else:
            observed = scaffold.opening(tuple(talk))
            segments.append([])
        before = [part for turn in segments[-1] for part in (turn.observed, turn.sampled)]
        ids = np.concatenate([*before, observed]).astype(np.int32)
        left = speech.room - len(ids)
        if left < 1:
            if len(talk) == len(messages):
                raise InputError(
                    f"the prompt of question {start.task.id!r} has {len(ids)} tokens, and "
                    f"config.sampling.room is {speech.room}; raise it, up to the model's "
                    "positions, or shorten the prompt."
                )
            return Said("", "length")
        # Positions of a rewritten segment were drawn at before, so it has a key of its own.
        key = key_within(start.key, attempt - 1, len(segments) - 1)
        drawn = yield trajectories.SampleRequest(ids, key, min(speech.turn, left))
        if isinstance(drawn, Failure):
            return drawn
        text, version = speech.text(drawn.ids), self.sampler.version
        segments[-1].append(
            trajectories.Turn(observed, drawn.ids, drawn.log_probs, drawn.finish, version)
        )
        talk.append(("assistant", text))
        return Said(text, "length" if drawn.finish == trajectories.LENGTH else "stop")

    def _completed(
        self, start: Start, attempt: int, step: Complete
    ) -> Generator[Future[list[Outcome]], list[Outcome], Outcome]:
        """Asks the model, unless an episode of the group has asked the same."""
        assert self._model is not None
        request = step.request
        if attempt > 1:  # another seed, and so another reply
            request = dataclasses.replace(request, seed=(request.seed or 0) + attempt - 1)
        name = (start.group, request) if step.shared else None
        future = self._shared.get(name)
        if future is None:
            self.counts.turns += 1
            future = self._model.submit([request])
            if name is not None:
                self._shared[name] = future
        (outcome,) = yield future
        if isinstance(outcome, Failure):  # it is asked for again
            self._shared.pop(name, None)
        return outcome

    def take(self, playing: Playing, step: Any) -> None:
        """A future, a `SampleRequest`, an `Ask`, or what a tool reads: (task, step)."""
        if isinstance(step, Future):
            self.fly(step, partial(self.reply, playing))
        elif isinstance(step, trajectories.SampleRequest):
            self.speaking.append((step, partial(self.reply, playing)))
        elif isinstance(step, Ask):
            if not self._retrieving:
                self._since = time.monotonic()
            self._retrieving.append((playing, step))
        elif isinstance(step[1], Call):
            assert self._functions is not None
            # One by one, so that those that have not begun are left out when the play is stopped.
            called = self._caller.submit(self._functions.call, step[1].name, step[1].arguments)
            self.fly(called, partial(self.reply, playing))
        else:
            self._looking.append((playing, step))

    def waits(self) -> bool:
        return bool(self.speaking or self._looking or self._retrieving)

    def dispatch(self) -> float:
        if self._looking:
            self._look()
        self.sample()
        return self._retrieve()

    def _look(self) -> None:
        waiting, self._looking = self._looking, []
        self.counts.searches += len(waiting)

        def arrived(replies: list[Reply]) -> None:
            for (episode, _), one in zip(waiting, replies, strict=True):
                self.reply(episode, one)

        asked = [step for _, step in waiting]
        self.fly(self._thread.submit(read, self._library, asked), arrived)

    def _retrieve(self) -> float:
        """Searches if that has waited long enough, or nothing else is waited for."""
        left = GATHER - (time.monotonic() - self._since)
        if not self._retrieving:
            return LOOK_EVERY
        if self.flying and left > 0:
            return min(left, LOOK_EVERY)
        waiting, self._retrieving = self._retrieving, []
        replies = self._search([ask for _, ask in waiting])
        self.counts.searches += len(waiting)
        self.counts.batches += 1
        for (episode, _), one in zip(waiting, replies, strict=True):
            self.reply(episode, one)
        return 0.0


def read(library: Library, steps: Sequence[tuple[ToolTask, Look | Open]]) -> list[Reply]:
    """What the tools give."""
    looks = [(task, step) for task, step in steps if isinstance(step, Look)]
    hits = iter(library.look(looks)) if looks else iter(())
    return [
        next(hits) if isinstance(step, Look) else library.open(task, step) for task, step in steps
    ]


def facts_of(ended: Ended) -> Mapping[str, Any]:
    facts: dict[str, Any] = {"tally": dataclasses.asdict(ended.tally)}
    if isinstance(ended, Closed):
        return facts | {"answer": ended.answer, "cited": [*ended.cited], "seen": [*ended.seen]}
    return facts | {"message": ended.message}


# ---------------------------------------------------------------- episodes of all hosts


def played_by_all(
    starts: Sequence[Start], play: Callable[[Sequence[Start]], list[Episode]]
) -> list[Episode]:
    """The episodes of these starts, in their order; all hosts call this together with the same.

    `play` plays episodes on this host alone. Raises `FeedbackLost` if too many of a host fail.
    """
    count, index = jax.process_count(), jax.process_index()
    if count == 1:
        return play(starts)
    # Neighbours stay together: those of a group have one prompt, which is read once.
    part = starts[len(starts) * index // count : len(starts) * (index + 1) // count]
    here: list[Episode] = hosts.all_or_none(lambda: play(part) if part else [])
    parts = hosts.values_of_each(plain(here))
    return [typed(Episode, saved) for episodes in parts for saved in episodes]


# ---------------------------------------------------------------- episodes of a script
# What a policy imitates before it learns by rewards. The script says text, which is encoded as a
# policy would best sample it. There are no log-probabilities: a script draws nothing.


class Talk(NamedTuple):
    """An episode of a script as text."""

    ended: Ended  # how it ended
    # for each turn the messages before it, since the last turn, and what was said
    turns: tuple[tuple[Messages, str], ...]


def encoded(talk: Talk, speech: Speech) -> Episode:
    """The episode as tokens; raises `ValueError` if it is too long, or if turns are rewritten."""
    scaffold, turns = speech.scaffold, list[trajectories.Turn]()
    for messages, text in talk.turns:
        if turns:
            observed = scaffold.after(turns[-1].sampled, messages)
        else:
            observed = scaffold.opening(messages)
        turns.append(speech.turn_of(observed, text))
    length = sum(len(turn.observed) + len(turn.sampled) for turn in turns)
    if length > speech.room:
        raise ValueError(f"a script has {length} tokens, and there is room for {speech.room}")
    return Episode(talk.ended, (tuple(turns),), 1)


def all_sampled(episode: Episode) -> Episode:
    """The same episode as if all of it but its first token had been sampled, so that all trains."""
    segments = []
    for segment in episode.segments:
        ids = np.concatenate([part for turn in segment for part in (turn.observed, turn.sampled)])
        nothing = np.zeros(len(ids) - 1, np.float32)
        segments.append((trajectories.Turn(ids[:1], ids[1:], nothing, segment[-1].finish),))
    return episode._replace(segments=tuple(segments))
