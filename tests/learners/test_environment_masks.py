"""The loss mask is not the attention mask: what an environment says changes what is learned.

verifiers 0.1.2 to 0.1.6 trained with one mask for both: a model was trained as if it had read
neither question nor tool results. Here both ways are computed on the same episodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from qrag_jax.learners.token_config import TokenGRPOConfig
from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.token_blocks import choose_shape
from qrag_jax.rollouts.token_forest import Piece, segments_of
from qrag_jax.rollouts.trajectories import DONE, SCORED, BatchRules, TokenTrajectory, token_batch
from qrag_jax.runtime.mesh import make_mesh
from tests.learners.token_updates import Learning, log_probs, model
from tests.rollouts.token_rows import LENGTH, MEMBERS

ALONE = make_mesh((1, 1, 1), jax.devices()[:1])
READ = 3  # tokens of the question, and of a tool's result


def episodes(read: Sequence[int]) -> TokenBatch:
    """A group of episodes: question, call, result, answer; and a second answer behind the call."""
    found = []
    for member in range(MEMBERS):
        call, answer, other = (np.array([member + shift, 7, 8], np.int32) for shift in (1, 5, 11))
        log_probs = np.full(3, -3.0, np.float32)
        question, result = np.array(read[:READ], np.int32), np.array(read[READ:], np.int32)
        pieces = [
            Piece(-1, question),
            Piece(0, call, log_probs),
            Piece(1, result),
            Piece(2, answer, log_probs),
            Piece(2, other, log_probs),
        ]
        reward = {"reward": float(member)}
        found.append(TokenTrajectory(0, member, 1, segments_of(pieces), DONE, reward))
    return token_batch(found, BatchRules(MEMBERS, ("reward",), SCORED, LENGTH))


def masked_as_theirs(batch: TokenBatch) -> np.ndarray:
    """Log-probabilities where attention drops every token that the loss leaves out."""
    kept = [row[mask] for row, mask in zip(batch.tokens, batch.loss_mask)]
    tokens = np.zeros_like(batch.tokens)
    lengths = np.array([len(row) for row in kept], np.int32)
    for row, own in enumerate(kept):
        tokens[row, : len(own)] = own
    mask = np.arange(tokens.shape[1])[None] < lengths[:, None]
    seen = np.asarray(log_probs(model(), batch._replace(tokens=tokens, lengths=lengths)))
    return seen[mask & (np.arange(tokens.shape[1]) > 0)[None]]


def test_what_a_tool_says_changes_the_log_probabilities_of_later_tokens() -> None:
    one, other = episodes([1, 2, 3, 4, 5, 6]), episodes([1, 2, 3, 20, 21, 22])
    np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
    assert one.loss_mask.sum() == MEMBERS * 9  # the call of each episode trains once
    ours = [np.asarray(log_probs(model(), batch)) for batch in (one, other)]
    behind = one.loss_mask & (np.arange(one.tokens.shape[1]) >= 2 * READ + READ)[None]
    assert (np.abs(ours[0] - ours[1])[behind] > 1e-4).mean() > 0.9
    np.testing.assert_array_equal(masked_as_theirs(one), masked_as_theirs(other))


def test_an_update_reads_what_a_tool_says() -> None:
    config = TokenGRPOConfig(members=MEMBERS, longest=16)
    found = []
    for read in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 20, 21, 22]):
        batch = episodes(read)
        shape = choose_shape(batch, 64, MEMBERS, room=LENGTH)
        batch = batch._replace(rewards=np.repeat(batch.rewards, 2, axis=1))
        found.append(Learning(ALONE, config, model(), shape=shape).step(batch)["sampler_kl"])
    assert abs(found[0] - found[1]) > 1e-3
