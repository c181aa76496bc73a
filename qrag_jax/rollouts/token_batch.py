"""Token episodes as arrays: what attention sees, what was sampled, and what is learned from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class TokenBatch(NamedTuple):
    """The episodes of a batch as rows of tokens, on the host: R rows of up to L tokens.

    An episode whose context was rewritten has several rows. Those of a group are neighbours: group
    g has the episodes g·G to (g + 1)·G - 1. Masks at place t speak of token t, whose
    log-probability comes from the hidden state at t - 1.

    Attributes:
        tokens: int32 `[R, L]`.
        lengths: int32 `[R]`; attention sees tokens by length, whatever their ids are.
        log_prob_mask: bool `[R, L]`, the sampled tokens.
        loss_mask: bool `[R, L]`, those that train: not of failed or truncated episodes.
        sampler_log_probs: float32 `[R, L]`, as the sampler drew them.
        episode: int32 `[R]`, number of the row's episode; N for a row that is padding.
        leader: int32 `[R]`, the row whose first tokens this row begins with, too; itself if none.
        shared: int32 `[R]`, number of these tokens, of which none is sampled; 0 for a leader.
        rewards: float32 `[N, K]`, the parts of each episode's reward.
        scored: bool `[N]`, whether it has any.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    log_prob_mask: np.ndarray
    loss_mask: np.ndarray
    sampler_log_probs: np.ndarray
    episode: np.ndarray
    leader: np.ndarray
    shared: np.ndarray
    rewards: np.ndarray
    scored: np.ndarray
