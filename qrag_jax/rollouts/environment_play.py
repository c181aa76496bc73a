"""Plays episodes of environments of `verifiers`: their process acts, a sampler of ours speaks.

The process asks for turns by ids, and says at an episode's end which of them are part of it. A
sampler on the device is asked when nothing has arrived for a moment, or when all episodes wait for
it. A process that was lost is started again, and its episodes are played anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import queue
import time
from collections import Counter, deque
from collections.abc import Collection, Generator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.environments.episode import Closed, Failed, ToolTally
from qrag_jax.environments.verifiers_process import EnvironmentProcess, ProcessLost
from qrag_jax.feedback.rewards import Checks
from qrag_jax.llm.outcomes import Failure
from qrag_jax.rollouts.schedule import Counts, Playing, Schedule, key_within
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.rollouts.trajectories import STOP, Sampled, Sampler, SampleRequest, Segment, Turn
from qrag_jax.runtime.interrupt import LOOK_EVERY
from qrag_jax.runtime.run import log

_GATHER = 0.03  # seconds in which further requests may join a round
_GRACE = 20.0  # seconds, beyond those of the environment, before it is taken for lost
_NUMBERS = itertools.count(1)  # of episodes: a late message has a number of the past
_NONE = np.zeros(0, np.int32)
# Fields of a request that leave the distribution as it is, with the values that do so.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1, 1.0),
    "top_k": (-1, 0),
    "min_p": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
}
_RESHAPING = ("logit_bias", "stop", "seed", "bad_words", "min_tokens", "response_format")


@dataclasses.dataclass(frozen=True, slots=True)
class Scored(Closed):
    """An episode that came to an end."""

    reward: float = 0.0  # by the environment's rubric
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)  # values of its functions
    stop: str = ""  # its name for the end
    # what verifiers itself would write of it
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    outside: int = 0  # tokens that the environment had sampled and that are no part of the episode


class EnvironmentStart(NamedTuple):
    task: int  # its number
    key: np.ndarray  # uint32 `[2]`, of the episode's draws


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaySettings:
    turn: int  # tokens that a turn may sample
    room: int  # tokens of a row
    turns: int  # of the model, in an episode
    tokens: int  # sampled in an episode; 0: no limit
    # of the sampling; None: any that is asked for is taken for the run's own
    temperature: float | None
    seconds: float = 0.0  # that an environment may work on an episode by itself; 0: no limit
    attempts: int = 1  # an episode that fails is played again, so often in all
    side_by_side: int = 1  # episodes that are played at a time
    tokenizer: str = ""  # its folder, for a renderer of verifiers' own
    stop_ids: tuple[int, ...] = ()  # that end a turn


class _Episode(NamedTuple):
    """One episode while the process plays it; its reply is its end and its segments."""

    playing: Playing
    start: EnvironmentStart
    calls: EpisodeCalls


class EnvironmentPlay(Schedule):
    def __init__(self, process: EnvironmentProcess, settings: PlaySettings, counts: Counts) -> None:
        super().__init__(settings.attempts, counts, None)
        self._process, self._settings = process, settings
        self._causes = set[str]()  # of failures that were logged
        self._todo = deque[_Episode]()
        self._playing = dict[int, _Episode]()
        self._heard = 0.0  # when the environment said something

    def play(
        self, starts: Sequence[EnvironmentStart], sampler: Sampler, stop: Checks
    ) -> list[TokenEpisode]:
        """Plays the episodes side by side; each is returned in the place of its start."""
        self.sampler, self.stop = sampler, stop
        try:
            return self.run(starts)
        finally:
            if self._playing:  # they would go on, and disturb what is played next
                self._process.end()

    def episode(self, start: EnvironmentStart, attempt: int) -> Generator[Any, Any, TokenEpisode]:
        """All that it asks for, once, is its end and its segments."""
        calls = EpisodeCalls(self._settings, key_within(start.key, attempt - 1))
        ended, segments = yield start, calls
        return TokenEpisode(ended, segments, attempt)

    def take(self, playing: Playing, step: Any) -> None:
        self._todo.append(_Episode(playing, *step))

    def waits(self) -> bool:
        return bool(self._todo or self._playing)

    def dispatch(self) -> float:
        while self._todo and len(self._playing) < max(self._settings.side_by_side, 1):
            each, number = self._todo.popleft(), next(_NUMBERS)
            self._playing[number] = each
            try:
                self._process.start(self.check)
            except ProcessLost as lost:
                self._lose("connection", str(lost))
                break
            self._heard = time.monotonic()
            settings = self._settings
            self._process.say(
                "play",
                task=each.start.task,
                episode=number,
                temperature=settings.temperature,
                tokenizer=settings.tokenizer,
                stop_ids=settings.stop_ids,
            )
        self._hear()
        self.sample()
        return 0.0

    def _hear(self) -> None:
        """Takes what has arrived; waits a little if nothing has."""
        wait = _GATHER if self.speaking or self.flying else LOOK_EVERY
        while self._playing:
            if 0 < len(self._playing) <= len(self.speaking):
                wait = 0.0
            try:
                message = self._process.messages.get(wait > 0, wait)
            except queue.Empty:
                limit = self._settings.seconds
                silent = time.monotonic() - self._heard > limit + _GRACE
                if limit and silent and not (self.speaking or self.flying):
                    self._lose(
                        "timeout",
                        f"the environment said nothing for {limit + _GRACE:.0f} s, and its process "
                        f"was ended (config.env.seconds is {limit:g})",
                    )
                return
            self._heard = time.monotonic()
            if message is None:
                self._lose("connection", f"the environment's process {self._process.status()}")
            elif message["op"] == "turn":
                self._take_turn(message)
            elif message["op"] == "played":
                self._take_played(message)

    def _take_turn(self, message: Mapping[str, Any]) -> None:
        number, sampling = message["call"], {**message["sampling"]}
        stop_ids = sampling.pop("stop_token_ids", None) or self._settings.stop_ids
        if (each := self._playing.get(message["episode"])) is None:
            call: Any = Failure("request", f"there is no episode {message['episode']}")
        elif others := {*stop_ids}.difference(self._settings.stop_ids):
            ends, asked = (", ".join(map(str, ids)) for ids in (self._settings.stop_ids, others))
            what = f"turns end at the tokens {ends}, not at {asked}; use a renderer of this model"
            call = Failure("request", what)
        else:
            call = each.calls.ask(np.array(message["ids"], np.int32), sampling)
        if isinstance(call, Failure):
            self._answer(number, call)
        else:
            self.speaking.append((call.request, partial(self._take_sampled, message, call)))

    def _take_played(self, message: Mapping[str, Any]) -> None:
        each = self._playing.pop(message["episode"], None)
        if each is None:
            return
        if failure := message.get("failure"):
            self._fail(each, failure["cause"], failure["message"])
            return
        try:
            segments, outside = each.calls.of_nodes(message["nodes"])
        except ValueError as error:
            self._fail(each, "malformed", str(error))
            return
        self.counts.outside += outside
        ended = Scored(
            answer="",
            tally=ToolTally(truncated=message["truncated"]),
            reward=float(message["reward"]),
            parts=message["parts"],
            stop=message.get("stop") or "",
            record=message["record"],
            outside=outside,
        )
        self.reply(each.playing, (ended, segments))

    def _fail(self, each: _Episode, cause: str, message: str) -> None:
        if cause not in self._causes:
            self._causes.add(cause)
            log(
                f"an episode failed ({cause}: {message}); such episodes are played again, then "
                "masked and counted"
            )
        self.reply(each.playing, (Failed(cause, message), each.calls.segments()))

    def _lose(self, cause: str, message: str) -> None:
        """All that is played has no process any more."""
        self.counts.lost += 1
        self._process.end()
        for _, arrived in self.speaking:
            arrived(Failure(cause, message))
        self.speaking.clear()
        playing, self._playing = self._playing, {}
        for each in playing.values():
            self._fail(each, cause, message)

    def _take_sampled(
        self, message: Mapping[str, Any], call: Call, sampled: Sampled | Failure
    ) -> None:
        if isinstance(sampled, Sampled):
            call.sampled, call.version = sampled, self.sampler.version
        if message["episode"] in self._playing:  # else its process was lost meanwhile
            self._answer(message["call"], sampled)

    def _answer(self, number: int, sampled: Sampled | Failure) -> None:
        """Answers a call of the process: from now on it is the environment's turn."""
        self._heard = time.monotonic()
        if isinstance(sampled, Failure):
            status = 400 if sampled.cause in ("request", "too_long") else 503
            self._process.say("answer", call=number, error=sampled.message, status=status)
            return
        ids, log_probs = sampled.ids.tolist(), sampled.log_probs.tolist()
        fields = {"ids": ids, "log_probs": log_probs, "finish": sampled.finish}
        self._process.say("answer", call=number, **fields)


