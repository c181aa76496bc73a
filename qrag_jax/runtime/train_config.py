"""How long a training is, and how often it looks around."""

from __future__ import annotations

import dataclasses

from qrag_jax.errors import InputError, check_least


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Section `train`.

    Raises:
        InputError: a field cannot be used.
    """

    steps: int = 10_000  # optimizer steps
    batch_size: int = 48  # questions per optimizer step
    accumulation: int = 4  # micro-batches a step is computed in
    log_every: int = 10  # steps a line of metrics averages over
    eval_every: int = 250  # steps between evaluations
    checkpoint_every: int = 250  # steps between saves of the whole state
    # Steps in a row that may be left out for a loss or gradient that is not finite; 0: any number
    max_skipped_steps: int = 10

    def __post_init__(self) -> None:
        names = ("steps", "batch_size", "accumulation", "log_every")
        least = dict.fromkeys((*names, "eval_every", "checkpoint_every"), 1)
        check_least("train", self, **least, max_skipped_steps=0)

    def host_batch(self, devices: int, hosts: int) -> int:
        """Questions of a step on one host.

        Raises:
            InputError: they do not split evenly.
        """
        parts = devices * self.accumulation
        if self.batch_size % parts:
            raise InputError(
                f"config.train.batch_size is {self.batch_size}, which does not split into {parts} "
                f"equal parts (devices × config.train.accumulation); use a multiple of {parts}."
            )
        return self.batch_size // hosts
