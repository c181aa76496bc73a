"""Plays episodes of environments of `verifiers`: their process acts, a sampler of ours speaks.

All episodes are played side by side. A sampler on the device is asked when nothing has arrived for
a moment, or when all episodes wait for it. An episode that fails is played again, then it has no
reward. A process that was lost is started again, and its episodes are played anew.
"""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.environments.verifiers_process import EnvironmentProcess, ProcessLost
from qrag_jax.feedback.llm import Checks
from qrag_jax.llm.outcomes import CAUSES, Failure
from qrag_jax.llm.text.chat_rendering import ChatRenderer, TextLost
from qrag_jax.rollouts.called_turns import EpisodeCalls, Over, TurnLimits
from qrag_jax.rollouts.generate_server import Wanted
from qrag_jax.rollouts.schedule import LOOK_EVERY, Counts, key_within
from qrag_jax.rollouts.token_episodes import Sampler
from qrag_jax.rollouts.token_sampler import Sampled, SampleRequest
from qrag_jax.rollouts.trajectories import DONE, TRUNCATED, Segment
from qrag_jax.runtime.run import log

WANTED = "wanted"  # the `op` of a message from the server of turns
_GATHER = 0.03  # seconds in which further requests may join a round
_GRACE = 20.0  # seconds, beyond those of the environment, before it is taken for lost


@dataclasses.dataclass(frozen=True)
class Scored:
    """An episode that came to an end.

    Attributes:
        reward: by the environment's rubric.
        parts: values of its functions.
        stop: its name for the end.
        truncated: a limit ended it.
        record: what verifiers itself would write of it.
        outside: tokens that the environment had sampled and that are no part of the episode.
    """

    reward: float
    parts: Mapping[str, float]
    stop: str
    truncated: bool
    record: Mapping[str, Any]
    outside: int = 0


@dataclasses.dataclass(frozen=True)
class Lost:
    """An episode that has no reward.

    Attributes:
        cause: a short word, such as those of `llm.outcomes` and `feedback.llm`.
        message: one sentence.
    """

    cause: str
    message: str


class Unit(NamedTuple):
    """Episodes of one task that are played together, since their rewards may compare them.

    Attributes:
        split: "train" or "eval".
        task: its number.
        keys: uint32 `[2]`, of the draws of each episode.
    """

    split: str
    task: int
    keys: tuple[np.ndarray, ...]


class PlayedEpisode(NamedTuple):
    """A played episode.

    Attributes:
        ended: how it ended.
        segments: what was sampled and observed.
        attempts: how often it was played.
        seconds: from its begin to its reward.
    """

    ended: Scored | Lost
    segments: tuple[Segment, ...]
    attempts: int
    seconds: float

    @property
    def status(self) -> str:
        """As `TokenTrajectory.status`."""
        if isinstance(self.ended, Lost):
            return self.ended.cause
        return TRUNCATED if self.ended.truncated else DONE


class PlayedUnit(NamedTuple):
    """The episodes of a unit."""

    episodes: tuple[PlayedEpisode, ...]

    @property
    def ended(self) -> Scored | Lost:
        """The first failure; if there is none, the end of the first episode."""
        ends = [episode.ended for episode in self.episodes]
        return next((end for end in ends if isinstance(end, Lost)), ends[0])


@dataclasses.dataclass(frozen=True)
class PlaySettings:
    """How environments are played.

    Attributes:
        limits: of an episode.
        seconds: that an environment may work on an episode by itself.
        attempts: a unit that fails is played again, so often in all.
        side_by_side: episodes that are played at a time.
        served: where the process finds the server of turns, and its settings.
    """

    limits: TurnLimits
    seconds: float
    attempts: int
    side_by_side: int
    served: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def hands_over(process: EnvironmentProcess) -> Callable[[Wanted], None]:
    """What gives the turns that a server of turns is asked for to the thread that plays.

    That thread may be sampling others for minutes, so the model's time begins here already.
    """

    def want(wanted: Wanted) -> None:
        speaks = partial(process.say, "speaks", episode=wanted.episode)
        speaks(on=True)
        wanted.turn.add_done_callback(lambda _: speaks(on=False))
        process.messages.put({"op": WANTED, "wanted": wanted})

    return want


class Asked(NamedTuple):
    """A turn that an episode waits for.

    Attributes:
        request: what is sampled.
        take: is given what was sampled, or why nothing was.
    """

    request: SampleRequest
    take: Callable[[Sampled | Failure], None]