# ---------------------------------------------------------------- the turns of one episode


@dataclasses.dataclass
class Call:
    """A turn that was asked for, and answered once `sampled` is there."""

    request: SampleRequest
    sampled: Sampled | None = None
    version: str = ""

    def turn(self, observed: np.ndarray) -> Turn:
        assert self.sampled is not None
        return Turn(observed, *self.sampled, self.version)


class EpisodeCalls:
    """The turns of one episode; `key` is uint32 `[2]`, of its draws."""

    def __init__(self, limits: PlaySettings, key: np.ndarray) -> None:
        self._limits, self._key = limits, key
        self._calls = list[Call]()
        self._drawn: Counter[bytes] = Counter()

    def ask(self, ids: np.ndarray, sampling: Mapping[str, Any]) -> Call | Failure:
        """The turn to sample behind these ids, int32, or why there is none."""
        limits, sampled = self._limits, self._sampled()
        if problem := unfit(sampling, limits.temperature):
            return Failure("request", problem)
        left = [limits.turn, limits.room - len(ids)]
        over = ""
        if len(self._calls) >= limits.turns:
            over = f"config.env.max_turns, {limits.turns}"
        elif limits.tokens and sampled >= limits.tokens:
            over = f"config.env.max_tokens, {limits.tokens}"
        elif left[1] < 1:
            over = f"config.sampling.room, {limits.room}"
        if over:
            return Failure("request", f"the limit of {over} is reached")
        if limits.tokens:
            left.append(limits.tokens - sampled)
        if asked := sampling.get("max_tokens") or sampling.get("max_completion_tokens"):
            left.append(max(int(asked), 1))
        self._calls.append(Call(SampleRequest(ids, self._draw_key(ids), min(left))))
        return self._calls[-1]

    def segments(self) -> tuple[Segment, ...]:
        """Each turn as one, behind all ids before it."""
        calls = [call for call in self._calls if call.sampled is not None and len(call.sampled.ids)]
        return tuple((call.turn(call.request.ids),) for call in calls)

    def of_nodes(self, nodes: Sequence[Mapping[str, Any]]) -> tuple[tuple[Segment, ...], int]:
        """The segments of a graph of messages, and how many sampled tokens are no part of it.

        A node has its parent's number (-1: none), its ids, a mask of those that were sampled, and
        whether these train. Raises `ValueError` if they were not sampled here.
        """
        kept, parts = set[int](), list[tuple[int, Turn]]()
        before: dict[int, np.ndarray] = {-1: _NONE}  # all ids up to the end of each node
        for number, node in enumerate(nodes):
            parent, ids = node["parent"], np.array(node["ids"], np.int32)
            mask = np.array(node["mask"], bool)
            start = len(ids) - int(mask.sum())
            if not mask[start:].all():
                raise ValueError("a turn has tokens that were not sampled between those that were")
            before[number] = np.concatenate([before[parent], ids])
            turn = Turn(ids, _NONE, _NONE, STOP)
            if start < len(ids):
                context = before[number][: len(before[parent]) + start]
                at = self._place(context, ids[start:], kept)
                if node["trains"] and at not in kept:
                    turn = self._calls[at].turn(ids[:start])
                if node["trains"]:
                    kept.add(at)
            parts.append((parent, turn))
        return segments_of(parts), self._sampled(kept)

    def _place(self, context: np.ndarray, ids: np.ndarray, kept: set[int]) -> int:
        """The call that sampled these ids behind this context; of several, one not kept yet."""
        places = [
            place
            for place, call in enumerate(self._calls)
            if call.sampled is not None
            and np.array_equal(call.sampled.ids, ids)
            and np.array_equal(call.request.ids, context)
        ]
        if not places:
            raise ValueError(
                "an episode has a turn that was not sampled by the model that is trained"
            )
        return next((place for place in places if place not in kept), places[-1])

    def _sampled(self, but: Collection[int] = ()) -> int:
        """Tokens that were sampled by all calls but these."""
        return sum(
            len(call.sampled.ids)
            for place, call in enumerate(self._calls)
            if call.sampled is not None and place not in but
        )

    def _draw_key(self, ids: np.ndarray) -> np.ndarray:
        """The key of a turn's draws: by the episode, the ids before it, and how often it came.

        So it does not depend on the order in which branches ask.
        """
        digest = hashlib.sha256(self._key.astype("<u4").tobytes() + ids.astype("<i4").tobytes())
        times = self._drawn[digest.digest()]
        self._drawn[digest.digest()] += 1
        digest.update(times.to_bytes(4, "little"))
        return np.frombuffer(digest.digest()[:8], "<u4").astype(np.uint32)


