"""Turns of a token policy: as they are asked for, as they were played, and as an update takes them.

A sampler is asked for ids, and gives ids and log-probabilities.

A trajectory keeps the ids that were sampled and the ids that the environment wrote; no text is
encoded a second time. Each sampled token is in one row of the batch, so it trains once.

Rows are packed into blocks of one static size; those of a group share their prompt. The plan is
made on the host, where the batch is made. Devices that hold the parameters together must run
through the same number of blocks, which is known here, before anything is sent.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Annotated, Any, NamedTuple, Protocol

import jax
import numpy as np
from pydantic import PlainValidator

from qrag_jax.errors import Count, Weight, one_of
from qrag_jax.llm.outcomes import Failure
from qrag_jax.models.compute.packing import Layout, Shared
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
    trajectories: Sequence[TokenTrajectory], *, members: int, truncated: str
) -> TokenBatch:
    """The arrays of a batch: rows of neighbouring episodes, whose groups are neighbours.

    Rows of a group that begin with the same ids share them, up to the first sampled one.

    Args:
        members: G, episodes of one group.
        truncated: "masked": an episode that was cut off is not learned from and is no part of its
            group's mean; "scored": it is like any other.
    """
    is_masked = {TRUNCATED} if truncated == MASKED else set[str]()
    scored = np.array(
        [not one.failed and one.status not in is_masked for one in trajectories], bool
    )
    rewards = np.where(scored, [one.parts.get(REWARD, 0.0) for one in trajectories], 0.0)
    rows = [
        (number, segment)
        for number, one in enumerate(trajectories)
        for segment in one.segments
        if segment
    ]
    lengths = [sum(len(t.observed) + len(t.sampled) for t in segment) for _, segment in rows]
    # One row at least, so that a batch whose episodes have all failed has a shape.
    shape = max(len(rows), 1), max(lengths, default=1)
    batch = TokenBatch(
        tokens=np.zeros(shape, np.int32),
        lengths=np.zeros(shape[0], np.int32),
        log_prob_mask=np.zeros(shape, bool),
        loss_mask=np.zeros(shape, bool),
        sampler_log_probs=np.zeros(shape, np.float32),
        episode=np.full(shape[0], len(scored), np.int32),
        leader=np.arange(shape[0], dtype=np.int32),
        shared=np.zeros(shape[0], np.int32),
        rewards=rewards.astype(np.float32),
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


# ---------------------------------------------------------------- blocks

_MULTIPLE = 8  # lengths of rows are multiples of it
_ROWS = 2.0  # rows of a block, next to those that fill it if all are as long as the longest may be
_COARSE, _FINE = 2, 8  # lengths that are distinguished between one power of two and the next
# Blocks of a device: there are programs for so many, and for 4, 16 … times more. Empty ones are not
# computed, so only their transfer costs anything.
_FEWEST, _TIMES_MORE = 16, 4
_LEAST_PROMPT = 64  # room for the tokens that rows share; shorter prompts need no own programs


class BlockShape(NamedTuple):
    """Static sizes of a block."""

    tokens: int  # T, places of tokens
    length: int  # L, tokens of the longest row, its shared ones included
    groups: int  # Q, groups of rows that share their first tokens
    members: int  # M, rows of a group, at most
    sampled: int  # S, places of sampled tokens
    prompt: int = 0  # P, most tokens that the rows of a group share
    own: int = 0  # O, most tokens of a row behind these; 0: attention is not computed in parts


class TokenBlocks(NamedTuple):
    """B blocks; device d of D has those from d·B/D on."""

    tokens: jax.Array  # int32 `[B, T]`, of which each group's shared ones come first
    layout: Layout  # where the rows `[B, Q·M]` are
    place: jax.Array  # int32 `[B, S]`, the place of the hidden state before each sampled token
    target: jax.Array  # int32 `[B, S]`, the sampled tokens
    valid: jax.Array  # bool `[B, S]`, whether there is one
    sampler: jax.Array  # float32 `[B, S]`, its log-probability by the sampler
    episode: jax.Array  # int32 `[B, S]`, its episode
    row: jax.Array  # int32 `[B, S]`, its row in the block


_Block = list[list[int]]  # its groups, rows that share their first tokens


def choose_shape(
    batch: TokenBatch, tokens: int, members: int, *, room: int | None = None, whole: bool = False
) -> BlockShape:
    """A shape for batches like this one: few different ones, so that few programs are compiled.

    Two lengths decide, each the next of 1 and 1.5 times a power of two: of what the rows of a group
    share, and of what the longest row has alone. The sampled places are a quarter, half, three
    quarters or all of the tokens. With `whole` lengths are distinguished by eighths of a power of
    two, and no more groups are computed than fill a block on average: all that is learned from is
    known before, so one shape serves many updates.

    Args:
        tokens: places of a block, at most; more if the longest row needs more.
        room: tokens of the longest row there can be; None: not known.
        whole: whether every group must fit into a block, as `token_blocks` can keep it.
    """
    steps = _FINE if whole else _COARSE
    used = np.flatnonzero(_is_used(batch))
    behind = batch.lengths[used] - batch.shared[used]
    _, first = np.unique(batch.leader[used], return_index=True)
    common = batch.shared[used][first]
    longest, shared = (int(lengths.max(initial=0)) for lengths in (batch.lengths[used], common))
    prompt = _rung(max(shared, _LEAST_PROMPT), steps) if shared else 0
    tail = _rung(int(behind.max(initial=1)), steps)
    most = -(-max(room or prompt + tail, longest) // _MULTIPLE) * _MULTIPLE
    prompt, tail, length = min(prompt, most), min(tail, most), min(prompt + tail, most)
    # Whole groups of the longest rows fill a block, if there is room for one.
    group = prompt + members * tail
    tokens = max(tokens // group * group or (group if whole else tokens), length)
    # Rows that a block may have are computed whether they are there or not: not many more of them
    # than fill it, where most rows are shorter than the longest.
    groups = max(1, round(_ROWS * tokens / group))
    sampled = batch.log_prob_mask[used].sum(axis=1)
    computed = int(common.sum() + behind.sum())
    if whole:
        mean = computed / max(len(np.unique(batch.episode[used] // members)), 1)
        groups = min(groups, _rung(math.ceil(tokens / max(mean, 1)), _FINE, 1))
    share = math.ceil(4 * sampled.sum() / max(computed, 1)) / 4
    if whole:
        sampled = np.bincount(batch.episode[used] // members, sampled)
    places = max(math.ceil(share * tokens), int(sampled.max(initial=1)))
    # Without shared tokens attention is computed by whole rows.
    return BlockShape(tokens, length, groups, members, places, prompt, tail if prompt else 0)


def token_blocks(
    batches: Sequence[TokenBatch], shape: BlockShape, devices: int = 1, *, whole: bool = False
) -> list[TokenBlocks]:
    """All rows of each batch that have a sampled token; as many blocks of each, on every device.

    Args:
        whole: a group, of as many neighbouring episodes as the shape has members, is one of the
            block's groups, its rows in their order: for losses that are not of single rows. All its
            rows share the same tokens.
    """
    packed = [_packed(batch, shape, whole=whole) for batch in batches]
    # A program is compiled for few numbers of blocks; it does not compute the empty ones.
    number = devices * _FEWEST
    while number < max(map(len, packed)):
        number *= _TIMES_MORE
    # Placed one by one, the fullest first, so that no device has more than its share.
    order = np.arange(number).reshape(-1, devices).T.reshape(-1)

    def stacked(batch: TokenBatch, blocks: list[_Block]) -> TokenBlocks:
        device_blocks = [_block(batch, shape, blocks[n] if n < len(blocks) else []) for n in order]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *device_blocks)

    return [stacked(*pair) for pair in zip(batches, packed, strict=True)]


def _is_used(batch: TokenBatch) -> np.ndarray:
    return batch.log_prob_mask.any(axis=1) & (batch.episode < len(batch.scored))


def _groups(batch: TokenBatch, shape: BlockShape, *, whole: bool) -> list[list[int]]:
    """Rows that share their first tokens, or those of whole groups."""
    groups: dict[int, list[int]] = defaultdict(list)
    for row in map(int, np.flatnonzero(_is_used(batch))):
        # Rows that share nothing need no group of their own.
        group = int(batch.leader[row]) if batch.shared[row] else -1
        groups[int(batch.episode[row]) // shape.members if whole else group].append(row)
    for rows in groups.values():
        rows.sort(key=lambda row: batch.episode[row] if whole else -batch.lengths[row])
    return [*groups.values()]


def _packed(batch: TokenBatch, shape: BlockShape, *, whole: bool) -> list[_Block]:
    """The groups in blocks, those of the most tokens first, each in the first with room for it.

    Where none has, a group is cut where that fills a block and repeats few tokens, unless it is to
    be whole.
    """
    blocks: list[_Block] = []
    of_rows = batch.shared, batch.lengths - batch.shared, batch.log_prob_mask.sum(axis=1)
    shared, alone, sampled = (counts.tolist() for counts in of_rows)

    def tokens_of(rows: list[int]) -> int:
        return int(shared[rows[0]] + sum(alone[row] for row in rows))

    def fitting(rows: list[int], block: _Block) -> list[int]:
        """Those of the rows, one group of them, that a block has room for."""
        if len(block) == shape.groups:
            return []
        places = shape.tokens - shared[rows[0]] - sum(map(tokens_of, block))
        left = shape.sampled - sum(sampled[row] for other in block for row in other)
        taken: list[int] = []
        for row in rows:
            if len(taken) < shape.members and alone[row] <= places and sampled[row] <= left:
                taken.append(row)
                places, left = places - alone[row], left - sampled[row]
        return taken

    for rows in sorted(_groups(batch, shape, whole=whole), key=lambda rows: -tokens_of(rows)):
        while rows:
            best, into = fitting(rows, []), -1
            fits = best == rows
            if not best or (whole and not fits):
                raise ValueError(f"{shape} has no room for a group of {len(rows)} rows")
            # A few rows with the same prompt again are no gain.
            most = 2 * shared[rows[0]]
            for number, block in enumerate(blocks):
                taken = fitting(rows, block)
                if fits and taken == rows:
                    best, into = taken, number
                    break
                if taken and not whole and (tokens := tokens_of(taken)) > most:
                    best, into, most = taken, number, tokens
            if into < 0:
                blocks.append([])
            blocks[into].append(best)
            rows = [row for row in rows if row not in best]
    return blocks


def _block(batch: TokenBatch, shape: BlockShape, groups: _Block) -> TokenBlocks:
    count, counts = shape.groups * shape.members, np.zeros(shape.groups, np.int32)
    layout: Any = _no_rows(count, shape.tokens, shape.length)
    prompts = rest = None
    if shape.own:
        prompts = _no_rows(shape.groups, shape.tokens, shape.prompt)
        rest = _no_rows(count, shape.tokens, shape.own)
    tokens = np.zeros(shape.tokens, np.int32)
    number = np.zeros(len(batch.tokens), np.int32)  # of each row in the block
    start = 0
    for group, rows in enumerate(groups):
        counts[group] = common = int(batch.shared[rows[0]])
        prompt = np.arange(start, start + common)
        start += common
        for member, row in enumerate(rows, group * shape.members):
            number[row] = member
            behind = np.arange(start, start + batch.lengths[row] - common)
            start += len(behind)
            every = np.append(prompt, behind)
            tokens[every] = batch.tokens[row, : len(every)]
            _put(layout, member, every)
            _put(rest, member, behind)
        layout.row[prompt] = group * shape.members  # shared places belong to the first row
        _put(prompts, group, prompt)
    layout = layout._replace(shared=Shared(counts, prompts, rest))  # type: ignore[arg-type]
    used = np.array([row for rows in groups for row in rows], int)
    order, at = np.nonzero(batch.log_prob_mask[used])
    rows_of = used[order]

    def of_sampled(values: np.ndarray, filled_with: int = 0) -> Any:
        unused = shape.sampled - len(at)
        return np.pad(values, (0, unused), constant_values=filled_with)

    return TokenBlocks(
        tokens=tokens,  # type: ignore[arg-type]
        layout=layout,
        place=of_sampled(layout.place[number[rows_of], at - 1]),
        target=of_sampled(batch.tokens[rows_of, at]),
        valid=of_sampled(np.ones(len(at), bool)),
        sampler=of_sampled(batch.sampler_log_probs[rows_of, at]),
        episode=of_sampled(batch.episode[rows_of], len(batch.scored)),
        row=of_sampled(number[rows_of]),
    )


def _no_rows(rows: int, tokens: int, length: int) -> Any:
    """A layout without any row, on the host."""
    row, place = np.full(tokens, rows, np.int32), np.zeros((rows, length), np.int32)
    nothing: Any = row, np.zeros(tokens, np.int32), place, np.zeros(rows, np.int32)
    return Layout(*nothing)


def _put(layout: Any, row: int, places: np.ndarray) -> None:
    """Writes into a layout, if there is one, that the tokens of a row are at these places."""
    if layout is not None:
        layout.row[places] = row
        layout.position[places] = np.arange(len(places))
        layout.place[row, : len(places)] = places
        layout.lengths[row] = len(places)


def _rung(number: int, steps: int, multiple: int = _MULTIPLE) -> int:
    """The next multiple that is one of `steps` numbers between two powers of two."""
    power = max(multiple, 1 << max(0, number - 1).bit_length())
    step = max(power // (2 * steps), multiple)
    return -(-number // step) * step
