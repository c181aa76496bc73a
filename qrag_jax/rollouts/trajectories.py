"""Turns of a token policy: as they are asked for, as they were played, and as an update takes them.

A sampler is asked for ids, and gives ids and log-probabilities.

A trajectory keeps the ids that were sampled and the ids that the environment wrote; no text is
encoded a second time. Each sampled token is in one row of the batch, so it trains once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
from pydantic import PlainValidator

from qrag_jax.errors import Count, Weight, one_of
from qrag_jax.llm.outcomes import Failure
from qrag_jax.runtime.bounded_json import plain, typed

Ids = Annotated[np.ndarray, PlainValidator(lambda ids: np.array(ids, np.int32))]
Numbers = Annotated[np.ndarray, PlainValidator(lambda numbers: np.array(numbers, np.float32))]
DONE, TRUNCATED = "done", "truncated"
REWARD = "reward"  # the whole reward, next to its parts
MASKED, SCORED = TREATMENTS = ("masked", "scored")
STOP, LENGTH = "stop", "length"
DEVICE, SERVER = ENGINES = ("device", "server")
# With these values no field of a server's request changes the distribution.
NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class SampleRequest(NamedTuple):
    ids: np.ndarray  # int32, the whole context so far; never empty
    # uint32 `[2]`, of the segment's draws (run, batch, episode, attempt, segment). A token's draw
    # depends on it and on the token's position alone.
    key: np.ndarray
    most: int  # sampled tokens, at most


class Sampled(NamedTuple):
    """The turn that was sampled."""

    ids: np.ndarray  # int32, with the token that ended the turn if there is one
    log_probs: np.ndarray  # float32, of these by the distribution they were drawn from
    finish: str  # "stop", or "length" where the turn had no end within `most` tokens


class Versioned(NamedTuple):
    """Weights that a server samples by."""

    params: Any  # what is trained: adapters, or all weights
    updates: int  # how many updates made them; it is their version


class Sampler(Protocol):
    """Samples turns by one version of the weights."""

    in_rounds: bool  # requests are collected until no episode can go on without them
    version: str  # of the weights

    def submit(self, requests: Sequence[SampleRequest]) -> list[Future[Any]]:
        """Starts the requests; `read` takes a future's result."""
        ...

    def read(self, request: SampleRequest, result: Any) -> Sampled | Failure:
        """The turn; a failure is a value."""
        ...


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Section `sampling`."""

    # What plays the episodes that are learned from: the device that trains, or a vLLM server
    # (section llm). Evaluations are always on the device.
    engine: Annotated[str, one_of(ENGINES)] = DEVICE
    temperature: Weight = 1.0  # logits are divided by it; 0: the likeliest token
    room: Count = 1024  # tokens of the longest episode
    chunk: Count = 64  # tokens of prompts that are read at a time
    rows: Count = 64  # turns that a device draws side by side, at most
    # The keys and values of a turn's prompt are kept for the next turn, which reads what is new;
    # False: each turn reads all of its prompt, which needs half as much memory
    reuse: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model."""

    observed: Ids  # the ids before it that it did not sample: a prompt, a tool's result
    sampled: Ids  # the ids that it sampled
    # of these by the distribution that they were drawn from, in nats
    log_probs: Numbers
    finish: str  # "stop", or "length" if it was cut off
    version: str = ""  # of the weights that sampled it; "" where there is one version only


