"""Plays episodes of environments of `verifiers`: their process acts, a sampler of ours speaks.

The process asks for turns by ids, and says at an episode's end which of them are part of it. A
sampler on the device is asked when nothing has arrived for a moment, or when all episodes wait for
it. A process that was lost is started again, and its episodes are played again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qrag_jax import environments
from qrag_jax.environments.episode import Closed, Failed, ToolTally
from qrag_jax.errors import InputError
from qrag_jax.feedback.rewards import Checks
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.scaffolds import ChatRenderer
from qrag_jax.rollouts import trajectories
from qrag_jax.rollouts.token_episodes import Counts, Episode, Playing, Schedule, Start, key_within
from qrag_jax.runtime.interrupt import LOOK_EVERY
from qrag_jax.runtime.line_process import LineProcess, ProcessLost
from qrag_jax.runtime.run import log

PROGRAM = Path(environments.__file__).parent / "verifiers_side"
_GATHER = 0.03  # seconds in which further requests may join a round
_GRACE = 20.0  # seconds, beyond those of the environment, before it is taken for lost
_NUMBERS = itertools.count(1)  # of episodes: a late message has a number of the past
# Fields of a request that change the distribution, but for these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: (value,) for name, value in trajectories.NEUTRAL.items()},
    "top_k": (-1, 0),
    "n": (1,),
    **dict.fromkeys(("logit_bias", "stop", "seed", "bad_words", "min_tokens"), ()),
    "response_format": (),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Scored(Closed):
    """An episode that came to an end."""

    reward: float = 0.0  # by the environment's rubric
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)  # values of its functions
    stop: str = ""  # its name for the end
    # what verifiers itself would write of it
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    outside: int = 0  # tokens that the environment had sampled and that are no part of the episode


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaySettings:
    turn: int  # tokens that a turn may sample
    room: int  # tokens of a row
    tokens: int  # sampled in an episode; 0: no limit
    # of the sampling; None: any that is asked for is taken for the run's own
    temperature: float | None
    seconds: float = 0.0  # that an environment may work on an episode by itself; 0: no limit
    attempts: int = 1  # an episode that fails is played again, so often in all
    side_by_side: int = 1  # episodes that are played at a time
    renderer: ChatRenderer  # between messages and ids


class EnvironmentPlay(Schedule):
    def __init__(self, process: EnvironmentProcess, settings: PlaySettings, counts: Counts) -> None:
        super().__init__(settings.attempts, counts)
        self._process, self._settings = process, settings
        self._causes = set[str]()  # of failures that were logged
        self._todo = deque[tuple[Playing, EpisodeCalls]]()
        self._playing = dict[int, tuple[Playing, EpisodeCalls]]()  # by the numbers of episodes
        self._heard = 0.0  # when the environment said something

    def play(
        self, starts: Sequence[Start], sampler: trajectories.Sampler, stop: Checks
    ) -> list[Episode]:
        """Plays the episodes of tasks by their numbers; each is in the place of its start."""
        self.sampler = sampler
        try:
            return self.run(starts, stop)
        finally:
            if self._playing:  # they would go on, and disturb what is played next
                self._process.end()

    def episode(self, start: Start, attempt: int) -> Generator[Any, Any, Episode]:
        """All that it asks for, once, is its end and its segments."""
        key = key_within(start.key, attempt - 1)
        ended, segments = yield EpisodeCalls(self._settings, key, start.task)
        return Episode(ended, segments, attempt)

    def take(self, playing: Playing, step: Any) -> None:
        self._todo.append((playing, step))

    def waits(self) -> bool:
        return bool(self._todo or self._playing)

    def dispatch(self) -> float:
        while self._todo and len(self._playing) < self._settings.side_by_side:
            number = next(_NUMBERS)
            _, calls = self._playing[number] = self._todo.popleft()
            try:
                self._process.start(self.stop.check)
            except ProcessLost as lost:
                self._lose("connection", str(lost))
                break
            self._heard = time.monotonic()
            what = {"task": calls.task, "temperature": self._settings.temperature}
            self._process.say("play", episode=number, **what)
        self._hear()
        self.sample()
        return 0.0

    def _hear(self) -> None:
        """Takes what has arrived; waits a little if nothing has."""
        wait = _GATHER if self.speaking or self.flying else LOOK_EVERY
        while self._playing:
            if len(self._playing) <= len(self.speaking):
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
            elif message["op"] == "played" and (one := self._playing.pop(message["episode"], None)):
                self._take_played(*one, message)

    def _take_turn(self, message: Mapping[str, Any]) -> None:
        """Begins to sample a turn of an episode, behind ids that were sampled before if it can."""
        _, calls = self._playing.get(message["episode"], (None, None))
        if calls is None:
            self._answer(message, Failure("request", "the episode is over"))
            return
        try:
            ids, follows = self._ids(message)
            request = calls.ask(ids, message["sampling"])
        except (InputError, KeyError, TypeError) as error:
            request = Failure("request", str(error))
        if isinstance(request, Failure):
            self._answer(message, request)
            return

        def arrived(sampled: trajectories.Sampled | Failure) -> None:
            if isinstance(sampled, trajectories.Sampled) and len(sampled.ids):
                calls.turns.append(trajectories.Turn(ids, *sampled, self.sampler.version))
            if message["episode"] in self._playing:  # else its process was lost meanwhile
                self._answer(message, sampled, prompt=ids.tolist(), follows=follows)

        self.speaking.append((request, arrived))

    def _ids(self, asked: Mapping[str, Any]) -> tuple[np.ndarray, bool]:
        """The ids of a turn's messages, and whether they follow those of the turn before."""
        renderer = self._settings.renderer
        if asked["before"] is not None:
            prompt, said = (np.array(ids, np.int32) for ids in asked["before"])
            after = renderer.after(said, asked["tail"], asked["tools"])
            if after is not None:
                return np.concatenate([prompt, said, after]), True
        return renderer.opening(asked["messages"], asked["tools"]), False

    def _take_played(
        self, playing: Playing, calls: EpisodeCalls, message: Mapping[str, Any]
    ) -> None:
        if failure := message.get("failure"):
            self._fail(playing, calls, **failure)
            return
        stop_ids, version = self._settings.renderer.stop_ids(), self.sampler.version
        try:
            segments = segments_of(message["nodes"], stop_ids, version)
        except ValueError as error:
            self._fail(playing, calls, "malformed", str(error))
            return
        trained = sum(len(turn.sampled) for segment in segments for turn in segment)
        self.counts.outside += (outside := calls.sampled - trained)
        ended = Scored(
            answer="",
            tally=ToolTally(truncated=message["truncated"]),
            reward=float(message["reward"]),
            parts=message["parts"],
            stop=message.get("stop") or "",
            record=message["record"],
            outside=outside,
        )
        self.reply(playing, (ended, segments))

    def _fail(self, playing: Playing, calls: EpisodeCalls, cause: str, message: str) -> None:
        if cause not in self._causes:
            self._causes.add(cause)
            log(f"an episode failed ({cause}: {message}); it is played again, then masked")
        self.reply(playing, (Failed(cause, message), tuple((turn,) for turn in calls.turns)))

    def _lose(self, cause: str, message: str) -> None:
        """All that is played has no process any more."""
        self.counts.lost += 1
        self._process.end()
        for _, arrived in self.speaking:
            arrived(Failure(cause, message))
        self.speaking.clear()
        lost, self._playing = self._playing, {}
        for one in lost.values():
            self._fail(*one, cause, message)

    def _answer(
        self, message: Mapping[str, Any], sampled: trajectories.Sampled | Failure, **fields: Any
    ) -> None:
        """Answers the process: from now on it is the environment's turn."""
        self._heard = time.monotonic()
        if isinstance(sampled, Failure):
            status = 400 if sampled.cause in ("request", "too_long") else 503
            fields = {"error": sampled.message, "status": status}
        else:
            content, calls = self._settings.renderer.spoken(sampled.ids)
            fields |= {"content": content, "calls": calls, "finish": sampled.finish}
            fields |= {"ids": sampled.ids.tolist(), "log_probs": sampled.log_probs.tolist()}
        self._process.say("answer", call=message["call"], **fields)


