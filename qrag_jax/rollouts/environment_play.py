"""Plays episodes of environments of `verifiers`: their process acts, a sampler of ours speaks.

The process asks for turns by ids, through a server of turns on 127.0.0.1, and says at an episode's
end which of them are part of it. A sampler on the device is asked when nothing has arrived for a
moment, or when all episodes wait for it. A process that was lost is started again, and its episodes
are played anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import itertools
import json
import queue
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.environments.episode import Closed, Failed, ToolTally
from qrag_jax.environments.verifiers_process import EnvironmentProcess, ProcessLost
from qrag_jax.feedback.rewards import Checks
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.scaffolds import ChatRenderer, TextLost
from qrag_jax.rollouts.schedule import Counts, Playing, Schedule, key_within
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.rollouts.trajectories import STOP, Sampled, Sampler, SampleRequest, Segment, Turn
from qrag_jax.runtime.interrupt import LOOK_EVERY
from qrag_jax.runtime.run import log

HOST = "127.0.0.1"
SESSION = "X-Session-ID"  # the header in which verifiers names a rollout: EPISODE-REST
_LARGEST = 64 * 2**20  # bytes of a request
_LOOK_CLOSED = 1.0  # seconds between looks whether the server is closed
WANTED = "wanted"  # the `op` of a message from the server of turns
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


class Wanted(NamedTuple):
    episode: int  # its number
    ids: np.ndarray  # int32, all before the turn
    sampling: Mapping[str, Any]  # of the request
    turn: Future[Sampled | Failure]  # takes what was sampled, or why nothing was


class EnvironmentStart(NamedTuple):
    split: str  # "train" or "eval"
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
    # where the process finds the server of turns, and its settings
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
            self._process.say(
                "play",
                split=each.start.split,
                task=each.start.task,
                episodes=[number],
                served=self._settings.served,
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
            elif message["op"] == WANTED:
                self._take_wanted(message["wanted"])
            elif message["op"] == "played":
                self._take_played(message)

    def _take_wanted(self, wanted: Wanted) -> None:
        each = self._playing.get(wanted.episode)
        if each is None:
            wanted.turn.set_result(Failure("request", f"there is no episode {wanted.episode}"))
            return
        call = each.calls.ask(wanted.ids, wanted.sampling)
        if isinstance(call, Failure):
            wanted.turn.set_result(call)
        else:
            self.speaking.append((call.request, partial(self._hand_over, wanted, call)))

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

    def _hand_over(self, wanted: Wanted, call: Call, sampled: Sampled | Failure) -> None:
        if isinstance(sampled, Sampled):
            call.sampled, call.version = sampled, self.sampler.version
        wanted.turn.set_result(sampled)
        self._heard = time.monotonic()  # from now on it is the environment's turn


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


# ---------------------------------------------------------------- the server of turns
# It serves turns of the policy as vLLM does, by POST /inference/v1/generate: ids alone. Whoever
# asks knows a key of this start, and the name of its session begins with the number of its episode.
# `/render/…` makes messages to ids and ids to messages, for agents that only know messages.


class _Wrong(Exception):
    """A request that is answered by an error; `status` is HTTP's."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    # As many episodes may ask at once; a connection that finds no place waits for a second or more.
    request_queue_size = 1024


_KINDS = {  # of errors, as vLLM calls them
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    413: "BadRequestError",
    503: "ServiceUnavailableError",
}


