"""The turns of one episode of an environment that calls its model by messages.

A call whose messages go on from those of an earlier one, with what was said then, is answered
behind the ids of that one. Any other call begins anew: a rewritten history, another system's
message, other tools.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.chat_rendering import ChatRenderer, Spoken, content_text
from qrag_jax.rollouts.token_sampler import STOP, Sampled, SampleRequest
from qrag_jax.rollouts.trajectories import Segment, Turn

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


@dataclasses.dataclass(frozen=True)
class TurnLimits:
    """Limits of an episode.

    Attributes:
        turn: tokens that a turn may sample.
        room: tokens of a row.
        turns: of the model.
        tokens: sampled in all; 0: no limit.
        temperature: of the sampling; None: any that is asked for is taken for the run's own.
    """

    turn: int
    room: int
    turns: int
    tokens: int
    temperature: float | None


class Over(NamedTuple):
    """A limit that a call would pass; `what` names it."""

    what: str


@dataclasses.dataclass
class _Call:
    """A call that was asked, and answered once `sampled` is there."""

    messages: list[str]  # each as a key
    tools: str
    parent: int  # number of the call that it goes on from; -1: none
    observed: np.ndarray
    context: np.ndarray  # all ids before what was sampled
    sampled: Sampled | None = None
    said: str = ""  # the key of the message that was given back
    version: str = ""


class EpisodeCalls:
    """See the module's text.

    Args:
        key: uint32 `[2]`, of the episode's draws.
    """

    def __init__(self, renderer: ChatRenderer, limits: TurnLimits, key: np.ndarray) -> None:
        self._renderer, self._limits, self._key = renderer, limits, key
        self._calls: dict[int, _Call] = {}
        self._drawn: Counter[bytes] = Counter()

    def ask(self, number: int, asked: Mapping[str, Any]) -> SampleRequest | Over | Failure:
        """The turn to sample for a call.

        Args:
            asked: messages, tools and sampling.

        Raises:
            TextLost: a text has no place in the model's ids.
        """
        messages, tools = asked["messages"], asked["tools"]
        if problem := unfit(asked.get("sampling") or {}, self._limits.temperature):
            return Failure("request", problem)
        keys, of_tools = [_message_key(each) for each in messages], json.dumps(tools)
        parent = self._extended(keys, of_tools)
        observed = None
        if parent >= 0:
            before = self._calls[parent]
            assert before.sampled is not None
            new = messages[len(before.messages) + 1 :]
            observed = self._renderer.after(before.sampled.ids, new, tools)
        if observed is None:
            parent, observed, context = -1, self._renderer.opening(messages, tools), _NONE
        else:
            before = self._calls[parent]
            assert before.sampled is not None
            context = np.concatenate([before.context, before.sampled.ids])
        ids = np.concatenate([context, observed]).astype(np.int32)
        most = self.most(len(ids), asked.get("sampling") or {})
        if isinstance(most, Over):
            return most
        self._calls[number] = _Call(keys, of_tools, parent, observed, ids)
        return SampleRequest(ids, self.draw_key(ids), most)

    def ask_ids(
        self, number: int, ids: np.ndarray, sampling: Mapping[str, Any]
    ) -> SampleRequest | Over | Failure:
        """The turn to sample for a call that gives ids, which somebody else has made of messages.

        Args:
            ids: int32, all before the turn.
        """
        if problem := unfit(sampling, self._limits.temperature):
            return Failure("request", problem)
        most = self.most(len(ids), sampling)
        if isinstance(most, Over):
            return most
        self._calls[number] = _Call([], "", -1, ids, ids)
        return SampleRequest(ids, self.draw_key(ids), most)

    def keep(self, number: int, sampled: Sampled, version: str) -> None:
        """Keeps the turn of a call that gave ids."""
        call = self._calls[number]
        call.sampled, call.version = sampled, version

    def drawn(
        self, context: np.ndarray, ids: np.ndarray, but: Collection[int] = ()
    ) -> tuple[int, Sampled, str] | None:
        """The call that sampled these ids behind this context, its turn and version; None: none.

        Args:
            but: calls that are taken last: others have sampled the same ids.
        """
        found = None
        for number, call in self._calls.items():
            own = call.sampled
            if own is None or not np.array_equal(own.ids, ids):
                continue
            if np.array_equal(call.context, context):
                found = number, own, call.version
                if number not in but:
                    return found
        return found

    def most(self, context: int, sampling: Mapping[str, Any]) -> int | Over:
        """How many tokens a turn behind so many may have."""
        limits = self._limits
        done = [call.sampled for call in self._calls.values() if call.sampled is not None]
        if len(self._calls) >= limits.turns:
            return Over(f"config.env.max_turns, {limits.turns}")
        left = [limits.turn, limits.room - context]
        if limits.tokens:
            left.append(limits.tokens - sum(len(each.ids) for each in done))
            if left[-1] < 1:
                return Over(f"config.env.max_tokens, {limits.tokens}")
        if left[1] < 1:
            return Over(f"config.sampling.room, {limits.room}")
        asked = sampling.get("max_tokens") or sampling.get("max_completion_tokens")
        if asked:
            left.append(max(int(asked), 1))
        return min(left)

    def draw_key(self, ids: np.ndarray) -> np.ndarray:
        """The key of a turn's draws: by the episode, the ids before it, and how often it came.

        So it does not depend on the order in which branches ask.
        """
        digest = hashlib.sha256(self._key.astype("<u4").tobytes() + ids.astype("<i4").tobytes())
        times = self._drawn[digest.digest()]
        self._drawn[digest.digest()] += 1
        digest.update(times.to_bytes(4, "little"))
        return np.frombuffer(digest.digest()[:8], "<u4").astype(np.uint32)

    def take(self, number: int, sampled: Sampled, version: str) -> dict[str, Any]:
        """Keeps the turn of a call; returns the answer to it."""
        call = self._calls[number]
        spoken = self._renderer.spoken(sampled.ids)
        call.sampled, call.version = sampled, version
        call.said = _said_key(spoken)
        calls = [
            {"id": f"call_{number}_{place}", "name": name, "arguments": arguments}
            for place, (name, arguments) in enumerate(spoken.calls)
        ]
        return {
            "content": spoken.content,
            "tool_calls": calls,
            "prompt_ids": call.context.tolist(),
            "ids": sampled.ids.tolist(),
            "log_probs": sampled.log_probs.tolist(),
            "finish": sampled.finish,
        }

    def segments(self, kept: Collection[int] | None = None) -> tuple[Segment, ...]:
        """The segments of the calls that are part of the episode.

        Args:
            kept: their numbers. Turns of other calls, such as of a judge that asks the same model,
                train nothing. None: all are.
        """
        pieces, places = list[Piece](), dict[int, int]()
        for number, call in self._calls.items():
            if call.sampled is None:
                continue
            pieces.append(Piece(places.get(call.parent, -1), call.observed))
            learned = call.sampled.log_probs if kept is None or number in kept else None
            places[number] = len(pieces)
            pieces.append(
                Piece(len(pieces) - 1, call.sampled.ids, learned, call.sampled.finish, call.version)
            )
        return segments_of(pieces)

    def of_nodes(self, nodes: Sequence[Mapping[str, Any]]) -> tuple[set[int], tuple[Segment, ...]]:
        """The calls that are part of a graph of messages, and its segments.

        Args:
            nodes: each with its parent's number (-1: none), its ids, a mask of those that were
                sampled, and whether these train.

        Raises:
            ValueError: tokens are said to be sampled that were not sampled here.
        """
        kept, pieces = set[int](), list[Piece]()
        last: dict[int, int] = {-1: -1}  # the last piece of each node
        before: dict[int, np.ndarray] = {-1: _NONE}  # all ids up to the end of each node
        for number, node in enumerate(nodes):
            ids, mask = np.array(node["ids"], np.int32), np.array(node["mask"], bool)
            context, parent = before[node["parent"]], last[node["parent"]]
            sampled = int(mask.sum())
            start = len(ids) - sampled
            if not mask[start:].all():
                raise ValueError("a turn has tokens that were not sampled between those that were")
            before[number] = np.concatenate([context, ids])
            if start or not sampled:
                pieces.append(Piece(parent, ids[:start]))
                parent = len(pieces) - 1
            if sampled:
                whole = np.concatenate([context, ids[:start]])
                found = self.drawn(whole, ids[start:], kept)
                if found is None:
                    raise ValueError(
                        "an episode has a turn that was not sampled by the model that is trained"
                    )
                call, own, version = found
                learned = own.log_probs if node["trains"] and call not in kept else None
                if node["trains"]:
                    kept.add(call)
                pieces.append(Piece(parent, own.ids, learned, own.finish, version))
                parent = len(pieces) - 1
            last[number] = parent
        return kept, segments_of(pieces)

    def sampled_tokens(self, but: Collection[int] = ()) -> int:
        """Tokens that were sampled by all calls but these."""
        return sum(
            len(call.sampled.ids)
            for number, call in self._calls.items()
            if call.sampled is not None and number not in but
        )

    def _extended(self, keys: Sequence[str], tools: str) -> int:
        """The number of the longest call that the messages go on from; -1: none."""
        best, longest = -1, -1
        for number, call in self._calls.items():
            size = len(call.messages)
            if (
                call.sampled is not None
                and longest < size < len(keys)
                and call.tools == tools
                and [*keys[: size + 1]] == [*call.messages, call.said]
            ):
                best, longest = number, size
        return best


def unfit(sampling: Mapping[str, Any], temperature: float | None) -> str:
    """Why a request's sampling would have another distribution, as a sentence; "" if it has not.

    Args:
        temperature: of the run; None: it is not looked at.
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


