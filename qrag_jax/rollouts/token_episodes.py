"""Plays episodes of a language model with tools, hundreds at once: tokens in, tokens out.

What the model sampled stays as it is: the next prompt is the ids so far and, behind them, the ids
of what the environment says. Text is decoded only to be read by the environment.

A sampler on the device computes rows side by side: it is asked when no episode can go on without
it. A server is asked for each turn at once. Searches that wait are one batch, in a thread.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from qrag_jax.environments.episode import (
    Agent,
    Closed,
    Document,
    Ended,
    Failed,
    Look,
    Open,
    Reply,
    Said,
    Speak,
    Step,
    ToolTask,
)
from qrag_jax.environments.queries import Searched
from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.feedback.llm import Checks
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.scaffolds import Scaffold
from qrag_jax.rollouts.schedule import LOOK_EVERY, Counts, Playing, Schedule, key_within
from qrag_jax.rollouts.token_sampler import LENGTH, Sampled, SampleRequest
from qrag_jax.rollouts.trajectories import (
    DONE,
    TRUNCATED,
    Segment,
    Turn,
    segments_from_json,
    segments_to_json,
)
from qrag_jax.runtime import hosts
from qrag_jax.runtime.bounded_json import typed
from qrag_jax.runtime.interrupt import Stopped


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
        self.counts = Counts()
        self._agent, self._sampler, self._library = agent, sampler, library
        self._speech, self._stop, self._attempts = speech, stop, attempts

    def play(self, starts: Sequence[TokenStart]) -> list[TokenEpisode]:
        """Plays the episodes side by side; each is returned in the place of its start.

        Raises:
            Stopped: the run is told to stop; requests in flight are cancelled.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="search") as thread:
            course = _Course(self, thread)
            return [each.episode for each in course.run(starts)]


class _Episode(Playing):
    """One episode, with its messages and ids."""

    def __init__(self, start: TokenStart, agent: Agent, attempt: int) -> None:
        super().__init__(start, agent, attempt)
        self.segments: list[list[Turn]] = []
        self._talk: list[tuple[str, str]] = []  # all messages so far
        self._before: list[np.ndarray] = []  # the ids of the segment so far
        self._observed = np.zeros(0, np.int32)  # those that the next turn answers

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


class _Course(Schedule):
    """Plays one list of episodes."""

    def __init__(self, rollout: TokenRollout, thread: ThreadPoolExecutor) -> None:
        def begin(start: TokenStart, attempt: int) -> _Episode:
            return _Episode(start, rollout._agent, attempt)

        super().__init__(begin, Failed, rollout._attempts, rollout.counts, rollout._stop)
        self._sampler, self._library = rollout._sampler, rollout._library
        self._speech, self._thread = rollout._speech, thread
        self._speaking: list[tuple[_Episode, SampleRequest]] = []
        self._looking: list[tuple[_Episode, Look | Open]] = []

    def take(self, playing: _Episode, step: Step) -> None:
        """See `Schedule`."""
        if not isinstance(step, Speak):
            assert isinstance(step, Look | Open)
            self._looking.append((playing, step))
            return
        request = playing.request(step, self._speech)
        if request is None:
            self.reply(playing, Said("", "length"))
        else:
            self._speaking.append((playing, request))

    def waits(self) -> bool:
        """See `Schedule`."""
        return bool(self._speaking or self._looking)

    def dispatch(self) -> float:
        """Searches; samples, in rounds where no episode can go on without."""
        if self._looking:
            self._search()
        if self._speaking and not (self._sampler.in_rounds and self.flies):
            self._sample()
        return LOOK_EVERY

    def _sample(self) -> None:
        waiting, self._speaking = self._speaking, []
        futures = self._sampler.submit([request for _, request in waiting])
        self.counts.turns += len(waiting)
        self.counts.batches += 1 if self._sampler.in_rounds else len(waiting)
        for (each, _), future in zip(waiting, futures, strict=True):
            self.fly(future, partial(self._hear, each))

    def _hear(self, playing: _Episode, sampled: Sampled | Failure) -> None:
        if isinstance(sampled, Failure):
            self.reply(playing, sampled)
        else:
            said = playing.take(sampled, self._speech, self._sampler.version)
            self.reply(playing, said)

    def _search(self) -> None:
        waiting, self._looking = self._looking, []
        steps = [(each.start.task, step) for each, step in waiting]
        self.counts.searches += len(waiting)

        def arrived(found: list[Reply]) -> None:
            for (each, _), one in zip(waiting, found, strict=True):
                self.reply(each, one)

        self.fly(self._thread.submit(self._found, steps), arrived)

    def _found(self, steps: Sequence[tuple[ToolTask, Look | Open]]) -> list[Reply]:
        """In the thread: what the tools give."""
        looks = [(task, step) for task, step in steps if isinstance(step, Look)]
        found = iter(self._library.look(looks)) if looks else iter(())
        return [
            next(found) if isinstance(step, Look) else self._library.open(task, step)
            for task, step in steps
        ]