class GenerateServer:
    """The server, at `url`, which takes `key` as its API key; use it as a context manager.

    Rows have `room` tokens at most; `want` takes what is asked for, from any thread.
    """

    def __init__(
        self, model: str, room: int, renderer: ChatRenderer, want: Callable[[Wanted], None]
    ) -> None:
        self.key = secrets.token_urlsafe(24)
        self._model, self._room, self._renderer, self._want = model, room, renderer, want
        self._closed = threading.Event()
        server = self
        routes: dict[tuple[str, str], Callable[[Any, Any], dict[str, Any]]] = {
            ("GET", "/v1/models"): self._models,
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/render/opening"): self._opening,
            ("POST", "/render/after"): self._after,
            ("POST", "/render/spoken"): self._spoken,
        }

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                try:
                    authorization = (self.headers.get("Authorization") or "").encode()
                    if not hmac.compare_digest(authorization, f"Bearer {server.key}".encode()):
                        raise _Wrong("the API key is wrong", 401)
                    path = self.path.partition("?")[0].rstrip("/")
                    if (route := routes.get((self.command, path))) is None:
                        raise _Wrong(f"there is no {self.path}", 404)
                    status, found = 200, route(self._body(), self.headers)
                except _Wrong as wrong:
                    status, kind = wrong.status, _KINDS[wrong.status]
                    about = {"message": str(wrong), "type": kind, "param": None, "code": status}
                    found = {"error": about}
                    self.close_connection = True
                data = json.dumps(found).encode()
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            do_POST = do_GET

            def _body(self) -> dict[str, Any]:
                size = int(self.headers.get("Content-Length") or 0)
                if size > _LARGEST:
                    raise _Wrong(f"the request has {size} bytes", 413)
                try:
                    body = json.loads(self.rfile.read(size) or "{}")
                except ValueError:
                    body = None
                if not isinstance(body, dict):
                    raise _Wrong("the request is no JSON object")
                return body

            def log_message(self, format: str, *args: Any) -> None:
                return None

        self._http = _Listener((HOST, 0), Handler)
        self.url = f"http://{HOST}:{self._http.server_address[1]}/v1"
        self._thread = threading.Thread(
            target=self._http.serve_forever, name="generate", daemon=True
        )

    def __enter__(self) -> GenerateServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    # ---------------------------------------------------------------- routes

    def _models(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        card = {"id": self._model, "object": "model", "owned_by": "qrag_jax"}
        return {"object": "list", "data": [card | {"max_model_len": self._room}]}

    def _generate(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        name = body.get("model")
        if name not in (None, self._model):
            what = f"the model {name!r} does not exist; the one that is trained is {self._model!r}"
            raise _Wrong(what, 404)
        number = (headers.get(SESSION) or "").partition("-")[0]
        if not number.isdecimal():
            raise _Wrong(f"the header {SESSION} names no episode")
        ids = _ids(body)
        if len(ids) >= self._room:
            raise _Wrong(
                f"the maximum context length is {self._room} tokens, and the prompt has {len(ids)}"
            )
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            raise _Wrong("sampling_params is no object")
        stop_ids = self._renderer.stop_ids()
        if others := {*(sampling.get("stop_token_ids") or ())}.difference(stop_ids):
            raise _Wrong(
                f"turns end at the tokens {', '.join(map(str, stop_ids))}, not at "
                f"{', '.join(map(str, sorted(others)))}; use a renderer of this model"
            )
        asked = {name: value for name, value in sampling.items() if name != "stop_token_ids"}
        turn: Future[Sampled | Failure] = Future()
        self._want(Wanted(int(number), ids, asked, turn))
        while not wait([turn], _LOOK_CLOSED).done:
            if self._closed.is_set():
                raise _Wrong("the run has ended", 503)
        sampled = turn.result()
        if isinstance(sampled, Failure):
            raise _Wrong(sampled.message, 400 if sampled.cause in ("request", "too_long") else 503)
        request = body.get("request_id") or secrets.token_hex(16)
        head = {"request_id": request, "model": self._model, "created": int(time.time())}
        return head | _generated(len(ids), sampled)

    def _opening(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """Messages and tools to ids."""
        tools = body.get("tools") or []
        return _rendered(lambda: self._renderer.opening(body["messages"], tools))

    def _after(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """Messages to the ids that follow sampled ones; null if turns are rewritten."""
        said, tools = _ids(body), body.get("tools") or []
        return _rendered(lambda: self._renderer.after(said, body["messages"], tools))

    def _spoken(self, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """Sampled ids to a message."""
        content, calls = self._renderer.spoken(_ids(body))
        return {"content": content, "calls": calls}


def _ids(body: Mapping[str, Any]) -> np.ndarray:
    given = body.get("token_ids")
    listed = given if isinstance(given, list) else []
    if not listed or not all(type(each) is int and 0 <= each < 2**31 for each in listed):
        raise _Wrong("token_ids is no list of token ids, one at least")
    return np.array(listed, np.int32)


def _rendered(render: Callable[[], np.ndarray | None]) -> dict[str, Any]:
    try:
        ids = render()
    except (TextLost, KeyError, TypeError) as error:
        raise _Wrong(str(error)) from None
    return {"token_ids": None if ids is None else ids.tolist()}


def _generated(prompt: int, sampled: Sampled) -> dict[str, Any]:
    """A turn behind so many tokens, as vLLM answers it.

    vLLM names a token by `token_id`, and did so in `token` before; both are given.
    """
    content = []
    for number, value in zip(sampled.ids.tolist(), sampled.log_probs.tolist()):
        drawn = {"token_id": number, "logprob": value, "rank": None}
        content.append({"token": f"token_id:{number}", **drawn, "top_logprobs": [drawn]})
    choice = {
        "index": 0,
        "token_ids": sampled.ids.tolist(),
        "finish_reason": sampled.finish,
        "logprobs": {"content": content},
        **dict.fromkeys(("stop_reason", "routed_experts", "sampling_mask", "weight_versions")),
    }
    count = len(sampled.ids)
    usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
    return {"output_mode": "tokens", "choices": [choice], "usage": usage, "prompt_logprobs": None}
