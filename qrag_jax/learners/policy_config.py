"""Constants of the two algorithms that train a policy by the rewards of its episodes."""

from __future__ import annotations

import dataclasses

from qrag_jax.algorithms.policy_gradient import AGGREGATIONS, GRPO, Clip
from qrag_jax.errors import InputError, check_above, check_known, check_least, check_share


@dataclasses.dataclass(frozen=True)
class GRPOConfig:
    """Section `grpo` (Shao et al., arXiv 2402.03300; HARR, arXiv 2602.03645, eq. 10 to 12)."""

    members: int = 8  # G, episodes of one question that are compared
    clip_low: float = 0.2  # ε below 1
    clip_high: float = 0.2  # ε above 1
    beta: float = 0.0  # β, of the KL (k3) to the first weights, in the loss
    entropy: float = 0.0  # bonus on the entropy of the pool's softmax
    aggregation: str = GRPO  # of the losses of searches: grpo, bnpo, dr_grpo or dapo
    scaled: bool = True  # divide by the group's standard deviation; False: Dr. GRPO
    epochs: int = 1  # μ, updates from one batch
    minibatches: int = 1  # parts of a batch, each with an optimizer step

    def __post_init__(self) -> None:
        check_least("grpo", self, members=2, epochs=1, minibatches=1)
        _check_at_least_0("grpo", self, "clip_low", "clip_high", "beta", "entropy")
        check_known("grpo", self, "aggregation", AGGREGATIONS)

    @property
    def clip(self) -> Clip:
        """Bounds of the importance ratio."""
        return Clip(self.clip_low, self.clip_high)


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """Section `ppo` (Schulman et al., arXiv 1707.06347), with HARR's constants."""

    members: int = 1  # episodes of one question
    gamma: float = 1.0  # γ, discount
    lambda_: float = 0.95  # λ of the advantages (GAE)
    clip_low: float = 0.2  # ε below 1
    clip_high: float = 0.2  # ε above 1
    value_clip: float = 0.2  # how far a value may move from the one before the update
    kl: float = 0.005  # of the KL (k1) to the first weights, taken from each search's reward
    entropy: float = 0.0  # bonus on the entropy of the pool's softmax
    whiten: bool = True  # advantages of a batch have mean 0 and variance 1
    epochs: int = 1  # passes over one batch
    minibatches: int = 1  # parts of a batch, each with an optimizer step
    critic_learning_rate: float = 1e-4  # peak; warm-up and decay are those of the policy

    def __post_init__(self) -> None:
        check_least("ppo", self, members=1, epochs=1, minibatches=1)
        _check_at_least_0("ppo", self, "clip_low", "clip_high", "value_clip", "kl", "entropy")
        check_share("ppo", self, "gamma", "lambda_")
        check_above("ppo", self, "critic_learning_rate")

    @property
    def clip(self) -> Clip:
        """Bounds of the importance ratio."""
        return Clip(self.clip_low, self.clip_high)


def _check_at_least_0(section: str, config: GRPOConfig | PPOConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value >= 0:
            raise InputError(f"config.{section}.{name} is {value}; it must be at least 0.")