def facts_of(ended: Ended) -> Mapping[str, Any]:
    """What is logged of an episode."""
    found: dict[str, Any] = {"tally": dataclasses.asdict(ended.tally)}
    if isinstance(ended, Closed):
        return found | {"answer": ended.answer, "cited": [*ended.cited], "seen": [*ended.seen]}
    return found | {"message": ended.message}


# ---------------------------------------------------------------- episodes of all hosts
# Documents that episodes have found stand in a table, each once: many episodes find the same ones.

_KINDS: dict[str, type] = {kind.__name__: kind for kind in (Closed, Failed, Searched)}
_FOUND = "found"  # the field that has documents


def to_text(episodes: Iterable[TokenEpisode]) -> str:
    """Episodes as JSON; `from_text` reads them, to the last bit."""
    table = dict[Document, int]()  # a document without its score → its number

    def number(document: Document) -> tuple[int, float]:
        return table.setdefault(document._replace(score=0.0), len(table)), document.score

    rows = [
        {
            "kind": type(each.ended).__name__,
            "ended": _fields(each.ended, number),
            "segments": segments_to_json(each.segments),
            "attempts": each.attempts,
        }
        for each in episodes
    ]
    return json.dumps({"documents": [each._asdict() for each in table], "episodes": rows})


def from_text(text: str) -> list[TokenEpisode]:
    """Reads what `to_text` gave."""
    whole = json.loads(text)
    documents = [Document(**each) for each in whole["documents"]]
    return [
        TokenEpisode(
            _ended(row["kind"], row["ended"], documents),
            segments_from_json(row["segments"]),
            row["attempts"],
        )
        for row in whole["episodes"]
    ]


def _fields(ended: Ended, number: Callable[[Document], tuple[int, float]]) -> dict[str, Any]:
    found = getattr(ended, _FOUND, None)
    fields = {
        field.name: getattr(ended, field.name)
        for field in dataclasses.fields(ended)
        if field.name != _FOUND
    }
    fields["tally"] = dataclasses.asdict(ended.tally)
    return fields if found is None else fields | {_FOUND: [number(each) for each in found]}


def _ended(kind: str, fields: Mapping[str, Any], documents: Sequence[Document]) -> Ended:
    given = {name: value for name, value in fields.items() if name != _FOUND}
    ended: Ended = typed(_KINDS[kind], given)
    if not isinstance(ended, Searched):
        return ended
    found = tuple(documents[n]._replace(score=score) for n, score in fields[_FOUND])
    return dataclasses.replace(ended, found=found)


def played_by_all(
    starts: Sequence[TokenStart], play: Callable[[Sequence[TokenStart]], list[TokenEpisode]]
) -> list[TokenEpisode]:
    """The episodes of these starts, in their order; all hosts call this together with the same.

    Args:
        play: plays episodes on this host alone; an episode does not depend on the others.

    Raises:
        Stopped: the run is told to stop, on this host or another.
        FeedbackLost: too many episodes of a host fail.
    """
    count, index = jax.process_count(), jax.process_index()
    if count == 1:
        return play(starts)
    failure: Exception | None = None
    own = list[TokenEpisode]()
    try:
        # Neighbours stay together: those of a group have one prompt, which is read once.
        part = starts[len(starts) * index // count : len(starts) * (index + 1) // count]
        own = play(part) if part else []
    except (Stopped, FeedbackLost) as why:
        failure = why
    hosts.fail_together(failure, FeedbackLost)
    return [each for text in hosts.texts_of_each(to_text(own)) for each in from_text(text)]
