"""Blocks of tokens: every row is in one of them, once, and a prompt as seldom as possible."""

from __future__ import annotations

import numpy as np
import pytest

from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.token_blocks import BlockShape, TokenBlocks, choose_shape, token_blocks
from tests.rollouts.pair_rows import PAIRS, made_pairs
from tests.rollouts.token_rows import GROUPS, MEMBERS, made_batch

SHAPE = BlockShape(tokens=60, length=24, groups=3, members=3, sampled=40)


def rows_of(blocks: TokenBlocks) -> list[tuple[int, list[int], list[tuple[int, int, bool]]]]:
    """(episode, tokens, (position, token, learned) of those sampled) of each row, read back."""
    found = []
    for number in range(len(blocks.tokens)):
        shared, lengths = blocks.shared[number], blocks.lengths[number]
        members, start = len(lengths) // len(shared), 0
        for group in range(len(shared)):
            own = lengths[group * members : (group + 1) * members]
            if not own.any():
                continue
            prompt = list(range(start, start + shared[group]))
            start += shared[group]
            for member in range(members):
                if not own[member]:
                    continue
                alone = own[member] - shared[group]
                places = prompt + list(range(start, start + alone))
                start += alone
                tokens = [int(blocks.tokens[number, place]) for place in places]
                mine = blocks.valid[number] & (blocks.row[number] == group * members + member)
                sampled = [
                    (
                        places.index(blocks.place[number, at]) + 1,
                        int(blocks.target[number, at]),
                        bool(blocks.learned[number, at]),
                    )
                    for at in np.flatnonzero(mine)
                ]
                (episode,) = {int(each) for each in blocks.episode[number, mine]}
                found.append((episode, tokens, sampled))
    return found


@pytest.mark.parametrize("devices", [1, 4])
def test_every_row_is_in_one_block(devices: int) -> None:
    batch = made_batch()
    blocks = token_blocks(batch, SHAPE, devices)
    assert len(blocks.tokens) % devices == 0
    expected = []
    for row, length in enumerate(batch.lengths):
        if batch.episode[row] == len(batch.scored) or not batch.log_prob_mask[row].any():
            continue
        at = np.flatnonzero(batch.log_prob_mask[row])
        sampled = [(int(p), int(batch.tokens[row, p]), bool(batch.loss_mask[row, p])) for p in at]
        expected.append((int(batch.episode[row]), batch.tokens[row, :length].tolist(), sampled))
    assert sorted(rows_of(blocks)) == sorted(expected)
    # Devices have the same number of blocks, and the empty ones are the last.
    used = blocks.lengths.any(axis=1).reshape(devices, -1).sum(axis=1)
    assert used.max() - used.min() <= 1


def test_sampler_log_probs_go_with_their_tokens() -> None:
    batch = made_batch()
    blocks = token_blocks(batch, SHAPE)
    by_hand = sorted(batch.sampler_log_probs[batch.log_prob_mask].tolist())
    assert sorted(blocks.sampler[blocks.valid].tolist()) == by_hand


def test_a_prompt_is_computed_once() -> None:
    batch = made_batch()
    wide = SHAPE._replace(tokens=400, groups=8, sampled=300)
    blocks = token_blocks(batch, wide)
    assert np.flatnonzero(blocks.lengths.any(axis=1)).tolist() == [0]
    prompts = [int(batch.shared[group * MEMBERS + 1]) for group in range(GROUPS)]
    assert sorted(blocks.shared[0][blocks.shared[0] > 0].tolist()) == sorted(prompts)


def test_a_chosen_shape_holds_the_batch() -> None:
    batch = made_batch()
    shape = choose_shape(batch, 64, MEMBERS)
    assert shape.length % 8 == 0
    assert shape.length >= batch.lengths.max()
    assert len(rows_of(token_blocks(batch, shape))) == batch.log_prob_mask.any(axis=1).sum()
    # A few tokens more need no other program.
    longer = batch._replace(lengths=np.minimum(batch.lengths + 1, 20))
    assert choose_shape(longer, 64, MEMBERS) == shape


def test_a_group_is_cut_where_that_fills_a_block() -> None:
    batch = made_batch()
    rows = np.flatnonzero(batch.log_prob_mask.any(axis=1))
    alone = int((batch.lengths - batch.shared)[rows].sum())
    shape = SHAPE._replace(tokens=72, groups=8, sampled=72)
    blocks = token_blocks(batch, shape)
    used = blocks.lengths.any(axis=1)
    filled = blocks.valid.sum()
    assert filled == batch.log_prob_mask.sum()
    assert used.sum() <= alone / 72 + 2


