"""A small batch of token episodes: shared prompts, tool results in between, a second segment."""

from __future__ import annotations

import numpy as np

from qrag_jax.rollouts.token_batch import TokenBatch

GROUPS, MEMBERS, VOCAB, LENGTH = 4, 3, 29, 24


def made_batch(seed: int = 0) -> TokenBatch:
    """`GROUPS` × `MEMBERS` episodes, one of them with a second row, and a row of padding.

    Episode 4 has no reward, and of episode 7 nothing trains.
    """
    draw = np.random.default_rng(seed)
    episodes = GROUPS * MEMBERS
    rows = episodes + 2
    tokens = draw.integers(1, VOCAB, (rows, LENGTH)).astype(np.int32)
    lengths = draw.integers(14, 21, rows).astype(np.int32)
    log_prob_mask = np.zeros((rows, LENGTH), bool)
    leader, shared = np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32)
    episode = np.append(np.arange(episodes), [5, episodes]).astype(np.int32)
    for row in range(episodes):
        group = row // MEMBERS
        prompt, first = 4 + group, group * MEMBERS
        tokens[row, :prompt] = tokens[first, :prompt]
        if row != first:
            leader[row], shared[row] = first, prompt
        end = lengths[row]
        log_prob_mask[row, prompt : prompt + 4] = True  # a call; then a result; then the answer
        log_prob_mask[row, prompt + 7 : end] = True
    log_prob_mask[episodes, 6:12] = True
    scored = np.arange(episodes) != 4
    loss_mask = (
        log_prob_mask
        & (scored & (np.arange(episodes) != 7))[np.minimum(episode, episodes - 1)][:, None]
    )
    sampler = np.where(log_prob_mask, draw.normal(-3.3, 0.2, tokens.shape), 0).astype(np.float32)
    rewards = draw.random((episodes, 2)).astype(np.float32)
    rewards[:MEMBERS] = 0.5  # nothing can be learned from the first group
    return TokenBatch(
        tokens=tokens,
        lengths=lengths,
        log_prob_mask=log_prob_mask,
        loss_mask=loss_mask,
        sampler_log_probs=sampler,
        episode=episode,
        leader=leader,
        shared=shared,
        rewards=rewards,
        scored=scored,
    )