# ---------------------------------------------------------------- the turns of one episode


class EpisodeCalls:
    """The turns of one episode, of a task by its number; `key` is uint32 `[2]`, of its draws."""

    def __init__(self, limits: PlaySettings, key: np.ndarray, task: int = 0) -> None:
        self.turns = list[trajectories.Turn]()  # that were sampled, each behind all ids before it
        self.task, self._limits, self._key = task, limits, key
        self._drawn: Counter[bytes] = Counter()

    def ask(
        self, ids: np.ndarray, sampling: Mapping[str, Any]
    ) -> trajectories.SampleRequest | Failure:
        """The turn to sample behind these ids, int32, or why there is none."""
        limits = self._limits
        if problem := unfit(sampling, limits.temperature):
            return Failure("request", problem)
        left = [limits.turn, limits.room - len(ids)]
        if limits.tokens:
            left.append(limits.tokens - self.sampled)
        if min(left) < 1:
            over = f"config.sampling.room, {limits.room}, or config.env.max_tokens, {limits.tokens}"
            return Failure("request", f"the limit of {over} is reached")
        if asked := sampling.get("max_tokens"):
            left.append(max(int(asked), 1))
        return trajectories.SampleRequest(ids, self._draw_key(ids), min(left))

    @property
    def sampled(self) -> int:
        """Tokens of all turns."""
        return sum(len(turn.sampled) for turn in self.turns)

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
    """Why a request's sampling would have another distribution than the run's; "" if it has not."""
    for name, value in sampling.items():
        if value in (None, [], {}):
            continue
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
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


