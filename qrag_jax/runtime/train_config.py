"""Config section for the length of a training, its batches, and how often it saves and scores."""

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
    accumulation: int = 4  # micro-batches per optimizer step
    log_every: int = 10  # steps that one line of metrics averages over
    eval_every: int = 250  # steps between evaluations
    # the first evaluation comes after so many minutes, unless eval_every steps are done before; 0:
    # by steps alone
    first_eval_minutes: float = 10.0
    checkpoint_every: int = 250  # steps between saves of the whole state
    # episodes of each evaluation that are kept, in episodes.jsonl and TensorBoard; 0: none
    log_episodes: int = 8
    # number of steps in a row with a non-finite loss or gradient that ends the run; 0: no limit
    max_skipped_steps: int = 10

    def __post_init__(self) -> None:
        names = ("steps", "batch_size", "accumulation", "log_every")
        least = dict.fromkeys((*names, "eval_every", "checkpoint_every"), 1)
        least |= dict.fromkeys(("max_skipped_steps", "log_episodes", "first_eval_minutes"), 0)
        check_least("train", self, **least)

    def host_batch(self, devices: int, hosts: int) -> int:
        """Number of questions per optimizer step on one host.

        Raises:
            InputError: the batch does not split evenly.
        """
        parts = devices * self.accumulation
        if self.batch_size % parts:
            raise InputError(
                f"config.train.batch_size is {self.batch_size}, which does not split into {parts} "
                f"equal parts (devices × config.train.accumulation); use a multiple of {parts}."
            )
        return self.batch_size // hosts
