"""Constants of the losses by which a token policy learns from pairs."""

from __future__ import annotations

import dataclasses
import math

from qrag_jax.errors import InputError, check_known

IPO, DPO = LOSSES = ("ipo", "dpo")


@dataclasses.dataclass(frozen=True)
class PreferenceConfig:
    """Section `preference`: pairs of a better and a worse answer to one prompt."""

    loss: str = IPO  # ipo (arXiv 2310.12036) or dpo (arXiv 2305.18290)
    # β. Of ipo: the margin that is aimed at is 1/(2β) nats, 10 as LeReT has it; of dpo: how firmly
    # the policy is held to the reference
    beta: float = 0.05
    # The log-probability of a sequence is the mean over its tokens, as TRL has it for ipo; False:
    # their sum, as LeReT. β is for one of them: a mean is as many times smaller as there are tokens
    averaged: bool = False
    label_smoothing: float = 0.0  # ε of dpo, the share of pairs that are the wrong way round

    def __post_init__(self) -> None:
        check_known("preference", self, "loss", LOSSES)
        if not 0 < self.beta < math.inf:
            raise InputError(
                f"config.preference.beta is {self.beta}; use a number above 0, such as 0.05."
            )
        if not 0 <= self.label_smoothing < 0.5:
            raise InputError(
                f"config.preference.label_smoothing is {self.label_smoothing}; it must be at least "
                "0 and below 0.5."
            )
        if self.label_smoothing and self.loss != DPO:
            raise InputError(
                f"config.preference.label_smoothing is {self.label_smoothing}, which is of {DPO} "
                f"alone; leave it at 0 or set config.preference.loss to {DPO!r}."
            )