def segments_of(
    nodes: Sequence[Mapping[str, Any]], stop_ids: Collection[int], version: str
) -> tuple[trajectories.Segment, ...]:
    """The segments of a forest of messages: several turns may stand behind one prefix.

    A segment is a path from a root to a leaf; what an earlier one has trained is read in a later
    one, and not trained. Tokens that no sampled ones follow are left out.

    Args:
        nodes: each has the lower number of its `parent` (-1: none); its `ids`; a `mask` of those at
            their end that were sampled, and the `log_probs` of these; and whether they are to train
            (`trains`).
    """
    inner = {node["parent"] for node in nodes}
    trained, segments = set[int](), []
    for leaf in range(len(nodes)):
        if leaf in inner:
            continue
        path, number = list[int](), leaf
        while number >= 0:
            path.append(number)
            number = nodes[number]["parent"]
        turns, read = list[trajectories.Turn](), list[int]()
        for number in reversed(path):
            node = nodes[number]
            ids, start = node["ids"], len(node["ids"]) - sum(node["mask"])
            if not all(node["mask"][start:]):
                raise ValueError("a turn has tokens that were not sampled between those that were")
            if number in trained or not node["trains"] or start == len(ids):
                read += ids
                continue
            trained.add(number)
            observed = np.array(read + ids[:start], np.int32)
            sampled = np.array(ids[start:], np.int32)
            log_probs = np.array(node["log_probs"], np.float32)
            finish = trajectories.STOP if ids[-1] in stop_ids else trajectories.LENGTH
            turns.append(trajectories.Turn(observed, sampled, log_probs, finish, version))
            read = []
        if turns:
            segments.append(tuple(turns))
    return tuple(segments)


# ---------------------------------------------------------------- the process
# Its Python is another, since `verifiers` cannot share the trainer's environment. Both sides speak
# lines of JSON; `environments.verifiers_side.program` says which.


class About(NamedTuple):
    version: str  # of verifiers
    tasks: int  # how many it has
    prompts: list[list[dict[str, Any]]]  # the first messages of some tasks
    digest: str  # of the tasks
    code: str  # a digest of its package's Python files


class EnvironmentProcess(LineProcess):
    def __init__(self, python: str, log: Path, fields: Mapping[str, Any]) -> None:
        """`log` takes what it prints; `fields` are those of the message `open`."""
        super().__init__((python, str(PROGRAM)), log, fields, "the environment")
        self.about: About | None = None  # what the environment says of itself, once started

    def start(self, check: Callable[[], None] = lambda: None) -> About:
        try:
            opened = super().start(check)
        except OSError as error:
            raise InputError(
                f"config.env.python is {self.command[0]}, which does not run ({error.strerror})."
            ) from None
        about = About(*(opened[name] for name in About._fields))
        if self.about is not None and about.digest != self.about.digest:
            self.end()
            raise InputError(
                f"tasks of {self.fields['id']!r} vary; give config.env.arguments a seed."
            )
        self.about = about
        return about