class EnvironmentPlay:
    """Plays units.

    Args:
        process: has the environment.
        renderer: between messages and ids.

    Attributes:
        counts: over all calls of `play`.
    """

    def __init__(
        self,
        process: EnvironmentProcess,
        renderer: ChatRenderer,
        settings: PlaySettings,
        counts: Counts,
    ) -> None:
        self.counts = counts
        self._process, self._renderer, self._settings = process, renderer, settings
        self._told = set[str]()  # causes of failures
        self._numbers = 0  # of episodes, over all plays: a late message has a number of the past
        self.calls: dict[int, EpisodeCalls] = {}  # of the episodes that are played

    def play(self, units: Sequence[Unit], sampler: Sampler, stop: Checks) -> list[PlayedUnit]:
        """Plays the units side by side; each is returned in its place.

        Raises:
            Stopped: the run is told to stop.
        """
        played: dict[int, PlayedUnit] = {}
        for attempt in range(1, self._settings.attempts + 1):
            left = {
                place: unit
                for place, unit in enumerate(units)
                if place not in played or isinstance(played[place].ended, Lost)
            }
            if not left:
                break
            played |= _Course(self, sampler, stop, attempt).run(left)
        return [played[place] for place in range(len(units))]

    def tell(self, lost: Lost) -> None:
        """Logs a failure, the first one of each cause."""
        if lost.cause not in self._told:
            self._told.add(lost.cause)
            log(
                f"an episode failed ({lost.cause}: {lost.message}); such episodes are played "
                "again, then masked and counted"
            )

    def number(self) -> int:
        """The number of a new episode."""
        self._numbers += 1
        return self._numbers


class _Playing:
    """A unit that is played."""

    def __init__(self, place: int, unit: Unit, numbers: Sequence[int]) -> None:
        self.place, self.unit, self.numbers = place, unit, tuple(numbers)
        self.ended: dict[int, PlayedEpisode] = {}