@pytest.mark.parametrize("devices", [1, 4])
def test_a_group_may_be_whole(devices: int) -> None:
    batch = made_pairs()
    blocks = token_blocks(batch, SHAPE._replace(tokens=40, members=2), devices, whole=True)
    assert len(rows_of(blocks)) == 2 * PAIRS
    groups = []
    for number in range(len(blocks.tokens)):
        for group in range(SHAPE.groups):
            of_group = blocks.valid[number] & (blocks.row[number] // 2 == group)
            order = blocks.episode[number][of_group][np.argsort(blocks.row[number][of_group])]
            groups += [tuple(dict.fromkeys(order.tolist()))] if len(order) else []
    assert sorted(groups) == [(2 * pair, 2 * pair + 1) for pair in range(PAIRS)]


def test_a_shape_has_room_for_whole_groups() -> None:
    batch = made_pairs()
    for tokens in (8, 40, 64, 500):
        shape = choose_shape(batch, tokens, 2, whole=True)
        blocks = token_blocks(batch, shape, whole=True)
        assert blocks.valid.sum() == batch.log_prob_mask.sum()
    assert choose_shape(batch, 8, 2).tokens < choose_shape(batch, 8, 2, whole=True).tokens


def test_groups_that_cannot_be_whole() -> None:
    batch = made_pairs()
    shape = choose_shape(batch, 64, 2, whole=True)
    with pytest.raises(ValueError, match=r"a group of 2 rows .* has no room for it"):
        token_blocks(batch, shape._replace(tokens=24), whole=True)
    with pytest.raises(ValueError, match=r"a group of 2 rows .* has no room for it"):
        token_blocks(batch, shape._replace(sampled=10), whole=True)
    leader, shared = batch.leader.copy(), batch.shared.copy()
    leader[3], shared[3] = 0, 2
    with pytest.raises(ValueError, match="do not share the same tokens"):
        token_blocks(batch._replace(leader=leader, shared=shared), shape, whole=True)


def test_few_shapes_hold_many_batches() -> None:
    """Groups of eight, as unlike each other as episodes of one policy are."""
    draw, shapes = np.random.default_rng(0), set()
    for _ in range(40):
        batch = drawn_batch(draw)
        shape = choose_shape(batch, 2048, 8, room=640)
        blocks = token_blocks(batch, shape)
        assert blocks.valid.sum() == batch.log_prob_mask.sum()
        shapes.add((shape, len(blocks.tokens)))
    assert len(shapes) <= 3


def drawn_batch(draw: np.random.Generator) -> TokenBatch:
    """Prompts of 20 to 60 tokens, 1 to 4 turns of 30 to 70, between them passages of 60.

    Of the eight groups two or more are learned from.
    """
    rows, kept = [], draw.integers(2, 9)
    for group in range(8):
        prompt = int(draw.integers(20, 61))
        for _ in range(8):
            turns = [int(each) for each in draw.integers(30, 71, draw.integers(1, 5))]
            mask = np.zeros(640, bool)
            end = prompt
            for turn in turns:
                mask[end : end + turn] = group < kept
                end += turn + 60
            rows.append((prompt, end - 60, mask))
    prompts, lengths, masks = (np.array(each) for each in zip(*rows, strict=True))
    number = np.arange(64, dtype=np.int32)
    first = number // 8 * 8
    return TokenBatch(
        tokens=np.ones((64, 640), np.int32),
        lengths=lengths.astype(np.int32),
        log_prob_mask=masks,
        loss_mask=masks,
        sampler_log_probs=np.zeros((64, 640), np.float32),
        episode=number,
        leader=first,
        shared=np.where(number == first, 0, prompts).astype(np.int32),
        rewards=np.zeros((64, 1), np.float32),
        scored=np.ones(64, bool),
    )


def test_what_does_not_fit() -> None:
    batch = made_batch()
    with pytest.raises(ValueError, match="is larger than"):
        token_blocks(batch, SHAPE._replace(length=10))
    batch.log_prob_mask[0, 0] = True
    with pytest.raises(ValueError, match="row 0 begins with a sampled token"):
        token_blocks(batch, SHAPE)
