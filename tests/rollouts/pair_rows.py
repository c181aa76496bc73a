"""A small batch of pairs: winners and losers with a common prompt."""

from __future__ import annotations

import numpy as np

from qrag_jax.rollouts.token_batch import TokenBatch
from tests.rollouts.token_rows import VOCAB

PAIRS, LONGEST = 7, 24
NO_WEIGHT, CUT_OFF, APART = 2, 4, 5  # a pair of weight 0, one whose loser is masked, one apart


def made_pairs() -> TokenBatch:
    """Winners and losers with a common prompt, of different lengths; a row of padding behind.

    Rows of the pair `APART` are not known to share anything.
    """
    draw, episodes = np.random.default_rng(5), 2 * PAIRS
    rows = episodes + 1
    tokens = draw.integers(1, VOCAB, (rows, LONGEST)).astype(np.int32)
    number = np.arange(rows, dtype=np.int32)
    leader, shared = number.copy(), np.zeros(rows, np.int32)
    lengths, mask = np.full(rows, 3, np.int32), np.zeros((rows, LONGEST), bool)
    for row in range(episodes):
        prompt, winner = 5 + row // 2, row - row % 2
        tokens[row, :prompt] = tokens[winner, :prompt]
        if row != winner and row // 2 != APART:
            leader[row], shared[row] = winner, prompt
        lengths[row] = prompt + draw.integers(2, 11)
        mask[row, prompt : lengths[row]] = True
    loser = 2 * CUT_OFF + 1
    return TokenBatch(
        tokens=tokens,
        lengths=lengths,
        log_prob_mask=mask,
        loss_mask=mask & (number != loser)[:, None],
        sampler_log_probs=np.zeros(tokens.shape, np.float32),
        episode=number,
        leader=leader,
        shared=shared,
        rewards=np.zeros((episodes, 1), np.float32),
        scored=number[:-1] != loser,
    )