class _Course:
    """Plays some units once."""

    def __init__(self, play: EnvironmentPlay, sampler: Sampler, stop: Checks, attempt: int) -> None:
        self._play, self._sampler, self._stop, self._attempt = play, sampler, stop, attempt
        self._process, self._settings = play._process, play._settings
        self._counts, self._renderer = play.counts, play._renderer
        self._waiting: list[Asked] = []
        self._flying: list[tuple[Asked, Future[Sampled | Failure]]] = []
        self._by_number: dict[int, _Playing] = {}
        self._heard = time.monotonic()

    def run(self, units: Mapping[int, Unit]) -> dict[int, PlayedUnit]:
        """Plays them to their ends."""
        todo = [*units.items()]
        todo.reverse()
        found: dict[int, PlayedUnit] = {}
        try:
            while todo or self._by_number:
                self._stop.check()
                self._begin(todo)
                self._hear()
                self._speak()
                for playing in {id(each): each for each in self._by_number.values()}.values():
                    if len(playing.ended) == len(playing.numbers):
                        found[playing.place] = PlayedUnit(
                            tuple(playing.ended[number] for number in playing.numbers)
                        )
                        for number in playing.numbers:
                            del self._by_number[number]
                            self._play.calls.pop(number, None)
        finally:
            for _, future in self._flying:
                future.cancel()
            if self._by_number:  # they would go on, and disturb what is played next
                self._process.end()
                self._play.calls.clear()
        return found

    def _begin(self, todo: list[tuple[int, Unit]]) -> None:
        while todo and len(self._by_number) < max(self._settings.side_by_side, 1):
            try:
                self._process.start(self._stop.check)
            except ProcessLost as lost:
                place, unit = todo.pop()
                self._counts.lost += 1
                self._start(place, unit)
                self._all_lost("connection", str(lost))
                return
            place, unit = todo.pop()
            playing = self._start(place, unit)
            self._heard = time.monotonic()
            self._process.say(
                "play",
                split=unit.split,
                task=unit.task,
                episodes=[*playing.numbers],
                served=self._settings.served,
            )

    def _start(self, place: int, unit: Unit) -> _Playing:
        numbers = [self._play.number() for _ in unit.keys]
        playing = _Playing(place, unit, numbers)
        for number, key in zip(numbers, unit.keys):
            self._by_number[number] = playing
            own = key_within(key, self._attempt - 1)
            self._play.calls[number] = EpisodeCalls(self._renderer, self._settings.limits, own)
        return playing

    # ---------------------------------------------------------------- messages

    def _hear(self) -> None:
        """Takes what has arrived; waits a little if nothing has."""
        wait = _GATHER if self._waiting or self._flying else LOOK_EVERY
        if self._is_full:
            wait = 0.0
        while True:
            try:
                message = self._process.messages.get(wait > 0, wait)
            except queue.Empty:
                self._look_at_time()
                return
            self._heard = time.monotonic()
            if message is None:
                self._counts.lost += 1
                self._all_lost("connection", f"the environment's process {self._process.told()}")
                return
            if message["op"] == "sample":
                self._asked(message)
            elif message["op"] == WANTED:
                self._wanted(message["wanted"])
            elif message["op"] == "played":
                self._ended(message)
            if self._is_full:
                wait = 0.0

    @property
    def _is_full(self) -> bool:
        """Whether as many turns wait as episodes are played."""
        playing = sum(number not in playing.ended for number, playing in self._by_number.items())
        return bool(self._waiting) and len(self._waiting) >= playing

    def _look_at_time(self) -> None:
        limit = self._settings.seconds
        if not limit or self._waiting or self._flying or not self._by_number:
            return
        if time.monotonic() - self._heard > limit + _GRACE:
            self._counts.lost += 1
            self._process.end()
            self._all_lost(
                "timeout",
                f"the environment said nothing for {limit + _GRACE:.0f} s, and its process was "
                f"ended (config.env.seconds is {limit:g})",
            )

    def _asked(self, message: Mapping[str, Any]) -> None:
        number, call = message["episode"], message["call"]
        calls = self._play.calls.get(number)
        if calls is None:
            return  # of an episode that is over

        def take(sampled: Sampled | Failure) -> None:
            if isinstance(sampled, Failure):
                failure = {"cause": sampled.cause, "message": sampled.message}
                self._process.say("sampled", call=call, failure=failure)
            else:
                reply = calls.take(call, sampled, self._sampler.version)
                self._process.say("sampled", call=call, **reply)

        try:
            request = calls.ask(call, message)
        except TextLost as lost:
            request = Failure("request", str(lost))
        if isinstance(request, Over):
            self._process.say("sampled", call=call, over=request.what)
        elif isinstance(request, Failure):
            take(request)
        else:
            self._waiting.append(Asked(request, take))

    def _wanted(self, wanted: Wanted) -> None:
        """A turn that is asked for by ids, through the server."""
        calls = self._play.calls.get(wanted.episode)
        if calls is None:
            wanted.turn.set_result(Failure("request", f"there is no episode {wanted.episode}"))
            return
        call = self._play.number()

        def take(sampled: Sampled | Failure) -> None:
            if isinstance(sampled, Sampled):
                calls.keep(call, sampled, self._sampler.version)
            wanted.turn.set_result(sampled)

        request = calls.ask_ids(call, wanted.ids, wanted.sampling)
        if isinstance(request, Over):
            take(Failure("request", f"the limit of {request.what} is reached"))
        elif isinstance(request, Failure):
            take(request)
        else:
            self._waiting.append(Asked(request, take))

    def _ended(self, message: Mapping[str, Any]) -> None:
        number = message["episode"]
        playing = self._by_number.get(number)
        if playing is None or number in playing.ended:
            return
        calls, seconds = self._play.calls[number], message["seconds"]
        if failure := message.get("failure"):
            self._lose(playing, number, Lost(failure["cause"], failure["message"]), seconds)
            return
        try:
            kept, segments = _learned(calls, message)
        except ValueError as error:
            self._lose(playing, number, Lost("malformed", str(error)), seconds)
            return
        outside = calls.sampled_tokens(kept)
        self._counts.outside += outside
        ended = Scored(
            reward=float(message["reward"]),
            parts=message["parts"],
            stop=message.get("stop") or "",
            truncated=message["truncated"],
            record=message["record"],
            outside=outside,
        )
        playing.ended[number] = PlayedEpisode(ended, segments, self._attempt, seconds)

    def _lose(self, playing: _Playing, number: int, lost: Lost, seconds: float = 0.0) -> None:
        self._counts.failed += 1
        self._play.tell(lost)
        calls = self._play.calls.get(number)
        segments = calls.segments() if calls is not None else ()
        playing.ended[number] = PlayedEpisode(lost, segments, self._attempt, seconds)

    def _all_lost(self, cause: str, message: str) -> None:
        """All that is played has no process any more."""
        self._process.end()
        failure = Failure(cause if cause in CAUSES else "connection", message)
        for asked in (*self._waiting, *(asked for asked, _ in self._flying)):
            asked.take(failure)
        for _, future in self._flying:
            future.cancel()
        self._waiting.clear()
        self._flying.clear()
        for number, playing in self._by_number.items():
            if number not in playing.ended:
                self._lose(playing, number, Lost(cause, message))

    # ---------------------------------------------------------------- turns

    def _speak(self) -> None:
        """Samples what is waited for, and hands over what was sampled."""
        if self._waiting and not (self._sampler.in_rounds and self._flying):
            waiting, self._waiting = self._waiting, []
            futures = self._sampler.submit([each.request for each in waiting])
            self._counts.turns += len(waiting)
            self._counts.batches += 1 if self._sampler.in_rounds else len(waiting)
            self._flying += zip(waiting, futures, strict=True)
        flying, self._flying = self._flying, []
        for asked, future in flying:
            if future.done():
                asked.take(future.result())
                self._heard = time.monotonic()  # from now on it is the environment's turn
            else:
                self._flying.append((asked, future))


def _learned(
    calls: EpisodeCalls, message: Mapping[str, Any]
) -> tuple[set[int], tuple[Segment, ...]]:
    """The calls that are part of an episode, and its segments.

    Raises:
        ValueError: the episode has sampled tokens that were not sampled here.
    """
    if "nodes" in message:
        return calls.of_nodes(message["nodes"])
    kept = set(message["calls"])
    return kept, calls.segments(kept)
