"""Constants of the algorithms that train a token policy."""

from __future__ import annotations

import dataclasses

from qrag_jax.algorithms.policy_gradient import AGGREGATIONS, DR_GRPO, Clip
from qrag_jax.errors import InputError, check_known, check_least

# What a ratio is of: each token (GRPO), the whole row (GSPO, arXiv 2507.18071), each token as a
# constant weight of its log-probability's gradient (CISPO, arXiv 2506.13585).
TOKEN, SEQUENCE, CISPO = RATIOS = ("token", "sequence", "cispo")
ALL, BEST = LEARNED = ("all", "best")


@dataclasses.dataclass(frozen=True)
class TokenGRPOConfig:
    """Section `grpo` of a token policy (Shao et al., arXiv 2402.03300)."""

    members: int = 8  # G, episodes of one question that are compared
    clip_low: float = 0.2  # ε below 1
    clip_high: float = 0.2  # ε above 1
    beta: float = 0.0  # β, of the KL (k3) to the stage's first weights, in the loss
    aggregation: str = DR_GRPO  # of the losses of tokens: grpo, bnpo, dr_grpo or dapo
    ratio: str = TOKEN  # what a ratio is of: token, sequence or cispo
    scaled: bool = False  # divide by the group's standard deviation
    # Which episodes are learned from: all, by their advantages; or, to compare with, each group's
    # best one, which is imitated (RAFT, arXiv 2304.06767)
    learned: str = ALL
    epochs: int = 1  # μ, updates from one batch
    sampler_cap: float = 2.0  # C, most that the weight π_old/q of a sampled token may be
    longest: int = 1024  # most tokens that an episode samples, for dr_grpo

    def __post_init__(self) -> None:
        check_least("grpo", self, members=2, epochs=1, longest=1)
        check_known("grpo", self, "aggregation", AGGREGATIONS)
        check_known("grpo", self, "ratio", RATIOS)
        check_known("grpo", self, "learned", LEARNED)
        for name in ("clip_low", "clip_high", "beta"):
            if not getattr(self, name) >= 0:
                value = getattr(self, name)
                raise InputError(f"config.grpo.{name} is {value}; it must be at least 0.")
        if not self.sampler_cap >= 1:
            raise InputError(
                f"config.grpo.sampler_cap is {self.sampler_cap}; it must be at least 1, the weight "
                "where sampler and learner agree."
            )

    @property
    def clip(self) -> Clip:
        """Bounds of the importance ratio."""
        return Clip(self.clip_low, self.clip_high)


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """Section `sft`: the policy imitates the sampled tokens of given episodes."""

    members: int = 1  # episodes of one question
    epochs: int = 1  # updates from one batch

    def __post_init__(self) -> None:
        check_least("sft", self, members=1, epochs=1)
