"""The settings of the decision process whose actions are the chunks of one document."""

from __future__ import annotations

import dataclasses

from qrag_jax.environments import positions
from qrag_jax.errors import check_known, check_least


@dataclasses.dataclass(frozen=True)
class ChunksConfig:
    """Section `env`."""

    # T, chunks taken per episode; 0: as many as the training question with the most supporting
    # facts needs, or 2 where no facts are known
    max_steps: int = 2
    # Continue after all supporting facts are found or, with rewards of a language model, after a
    # reward completes the episode (config.reward.completion_threshold).
    never_terminate: bool = True
    sort_by_index: bool = False  # states list chunks in document order, else in the order taken
    # Positions at which chunk embeddings are rotated: none, absolute, random, random_published or
    # relative.
    positions: str = "none"
    stop_action: bool = False  # adds an action STOP, which ends the episode

    def __post_init__(self) -> None:
        check_least("env", self, max_steps=0)
        check_known("env", self, "positions", positions.KINDS)
