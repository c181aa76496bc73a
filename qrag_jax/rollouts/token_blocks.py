"""Packs rows of tokens into blocks of one static size; rows of a group share their prompt.

The plan is made on the host, where the batch is made. Devices that hold the parameters together
must run through the same number of blocks, which is known here, before anything is sent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from qrag_jax.models.compute.packing import Layout, Shared
from qrag_jax.rollouts.trajectories import TokenBatch

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
        length, shared = int(batch.lengths[row]), int(batch.shared[row])
        sampled = int(batch.log_prob_mask[row].sum())
        too_long = length > min(shape.length, shape.tokens) or sampled > shape.sampled
        if shape.own:
            too_long |= shared > shape.prompt or length - shared > shape.own
        if too_long or batch.log_prob_mask[row, 0]:
            raise ValueError(
                f"row {row} of {length} tokens, {shared} of them shared and {sampled} sampled, is "
                f"larger than {shape}, or nothing comes before its first sampled one"
            )
        # Rows that share nothing need no group of their own.
        group = int(batch.leader[row]) if shared else -1
        groups[int(batch.episode[row]) // shape.members if whole else group].append(row)
    for rows in groups.values():
        if len({*batch.shared[rows].tolist()}) > 1:
            raise ValueError("rows of a group that is to be whole do not share the same tokens")
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
            if whole and not fits:
                raise ValueError(
                    f"a group of {len(rows)} rows, which share {shared[rows[0]]} tokens, is "
                    f"to be whole; {shape} has no room for it"
                )
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