def unfit(sampling: Mapping[str, Any], temperature: float | None) -> str:
    """Why a request's sampling would have another distribution, as a sentence; "" if it has not.

    `temperature` is that of the run; None: it is not looked at.
    """
    asked = {**(sampling.get("extra_body") or {}), **sampling}
    for name, value in asked.items():
        neutral = _NEUTRAL.get(name)
        if value in (None, [], {}) or (neutral is not None and value in neutral):
            continue
        if neutral is not None or name in _RESHAPING:
            return (
                f"the environment asks for {name}={value!r}, by which log-probabilities would be "
                "of another distribution; leave it out"
            )
        if name == "temperature" and temperature is not None and value != temperature:
            return (
                f"the environment asks for the temperature {value}, and the run samples at "
                f"{temperature}; set config.sampling.temperature to {value}"
            )
    return ""


def segments_of(parts: Sequence[tuple[int, Turn]]) -> tuple[Segment, ...]:
    """The segments of a forest: an environment may ask for several turns behind one prefix.

    A row of a batch is a path from a root to a leaf; what an earlier row has trained is read in a
    later one, and not trained. Tokens that no sampled ones follow are left out.

    Args:
        parts: the lower number of the part before, -1 for none; and a turn, whose sampled ids
            train. It has none if its ids are only read.
    """
    inner = {parent for parent, _ in parts}
    trained, segments = set[int](), []
    for leaf in range(len(parts)):
        if leaf in inner:
            continue
        path, number = list[int](), leaf
        while number >= 0:
            path.append(number)
            number = parts[number][0]
        turns, read = list[Turn](), list[np.ndarray]()
        for number in reversed(path):
            turn = parts[number][1]
            read.append(turn.observed)
            if number in trained or not len(turn.sampled):
                read.append(turn.sampled)
                continue
            trained.add(number)
            observed, read = np.concatenate(read).astype(np.int32), []
            turns.append(dataclasses.replace(turn, observed=observed))
        if turns:
            segments.append(tuple(turns))
    return tuple(segments)
