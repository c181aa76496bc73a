"""The settings that the cases of the speed suite share, and their targets."""

from __future__ import annotations

import dataclasses
from typing import TypedDict

from benchmarks import ours
from benchmarks.matmul import Peaks
from benchmarks.ours import Encoder, Texts
from benchmarks.peers.learner import Settings
from qrag_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Setting:
    """The settings of one run of the suite.

    Attributes:
        quick: whether this is the smaller suite, which has no targets for ratios.
        gpu: whether jax computes on a GPU.
        rounds: number of measured rounds.
        warmups: calls between the first call and the measured rounds.
        peaks: FLOP/s of a matrix product on this machine.
    """

    quick: bool
    gpu: bool
    rounds: int
    warmups: int
    peaks: Peaks

    @property
    def device(self) -> str:
        """Where torch computes."""
        return "cuda" if self.gpu else "cpu"

    def at_least(self, cpu: float, gpu: float) -> float | None:
        """The target on this machine; None for the quick sizes, which have no target."""
        return None if self.quick else gpu if self.gpu else cpu


class Verdict(TypedDict):
    """Two fields of a case: its target, and whether the target was met."""

    target: str | None
    holds: bool | None


def verdict(value: float, least: float | None, unit: str = "") -> Verdict:
    """The verdict on a case whose value must be at least `least`; None: it has no target."""
    if least is None:
        return {"target": None, "holds": None}
    return {"target": f">= {least:g}{unit}", "holds": value >= least}


def peer_settings(texts: Texts, encoder: Encoder) -> Settings:
    """The settings of the PQN peers, from the same config as our training.

    Raises:
        InputError: the config has a step cost, which no peer computes.
    """
    config = texts.config
    if config.reward.step_cost:
        raise InputError(
            f"config.reward.step_cost is {config.reward.step_cost}, but the PyTorch peers compute "
            "no step cost; set it to 0."
        )
    return Settings(
        encoder=encoder.encoder,
        rollout=config.rollout,
        pqn=config.pqn,
        optimizer=config.optimizer,
        learning_rates=ours.learning_rates(config),
        penalize_extra_steps=config.reward.penalize_extra_steps,
        per_fact_reward=config.reward.per_fact_reward,
    )