Segment = tuple[Turn, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenTrajectory:
    """One episode."""

    question: int  # number of its question
    member: int  # its number in the group of this question
    attempt: int  # how often it was played, from 1
    # its turns. A turn that does not extend the ids before it begins a new segment.
    segments: tuple[Segment, ...]
    status: str  # "done", "truncated" (its last turn was cut off), or the cause of a failure
    # the parts of its reward; none if it failed
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # what is logged of it and trains nothing, such as its answer and counts
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether it has no reward."""
        return self.status not in (DONE, TRUNCATED)

    to_json = plain

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> TokenTrajectory:
        return typed(cls, saved)


class TokenBatch(NamedTuple):
    """The episodes of a batch as rows of tokens, on the host: R rows of up to L tokens.

    An episode whose context was rewritten has several rows. Those of a group are neighbours: group
    g has the episodes g·G to (g + 1)·G - 1. Masks at place t speak of token t, whose
    log-probability comes from the hidden state at t - 1.
    """

    tokens: np.ndarray  # int32 `[R, L]`
    lengths: np.ndarray  # int32 `[R]`; attention sees tokens by length, whatever their ids are
    log_prob_mask: np.ndarray  # bool `[R, L]`, the sampled tokens
    loss_mask: np.ndarray  # bool `[R, L]`, those that train: not of failed or truncated episodes
    sampler_log_probs: np.ndarray  # float32 `[R, L]`, as the sampler drew them
    episode: np.ndarray  # int32 `[R]`, number of the row's episode; N for a row that is padding
    # int32 `[R]`, the first of the rows that begin with the same tokens; itself if none does
    leader: np.ndarray
    # int32 `[R]`, number of these tokens, of which none is sampled; the same for all such rows
    shared: np.ndarray
    rewards: np.ndarray  # float32 `[N]`, of each episode; 0 if it has none
    scored: np.ndarray  # bool `[N]`, whether it has any


def token_batch(
    trajectories: Sequence[TokenTrajectory], *, members: int, truncated: str, longest: int
) -> TokenBatch:
    """The arrays of a batch: rows of neighbouring episodes, whose groups are neighbours.

    Rows of a group that begin with the same ids share them, up to the first sampled one.

    Args:
        members: G, episodes of one group.
        truncated: "masked": an episode that was cut off is not learned from and is no part of its
            group's mean; "scored": it is like any other.
        longest: most tokens of a row.
    """
    is_masked = {TRUNCATED} if truncated == MASKED else set[str]()
    scored = np.array(
        [not one.failed and one.status not in is_masked for one in trajectories], bool
    )
    rewards = [
        one.parts.get(REWARD, 0.0) if is_scored else 0.0
        for one, is_scored in zip(trajectories, scored, strict=True)
    ]
    rows = [
        (number, segment)
        for number, one in enumerate(trajectories)
        for segment in one.segments
        if segment
    ]
    lengths = [sum(len(t.observed) + len(t.sampled) for t in segment) for _, segment in rows]
    if (length := max(lengths, default=1)) > longest:
        raise ValueError(f"a row has {length} tokens; {longest} is the most")
    # One row at least, so that a batch whose episodes have all failed has a shape.
    shape = max(len(rows), 1), length
    batch = TokenBatch(
        tokens=np.zeros(shape, np.int32),
        lengths=np.zeros(shape[0], np.int32),
        log_prob_mask=np.zeros(shape, bool),
        loss_mask=np.zeros(shape, bool),
        sampler_log_probs=np.zeros(shape, np.float32),
        episode=np.full(shape[0], len(scored), np.int32),
        leader=np.arange(shape[0], dtype=np.int32),
        shared=np.zeros(shape[0], np.int32),
        rewards=np.array(rewards, np.float32),
        scored=scored,
    )
    batch.lengths[: len(rows)] = lengths
    leaders: dict[int, int] = {}  # the first row of each group
    common: dict[int, int] = {}  # by leader, the tokens that rows share with it
    for row, (number, segment) in enumerate(rows):
        end = 0
        for turn in segment:
            begin, start = end, end + len(turn.observed)
            end = start + len(turn.sampled)
            batch.tokens[row, begin:end] = np.concatenate([turn.observed, turn.sampled])
            batch.log_prob_mask[row, start:end] = True
            batch.sampler_log_probs[row, start:end] = turn.log_probs
        batch.loss_mask[row] = batch.log_prob_mask[row] & scored[number]
        batch.episode[row] = number
        leader = leaders.setdefault(number // members, row)
        both = [leader, row]
        equal = batch.tokens[leader] == batch.tokens[row]
        equal &= ~batch.log_prob_mask[both].any(axis=0)
        # The first ids that both rows have and neither has sampled.
        shared = int(np.argmin(np.append(equal[: batch.lengths[both].min()], False)))
        if leader != row and shared:
            batch.leader[row], common[leader] = leader, min(shared, common.get(leader, shared))
    for leader, shared in common.items():
        batch.shared[batch.leader == leader] = shared
    return batch
