"""What a token policy learns from one block of rows: the part that its passes leave open."""

from __future__ import annotations

from typing import Any, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp

from qrag_jax.models.compute.ragged import TokenCount
from qrag_jax.rollouts.token_blocks import TokenBlocks


class BlockSums(Protocol):
    """Totals over blocks: a pytree of arrays."""

    def plus(self, more: Self) -> Self:
        """The totals of both."""

    def over(self, axes: tuple[str, ...]) -> Self:
        """The totals of all devices along axes of the mesh, under `jax.shard_map`."""


Given = TypeVar("Given", contravariant=True)
Summed = TypeVar("Summed", bound=BlockSums, covariant=True)


class BlockLoss(Protocol[Given, Summed]):
    """The loss of one block."""

    def __call__(self, scores: Any, block: TokenBlocks, given: Given) -> tuple[jax.Array, Summed]:
        """The summed loss, of which the gradient is taken, and the sums.

        Args:
            scores: `[S]`, what is read of the sampled tokens of the block (`learners.readouts`).
            block: without the axis of blocks.
            given: what the block is learned with; a pytree of arrays.
        """


def token_count(block: TokenBlocks) -> TokenCount:
    """The tokens of a block, those that rows share counted once, and its places."""
    by_group = block.lengths.reshape(len(block.shared), -1)
    alone = jnp.where(by_group > 0, by_group - block.shared[:, None], 0).sum()
    real = (alone + block.shared.sum()).astype(jnp.float32)
    return TokenCount(real, jnp.float32(len(block.tokens)))