def _message_key(message: Mapping[str, Any]) -> str:
    """By it a message is known again: role, text and calls, without the ids of calls."""
    if message["role"] == "assistant":
        calls = [call.get("function") or call for call in message.get("tool_calls") or ()]
        given = tuple((call["name"], call["arguments"]) for call in calls)
        return _said_key(Spoken(content_text(message.get("content")), given))
    return json.dumps([message["role"], message.get("content")], sort_keys=True)


def _said_key(spoken: Spoken) -> str:
    return json.dumps(["assistant", spoken.content, [(n, _plain(a)) for n, a in spoken.calls]])


def _plain(arguments: Any) -> str:
    """Arguments whatever the order of their names and the blanks between."""
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(given, sort_keys=True)
    except ValueError:
        return str(arguments)


# ---------------------------------------------------------------- segments
# What was played is a forest of pieces of tokens: an environment may ask for several turns behind
# one prefix, or rewrite what was said. A row of a batch is a path from a root to a leaf; what an
# earlier row has trained is read in a later one, and not trained.


class Piece(NamedTuple):
    """Tokens behind those of another piece.

    Attributes:
        parent: the number of that piece, lower than its own; -1: none.
        ids: int32.
        log_probs: float32, of ids that were sampled and train; None: they are only read.
        finish: how a sampled piece ended.
        version: of the weights that sampled it.
    """

    parent: int
    ids: np.ndarray
    log_probs: np.ndarray | None = None
    finish: str = STOP
    version: str = ""


def segments_of(pieces: Sequence[Piece]) -> tuple[Segment, ...]:
    """The segments of an episode; tokens that no sampled ones follow are left out."""
    inner = {piece.parent for piece in pieces}
    trained, segments = set[int](), []
    for leaf in range(len(pieces)):
        if leaf in inner:
            continue
        path, number = list[int](), leaf
        while number >= 0:
            path.append(number)
            number = pieces[number].parent
        turns, read = list[Turn](), list[np.ndarray]()
        for number in reversed(path):
            piece = pieces[number]
            if piece.log_probs is None or number in trained or not len(piece.ids):
                read.append(piece.ids)
                continue
            trained.add(number)
            observed = np.concatenate(read).astype(np.int32) if read else np.zeros(0, np.int32)
            read = []
            turns.append(Turn(observed, piece.ids, piece.log_probs, piece.finish, piece.version))
        if turns:
            segments.append(tuple(turns))
    return tuple(segments)
