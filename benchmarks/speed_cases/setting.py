"""What every case of the speed suite is given: sizes, data, encoders, peaks."""

from __future__ import annotations

import dataclasses
from typing import TypedDict

from benchmarks import ours
from benchmarks.matmul import Peaks
from benchmarks.ours import Encoder, Texts
from benchmarks.peers.learner import Settings


@dataclasses.dataclass(frozen=True)
class Setting:
    """Fixed for one run of the suite.

    quick: the smaller suite, whose ratios are no targets. gpu: jax computes on a GPU. rounds:
    measured rounds; warmups: calls before them, the first one left out. peaks: of this machine.
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
        """The target on this machine, None where the sizes are not those it was set for."""
        return None if self.quick else gpu if self.gpu else cpu


class Verdict(TypedDict):
    """The two keys of a case that say what was asked for and whether it was met."""

    target: str | None
    holds: bool | None


def verdict(value: float, least: float | None, unit: str = "") -> Verdict:
    """Of a case whose value must be at least `least`."""
    if least is None:
        return {"target": None, "holds": None}
    return {"target": f">= {least:g}{unit}", "holds": value >= least}


def peer_settings(texts: Texts, encoder: Encoder) -> Settings:
    """What the PQN peers are given, from the config that ours is built of."""
    config = texts.config
    return Settings(
        encoder=encoder.encoder,
        rollout=config.rollout,
        pqn=config.pqn,
        optimizer=config.optimizer,
        learning_rates=ours.learning_rates(config),
        penalize_extra_steps=config.reward.penalize_extra_steps,
        per_fact_reward=config.reward.per_fact_reward,
    )
