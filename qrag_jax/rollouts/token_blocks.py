"""Packs rows of tokens into blocks of one static size; rows of a group share their prompt.

The plan is made on the host, where the batch is made. Devices that hold the parameters together
must run through the same number of blocks, which is known here, before anything is sent.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from qrag_jax.models.compute.packing import RowLengths
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBlocks:
    """B blocks; device d of D has those from d·B/D on."""

    tokens: jax.Array  # int32 `[B, T]`, packed as in `models.compute.packing.shared_layout`
    shared: jax.Array  # int32 `[B, Q]`, tokens that the rows of a group begin with
    lengths: jax.Array  # int32 `[B, Q·M]`, of the rows, the shared tokens included; 0: no row
    place: jax.Array  # int32 `[B, S]`, the place of the hidden state before each sampled token
    target: jax.Array  # int32 `[B, S]`, the sampled tokens
    valid: jax.Array  # bool `[B, S]`, whether there is one
    learned: jax.Array  # bool `[B, S]`, whether it trains
    sampler: jax.Array  # float32 `[B, S]`, its log-probability by the sampler
    episode: jax.Array  # int32 `[B, S]`, its episode
    row: jax.Array  # int32 `[B, S]`, its row in the block
    # of the rows; a program is compiled for it
    longest: RowLengths = dataclasses.field(metadata={"static": True})


class _Row(NamedTuple):
    """A row of the batch: its tokens behind those it shares, and those of it that are sampled."""

    number: int
    alone: int
    sampled: int


class _Piece(NamedTuple):
    """Rows that share their first tokens, in one block."""

    shared: int
    rows: list[_Row]

    @property
    def tokens(self) -> int:
        """Places that it takes."""
        return self.shared + sum(row.alone for row in self.rows)


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
    longest, common = int(batch.lengths[used].max(initial=1)), _common(batch)
    shared = max(common.values(), default=0)
    behind = [int(batch.lengths[row]) - common.get(int(batch.leader[row]), 0) for row in used]
    prompt = _rung(max(shared, _LEAST_PROMPT), steps) if shared else 0
    own = _rung(max(behind, default=1), steps)
    most = -(-max(room or prompt + own, longest) // _MULTIPLE) * _MULTIPLE
    prompt, own, length = min(prompt, most), min(own, most), min(prompt + own, most)
    # Whole groups of the longest rows fill a block, if there is room for one.
    group = prompt + members * own
    tokens = max(tokens // group * group or (group if whole else tokens), length)
    # Rows that a block may have are computed whether they are there or not: not many more of them
    # than fill it, where most rows are shorter than the longest.
    groups = max(1, round(_ROWS * tokens / group))
    sampled = batch.log_prob_mask[used].sum(axis=1)
    computed = sum(common.values()) + sum(behind)
    if whole:
        mean = computed / max(len(np.unique(batch.episode[used] // members)), 1)
        groups = min(groups, _rung(math.ceil(tokens / max(mean, 1)), _FINE, 1))
    share = math.ceil(4 * sampled.sum() / max(computed, 1)) / 4
    if whole:
        sampled = np.bincount(batch.episode[used] // members, sampled)
    places = max(math.ceil(share * tokens), int(sampled.max(initial=1)))
    # Without shared tokens attention is computed by whole rows.
    return BlockShape(tokens, length, groups, members, places, prompt, own if prompt else 0)


def token_blocks(
    batches: Sequence[TokenBatch], shape: BlockShape, devices: int = 1, *, whole: bool = False
) -> list[TokenBlocks]:
    """All rows of each batch that have a sampled token; as many blocks of each, on every device.

    Args:
        whole: a group, of as many neighbouring episodes as the shape has members, is one of the
            block's groups, its rows in their order: for losses that are not of single rows. All its
            rows share the same tokens.
    """
    packed = [_packed(_groups(each, shape, whole=whole), shape, whole=whole) for each in batches]
    # A program is compiled for few numbers of blocks; it does not compute the empty ones.
    number = devices * _FEWEST
    while number < max(map(len, packed)):
        number *= _TIMES_MORE
    # Placed one by one, the fullest first, so that no device has more than its share.
    order = np.arange(number).reshape(-1, devices).T.reshape(-1)

    def stacked(batch: TokenBatch, blocks: list[list[_Piece]]) -> TokenBlocks:
        made = [_block(batch, shape, blocks[n] if n < len(blocks) else []) for n in order]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *made)

    return [stacked(*each) for each in zip(batches, packed, strict=True)]


def _is_used(batch: TokenBatch) -> np.ndarray:
    return batch.log_prob_mask.any(axis=1) & (batch.episode < len(batch.scored))


def _common(batch: TokenBatch) -> dict[int, int]:
    """Leader → the tokens that it and all rows behind it begin with."""
    common: dict[int, int] = {}
    for row in map(int, np.flatnonzero(_is_used(batch) & (batch.shared > 0))):
        leader, shared = int(batch.leader[row]), int(batch.shared[row])
        common[leader] = min(shared, common.get(leader, shared))
    return common


def _groups(batch: TokenBatch, shape: BlockShape, *, whole: bool) -> list[_Piece]:
    """Rows that share their first tokens, or those of whole groups; the most tokens first."""
    together: dict[tuple[int, int], list[_Row]] = defaultdict(list)
    used, common = _is_used(batch), _common(batch)
    for row in map(int, np.flatnonzero(used)):
        length, sampled = int(batch.lengths[row]), int(batch.log_prob_mask[row].sum())
        leader = int(batch.leader[row])
        shared = common.get(leader, 0)
        too_long = length > min(shape.length, shape.tokens) or sampled > shape.sampled
        if shape.own:
            too_long |= shared > shape.prompt or length - shared > shape.own
        if too_long or batch.log_prob_mask[row, 0]:
            raise ValueError(
                f"row {row} of {length} tokens, {shared} of them shared and {sampled} sampled, is "
                f"larger than {shape}, or nothing comes before its first sampled one"
            )
        # Rows that share nothing need no group of their own.
        group = leader if shared else -1
        if whole:
            group = int(batch.episode[row]) // shape.members
        together[group, shared].append(_Row(row, length - shared, sampled))
    pieces = []
    for (_, shared), rows in together.items():
        rows.sort(key=lambda each: batch.episode[each.number] if whole else -each.alone)
        pieces.append(_Piece(shared, rows))
    if whole and len({group for group, _ in together}) < len(pieces):
        raise ValueError("rows of a group that is to be whole do not share the same tokens")
    return sorted(pieces, key=lambda piece: -piece.tokens)


def _packed(groups: list[_Piece], shape: BlockShape, *, whole: bool) -> list[list[_Piece]]:
    """The groups in blocks, each in the first that has room for all of it.

    Where none has, a group is cut where that fills a block and repeats few tokens, unless it is to
    be whole.
    """
    blocks: list[list[_Piece]] = []
    for shared, rows in groups:
        left = rows
        while left:
            most, into, best = shared, -1, _fitting(left, shared, shape, [])
            fits = len(best) == len(left)
            if whole and not fits:
                raise ValueError(
                    f"a group of {len(rows)} rows, which share {shared} tokens, is to be whole; "
                    f"{shape} has no room for it"
                )
            for number, block in enumerate(blocks):
                taken = _fitting(left, shared, shape, block)
                if fits and taken == left:
                    into, best = number, taken
                    break
                # A few rows with the same prompt again are no gain.
                tokens = sum(row.alone for row in taken)
                if tokens > most and not whole:
                    most, into, best = tokens, number, taken
            if into < 0:
                blocks.append([])
            blocks[into].append(_Piece(shared, best))
            chosen = {row.number for row in best}
            left = [row for row in left if row.number not in chosen]
    return blocks


def _fitting(rows: list[_Row], shared: int, shape: BlockShape, block: list[_Piece]) -> list[_Row]:
    """Those of the rows, one piece of them, that a block has room for."""
    if len(block) == shape.groups:
        return []
    tokens = shape.tokens - shared - sum(piece.tokens for piece in block)
    sampled = shape.sampled - sum(row.sampled for piece in block for row in piece.rows)
    taken: list[_Row] = []
    for row in rows:
        if len(taken) < shape.members and row.alone <= tokens and row.sampled <= sampled:
            taken.append(row)
            tokens, sampled = tokens - row.alone, sampled - row.sampled
    return taken


def _block(batch: TokenBatch, shape: BlockShape, pieces: list[_Piece]) -> TokenBlocks:
    nothing = len(batch.scored)
    made: dict[str, Any] = dict(
        tokens=np.zeros(shape.tokens, np.int32),
        shared=np.zeros(shape.groups, np.int32),
        lengths=np.zeros(shape.groups * shape.members, np.int32),
        place=np.zeros(shape.sampled, np.int32),
        target=np.zeros(shape.sampled, np.int32),
        valid=np.zeros(shape.sampled, bool),
        learned=np.zeros(shape.sampled, bool),
        sampler=np.zeros(shape.sampled, np.float32),
        episode=np.full(shape.sampled, nothing, np.int32),
        row=np.zeros(shape.sampled, np.int32),
    )
    start = filled = 0
    for group, piece in enumerate(pieces):
        made["shared"][group] = piece.shared
        first = batch.tokens[piece.rows[0].number, : piece.shared]
        made["tokens"][start : start + piece.shared] = first
        prompt, start = start, start + piece.shared
        for member, (row, _, _) in enumerate(piece.rows):
            length = int(batch.lengths[row])
            own = slice(start, start + length - piece.shared)
            made["tokens"][own] = batch.tokens[row, piece.shared : length]
            number = group * shape.members + member
            made["lengths"][number] = length
            at = np.flatnonzero(batch.log_prob_mask[row, :length])
            part = slice(filled, filled + len(at))
            before = at - 1
            made["place"][part] = np.where(
                before < piece.shared, prompt + before, start + before - piece.shared
            )
            made["target"][part] = batch.tokens[row, at]
            made["valid"][part] = True
            made["learned"][part] = batch.loss_mask[row, at]
            made["sampler"][part] = batch.sampler_log_probs[row, at]
            made["episode"][part] = batch.episode[row]
            made["row"][part] = number
            filled, start = filled + len(at), own.stop
    return TokenBlocks(**made, longest=RowLengths(shape.length, shape.prompt, shape.own))


def _rung(number: int, steps: int, multiple: int = _MULTIPLE) -> int:
    """The next multiple that is one of `steps` numbers between two powers of two."""
    power = max(multiple, 1 << max(0, number - 1).bit_length())
    step = max(power // (2 * steps), multiple)
    return -(-number // step) * step
