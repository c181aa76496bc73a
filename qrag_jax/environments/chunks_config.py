"""The settings of the decision process whose actions are the chunks of one document."""

from __future__ import annotations

import dataclasses

from qrag_jax.environments import positions
from qrag_jax.errors import check_known, check_least


@dataclasses.dataclass(frozen=True)
class ChunksConfig:
    """Section `env`.

    Raises:
        InputError: a field cannot be used.
    """

    max_steps: int = 2  # T, chunks taken per episode
    # Play on when all supporting facts are found or, with a language model's reward, when that
    # completes the episode (config.reward.completion_threshold).
    never_terminate: bool = True
    sort_by_index: bool = False  # states list chunks in document order, else as taken
    # Chunk embeddings are rotated at: none, absolute, random, random_published, relative
    positions: str = "none"
    stop_action: bool = False  # an action that ends the episode, besides the chunks

    def __post_init__(self) -> None:
        check_least("env", self, max_steps=1)
        check_known("env", self, "positions", positions.KINDS)
