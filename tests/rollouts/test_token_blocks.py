"""Blocks of tokens: every row is in one of them, once, and a prompt as seldom as possible."""

from __future__ import annotations

import numpy as np
import pytest

from qrag_jax.rollouts.token_blocks import BlockShape, TokenBlocks, choose_shape, token_blocks
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
    (blocks,) = [token_blocks(batch, wide)]
    assert len(blocks.tokens) == 1
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


def test_what_does_not_fit() -> None:
    batch = made_batch()
    with pytest.raises(ValueError, match="is larger than"):
        token_blocks(batch, SHAPE._replace(length=10))
    batch.log_prob_mask[0, 0] = True
    with pytest.raises(ValueError, match="row 0 begins with a sampled token"):
        token_blocks(batch, SHAPE)
