"""Plays episodes side by side, hundreds at once: one thread, a generator for each episode.

An episode asks for something (a turn of a model, a search), waits, and goes on with the reply.
Requests are started as they come, or are collected into batches where a device answers them. An
episode that fails is played again with other draws; if that is in vain it has no reward. Of agents:

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
import hashlib
import queue
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import numpy as np

from qrag_jax.environments import episode as env
from qrag_jax.environments.episode import Document, Ended, Look, Open, Reply, ToolTask
from qrag_jax.environments.queries import Searched
from qrag_jax.errors import InputError
from qrag_jax.feedback.rewards import PERMANENT, Checks
from qrag_jax.llm.outcomes import Failure, Outcome
from qrag_jax.llm.text.prompts import Messages
from qrag_jax.llm.text.scaffolds import Scaffold
from qrag_jax.rollouts import trajectories
from qrag_jax.rollouts.pool_search import Ask, Drawn
from qrag_jax.rollouts.trajectories import Sampled, SampleRequest
from qrag_jax.runtime import hosts
from qrag_jax.runtime.bounded_json import plain, typed
from qrag_jax.runtime.interrupt import LOOK_EVERY

if TYPE_CHECKING:
    from qrag_jax.environments.tool_functions import ToolFunctions
    from qrag_jax.llm.client import Client


@partial(jax.jit, static_argnums=2)
def draw_keys(key: jax.Array, numbers: jax.Array | np.ndarray, draws: int) -> jax.Array:
    """Data of PRNG keys, `[question, draw, 2]`, uint32, by uint32 numbers `[question]`."""
    of_questions = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
    of_draws = jax.vmap(lambda k: jax.vmap(jax.random.fold_in, (None, 0))(k, np.arange(draws)))
    return jax.random.key_data(of_draws(of_questions))


def key_within(key: np.ndarray, *numbers: int) -> np.ndarray:
    """The key, uint32 `[2]`, of some of an episode's draws; of its first ones, if all are 0.

    `numbers` are theirs, such as the attempt and the segment, each from 0.
    """
    if not any(numbers):
        return key
    digest = hashlib.sha256(key.astype("<u4").tobytes() + np.array(numbers, "<u4").tobytes())
    return np.frombuffer(digest.digest()[:8], "<u4").astype(np.uint32)


@dataclasses.dataclass
class Counts:
    """What episodes needed."""

    turns: int = 0  # asked of the model
    # calls of the device: of the searches of an agent, or of the turns of a policy. There is one
    # for each turn where a server samples.
    batches: int = 0
    searches: int = 0  # that were done
    failed: int = 0  # episodes that failed, attempts that were repeated among them
    outside: int = 0  # sampled tokens that are no part of an episode
    lost: int = 0  # processes that were lost


class Playing(NamedTuple):
    place: int  # of its start in the list
    attempt: int  # from 1
    steps: Generator[Any, Any, Any]  # what it asks for → the replies; returns the played episode


class Schedule:
    """Plays one list of episodes; a subclass says what they ask for, and answers it.

    A sampler on the device computes rows side by side: it is asked when no episode can go on
    without it. A server is asked for each turn at once.

    Args:
        attempts: an episode that ends as `Failed` is played again, so often in all.
    """

    sampler: trajectories.Sampler  # of turns, if episodes ask for some

    def __init__(self, attempts: int, counts: Counts) -> None:
        self.counts, self._attempts = counts, attempts
        self._ready: deque[tuple[Playing, Any]] = deque()  # episodes that can go on, with the reply
        self._arrived: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        # What is waited for as well, and where each goes.
        self.flying: dict[Future[Any], list[Callable[[Any], None]]] = {}
        # Turns that wait to be asked for, and where they go.
        self.speaking = list[tuple[SampleRequest, Callable[[Sampled | Failure], None]]]()

    def episode(self, start: Any, attempt: int) -> Generator[Any, Any, Any]:
        """An attempt, from 1, of an episode; what it returns has a field `ended`."""
        raise NotImplementedError

    def take(self, playing: Playing, step: Any) -> None:
        """Begins to answer what an episode asks for; `reply` then lets it go on."""
        raise NotImplementedError

    def waits(self) -> bool:
        """Whether something that was asked for is not begun yet."""
        return bool(self.speaking)

    def dispatch(self) -> float:
        """Starts collected requests if it is time; returns how many seconds nothing else may be."""
        raise NotImplementedError

    def run(self, starts: Sequence[Any], stop: Checks) -> list[Any]:
        """Plays episodes to their ends; each is in the place of its start.

        `stop` is looked at all the while.
        """
        self.stop = stop
        played: list[Any] = [None] * len(starts)

        def begin(place: int, attempt: int) -> None:
            self.reply(Playing(place, attempt, self.episode(starts[place], attempt)), None)

        for place in range(len(starts)):
            begin(place, 1)
        try:
            while self._ready or self.waits() or self.flying:
                stop.check()
                while self._ready:
                    episode, reply = self._ready.popleft()
                    try:
                        step = episode.steps.send(reply)
                    except StopIteration as end:
                        played[episode.place] = end.value
                        if isinstance(end.value.ended, env.Failed):
                            self.counts.failed += 1
                            if episode.attempt < self._attempts:
                                begin(episode.place, episode.attempt + 1)
                        continue
                    self.take(episode, step)
                seconds = self.dispatch()
                self._collect(0.0 if self._ready else seconds)
        finally:
            for future in self.flying:
                future.cancel()
        return played

    def reply(self, playing: Playing, reply: Any) -> None:
        self._ready.append((playing, reply))

    def fly(self, future: Future[Any], arrived: Callable[[Any], None]) -> None:
        """Waits for a future as well; its result goes to `arrived`."""
        if future not in self.flying:
            self.flying[future] = []
            future.add_done_callback(self._arrived.put)
        self.flying[future].append(arrived)

    def sample(self) -> None:
        """Asks for the turns that wait, if it is time."""
        if not self.speaking or (self.sampler.in_rounds and self.flying):
            return
        waiting, self.speaking = self.speaking, []
        futures = self.sampler.submit([request for request, _ in waiting])
        self.counts.turns += len(waiting)
        self.counts.batches += 1 if self.sampler.in_rounds else len(waiting)

        def read(request: SampleRequest, arrived: Callable[..., None], result: Any) -> None:
            arrived(self.sampler.read(request, result))

        for (request, arrived), future in zip(waiting, futures, strict=True):
            self.fly(future, partial(read, request, arrived))

    def _collect(self, seconds: float) -> None:
        """Takes all that has arrived; waits for the first of it."""
        while self.flying:
            try:
                future = self._arrived.get(seconds > 0, seconds)
            except queue.Empty:
                return
            seconds = 0.0
            for arrived in self.flying.pop(future):
                arrived(future.result())


# ---------------------------------------------------------------- episodes of agents

# Playing again, even later, does not change these.
HOPELESS = (*PERMANENT, env.NO_RETRIEVAL, env.MALFORMED_CALL, env.OWN_CODE)
GATHER = 0.02  # seconds in which further searches may join a batch

Search = Callable[[Sequence[Ask]], Sequence[Drawn | Failure]]


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
        if isinstance(self.ended, env.Failed):
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
        agent: env.Agent,
        *,
        stop: Checks,
        attempts: int = 2,
        counts: Counts | None = None,
        sampler: trajectories.Sampler | None = None,
        speech: Speech | None = None,
        library: Library | None = None,
        functions: ToolFunctions | None = None,
        search: Search | None = None,
        model: Client | None = None,
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
            if isinstance(step, env.Complete):
                reply = yield from self._completed(start, attempt, step)
            elif isinstance(step, env.Retrieve):
                reply = yield Ask(start.task.question, step, key)
                if isinstance(reply, Drawn):
                    searches.append(reply)
                    reply = reply.passages
            elif isinstance(step, env.Speak):
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
    ) -> Generator[SampleRequest, Sampled | Failure, env.Said | Failure]:
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
                    f"the prompt of question {start.task.id!r} has {len(ids)} tokens; raise "
                    f"config.sampling.room, which is {speech.room}, or shorten the prompt."
                )
            return env.Said("", "length")
        # Positions of a rewritten segment were drawn at before, so it has a key of its own.
        key = key_within(start.key, attempt - 1, len(segments) - 1)
        drawn = yield SampleRequest(ids, key, min(speech.turn, left))
        if isinstance(drawn, Failure):
            return drawn
        text, version = speech.text(drawn.ids), self.sampler.version
        segments[-1].append(
            trajectories.Turn(observed, drawn.ids, drawn.log_probs, drawn.finish, version)
        )
        talk.append(("assistant", text))
        return env.Said(text, "length" if drawn.finish == trajectories.LENGTH else "stop")

    def _completed(
        self, start: Start, attempt: int, step: env.Complete
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
        elif isinstance(step, SampleRequest):
            self.speaking.append((step, partial(self.reply, playing)))
        elif isinstance(step, Ask):
            if not self._retrieving:
                self._since = time.monotonic()
            self._retrieving.append((playing, step))
        elif isinstance(step[1], env.Call):
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
    if isinstance(ended, env.Closed):
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
