"""Batches for PPO: episodes of one row, some with a tool's words between their sampled tokens."""

from __future__ import annotations

import numpy as np

from qrag_jax.rollouts.token_batch import TokenBatch

EPISODES, LENGTH = 8, 40


def ppo_batch(seed: int, *, vocab: int, episodes: int = EPISODES) -> TokenBatch:
    """Episodes of different lengths; the second has no reward, and of the third nothing trains."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(1, vocab, (episodes, LENGTH)).astype(np.int32)
    lengths = draw.integers(24, LENGTH + 1, episodes).astype(np.int32)
    sampled = np.zeros((episodes, LENGTH), bool)
    for row in range(episodes):
        start, end = int(draw.integers(6, 16)), int(lengths[row])
        sampled[row, start:end] = True
        if row % 2:  # a masked stretch
            sampled[row, start + 2 : start + 5] = False
    scored = np.arange(episodes) != 1
    learns = scored & (np.arange(episodes) != 2)
    sampler = np.where(sampled, draw.normal(-np.log(vocab), 0.3, tokens.shape), 0.0)
    return TokenBatch(
        tokens=tokens,
        lengths=lengths,
        log_prob_mask=sampled,
        loss_mask=sampled & learns[:, None],
        sampler_log_probs=sampler.astype(np.float32),
        episode=np.arange(episodes, dtype=np.int32),
        leader=np.arange(episodes, dtype=np.int32),
        shared=np.zeros(episodes, np.int32),
        rewards=draw.random((episodes, 1)).astype(np.float32),
        scored=scored,
    )
