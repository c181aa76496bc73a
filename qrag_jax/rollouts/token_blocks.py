"""Packs rows of tokens into blocks of one static size; rows of a group share their prompt.

The plan is made on the host, where the batch is made. Devices that hold the parameters together
must run through the same number of blocks, which is known here, before anything is sent.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import NamedTuple

import jax
import numpy as np

from qrag_jax.rollouts.token_batch import TokenBatch


class BlockShape(NamedTuple):
    """Static sizes of a block.

    tokens: T, places of tokens.
    length: L, tokens of the longest row, its shared ones included.
    groups: Q, groups of rows that share their first tokens.
    members: M, rows of a group, at most.
    sampled: S, places of sampled tokens.
    prompt: P, most tokens that the rows of a group share.
    own: O, most tokens of a row behind these; 0: attention is not computed in parts.
    """

    tokens: int
    length: int
    groups: int
    members: int
    sampled: int
    prompt: int = 0
    own: int = 0


class TokenBlocks(NamedTuple):
    """B blocks; device d of D has those from d·B/D on.

    Attributes:
        tokens: int32 `[B, T]`, packed as in `models.compute.sharing.shared_layout`.
        shared: int32 `[B, Q]`, tokens that the rows of a group begin with.
        lengths: int32 `[B, Q·M]`, of the rows, the shared tokens included; 0: no row.
        place: int32 `[B, S]`, the place of the hidden state before each sampled token.
        target: int32 `[B, S]`, the sampled tokens.
        valid: bool `[B, S]`, whether there is one.
        learned: bool `[B, S]`, whether it trains.
        sampler: float32 `[B, S]`, its log-probability by the sampler.
        episode: int32 `[B, S]`, its episode.
        row: int32 `[B, S]`, its row in the block.
        room: bool `[B, L, P, O, 0]`: nothing, but its shape tells a compiled program these.
    """

    tokens: jax.Array
    shared: jax.Array
    lengths: jax.Array
    place: jax.Array
    target: jax.Array
    valid: jax.Array
    learned: jax.Array
    sampler: jax.Array
    episode: jax.Array
    row: jax.Array
    room: jax.Array


@dataclasses.dataclass
class _Piece:
    """Rows that share their first tokens, in one block."""

    shared: int
    rows: list[int]
    tokens: int
    sampled: int


def choose_shape(batch: TokenBatch, tokens: int, members: int, multiple: int = 8) -> BlockShape:
    """A shape for batches like this one: few different ones, so that few programs are compiled.

    The row length is the next of 1, 1.25, 1.5 and 1.75 times a power of two; the share of sampled
    places is the next of eighths.

    Args:
        tokens: places of a block; more if the longest row needs more.
        members: rows of a group, at most.
        multiple: what the row length is a multiple of.
    """
    used = np.flatnonzero(_is_used(batch))
    longest = int(batch.lengths[used].max(initial=1))
    length = _rung(longest, multiple)
    tokens = max(tokens, length)
    sampled = batch.log_prob_mask[used].sum(axis=1)
    of_rows = (batch.lengths - batch.shared)[used].sum()
    share = math.ceil(8 * min(1.0, 1.1 * sampled.sum() / max(of_rows, 1))) / 8
    most = max(math.ceil(share * tokens), int(sampled.max(initial=1)))
    common = _common(batch)
    shared = max(common.values(), default=0)
    behind = 0
    if shared:
        behind = max(
            int(batch.lengths[row]) - common.get(int(batch.leader[row]), 0) for row in used
        )
    shortest = max(int(np.median((batch.lengths - batch.shared)[used])) if len(used) else 1, 1)
    # Rows that a block may have are computed whether they are there or not: not many more of them.
    groups = max(1, math.ceil(tokens / (7 / 8 * _rung(shortest)) / members))
    groups = _rung(groups)
    prompt, own = (min(length, _rung(each, multiple)) if each else 0 for each in (shared, behind))
    return BlockShape(tokens, length, groups, members, most, prompt, own)


def token_blocks(batch: TokenBatch, shape: BlockShape, devices: int = 1) -> TokenBlocks:
    """All rows that have a sampled token, in as many blocks on every device.

    Raises:
        ValueError: a row begins with a sampled token, is longer than the shape's rows, or has more
            sampled tokens than a block holds.
    """
    pieces = _pieces(batch, shape)
    blocks: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        for block in blocks:
            if (
                len(block) < shape.groups
                and sum(each.tokens for each in block) + piece.tokens <= shape.tokens
                and sum(each.sampled for each in block) + piece.sampled <= shape.sampled
            ):
                block.append(piece)
                break
        else:
            blocks.append([piece])
    # A program is compiled for few numbers of blocks; it does not compute the empty ones.
    number = devices * 2 ** math.ceil(math.log2(max(1, math.ceil(len(blocks) / devices))))
    # Dealt out one by one, the fullest first, so that no device has more than its share.
    order = np.arange(number).reshape(-1, devices).T.reshape(-1)
    made = [_block(batch, shape, blocks[n] if n < len(blocks) else []) for n in order]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *made)


def _is_used(batch: TokenBatch) -> np.ndarray:
    return batch.log_prob_mask.any(axis=1) & (batch.episode < len(batch.scored))


def _common(batch: TokenBatch) -> dict[int, int]:
    """Leader → the tokens that it and all rows behind it begin with."""
    common: dict[int, int] = {}
    for row in map(int, np.flatnonzero(_is_used(batch) & (batch.shared > 0))):
        leader, shared = int(batch.leader[row]), int(batch.shared[row])
        common[leader] = min(shared, common.get(leader, shared))
    return common


def _pieces(batch: TokenBatch, shape: BlockShape) -> list[_Piece]:
    """Groups of rows, cut where a block has no room for more."""
    together: dict[tuple[int, int], list[int]] = defaultdict(list)
    used, common = _is_used(batch), _common(batch)
    for row in map(int, np.flatnonzero(used)):
        length, sampled = int(batch.lengths[row]), int(batch.log_prob_mask[row].sum())
        if batch.log_prob_mask[row, 0]:
            raise ValueError(f"row {row} begins with a sampled token, which nothing comes before")
        if length > min(shape.length, shape.tokens) or sampled > shape.sampled:
            raise ValueError(
                f"row {row} of {length} tokens, {sampled} of them sampled, is larger than {shape}"
            )
        leader = int(batch.leader[row])
        shared = common.get(leader, 0)
        if shape.own and (shared > shape.prompt or length - shared > shape.own):
            raise ValueError(
                f"row {row} has {shared} shared tokens and {length - shared} behind them; {shape} "
                "has no room for so many"
            )
        # Rows that share nothing need no group of their own.
        together[(leader if shared else -1), shared].append(row)
    pieces = []
    for (_, shared), rows in together.items():
        piece = _Piece(shared, [], shared, 0)
        for row in rows:
            alone, sampled = int(batch.lengths[row]) - shared, int(batch.log_prob_mask[row].sum())
            if piece.rows and (
                len(piece.rows) == shape.members
                or piece.tokens + alone > shape.tokens
                or piece.sampled + sampled > shape.sampled
            ):
                pieces.append(piece)
                piece = _Piece(shared, [], shared, 0)
            piece.rows.append(row)
            piece.tokens += alone
            piece.sampled += sampled
        pieces.append(piece)
    return pieces


def _block(batch: TokenBatch, shape: BlockShape, pieces: list[_Piece]) -> TokenBlocks:
    nothing = len(batch.scored)
    made: dict[str, np.ndarray] = dict(
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
        room=np.zeros((shape.length, shape.prompt, shape.own, 0), bool),
    )
    start = filled = 0
    for group, piece in enumerate(pieces):
        made["shared"][group] = piece.shared
        first = batch.tokens[piece.rows[0], : piece.shared]
        made["tokens"][start : start + piece.shared] = first
        prompt, start = start, start + piece.shared
        for member, row in enumerate(piece.rows):
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
    return TokenBlocks(**made)  # type: ignore[arg-type]


def _rung(number: int, multiple: int = 1) -> int:
    """The next of 1, 1.25, 1.5 and 1.75 times a power of two, as a multiple of `multiple`."""
    power = 2 ** max(0, math.floor(math.log2(max(number, 1))))
    rungs = (math.ceil(power * quarter / 4) for quarter in (4, 5, 6, 7, 8))
    chosen = next(rung for rung in rungs if rung >= number)
    return math.ceil(chosen / multiple) * multiple
