"""Constants of PPO with a critic, for a token policy."""

from __future__ import annotations

import dataclasses
import math

from qrag_jax.algorithms.policy_gradient import Clip
from qrag_jax.errors import InputError, check_above, check_known, check_least, check_share

OWN, NONE = CRITICS = ("own", "none")
REWARD, LOSS = KL_PLACES = ("reward", "loss")
_SECTION = "ppo"


@dataclasses.dataclass(frozen=True)
class TokenPPOConfig:
    """Section `ppo` of a token policy (Schulman et al., arXiv 1707.06347).

    The defaults are DeepRetrieval's (arXiv 2503.00223).
    """

    members: int = 1  # episodes of one question
    gamma: float = 1.0  # γ, discount from token to token
    lambda_: float = 1.0  # λ of the advantages (GAE); with γ = 1: the reward less the value
    clip_low: float = 0.2  # ε below 1
    clip_high: float = 0.2  # ε above 1
    value_clip: float = 0.5  # how far a value may move from the one before the update
    whiten: bool = True  # advantages of a batch have mean 0 and variance 1
    entropy: float = 0.001  # bonus on the entropy of the tokens, in nats
    kl: float = 0.001  # weight of the KL to the stage's first weights
    # Where it is: reward (k1, taken from each token's) or loss (k3, which is never below 0)
    kl_in: str = REWARD
    epochs: int = 1  # passes over one batch
    minibatches: int = 1  # parts of a batch, each with an optimizer step
    # What estimates the return: own (the policy's model again, trained as the policy is: adapters
    # of its own, or all weights), or none
    critic: str = OWN
    critic_learning_rate: float = 1e-5  # peak; warm-up and decay are those of the policy
    critic_warmup: int = 0  # first updates of the stage, in which only the critic learns
    sampler_cap: float = 2.0  # C, most that the weight π_old/q of a sampled token may be

    def __post_init__(self) -> None:
        least = {"members": 1, "epochs": 1, "minibatches": 1, "critic_warmup": 0}
        check_least(_SECTION, self, **least)
        check_known(_SECTION, self, "kl_in", KL_PLACES)
        check_known(_SECTION, self, "critic", CRITICS)
        check_share(_SECTION, self, "gamma", "lambda_")
        numbers = ("clip_low", "clip_high", "value_clip", "entropy", "kl")
        for name in numbers:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InputError(
                    f"config.{_SECTION}.{name} is {value}; it must be a finite number, 0 at least."
                )
        check_above(_SECTION, self, "critic_learning_rate")
        if not self.sampler_cap >= 1:
            raise InputError(
                f"config.{_SECTION}.sampler_cap is {self.sampler_cap}; it must be at least 1, the "
                "weight where sampler and learner agree."
            )
        if self.critic == NONE and self.critic_warmup:
            raise InputError(
                f"config.{_SECTION}.critic is {NONE!r}, and config.{_SECTION}.critic_warmup is "
                f"{self.critic_warmup}: nothing would learn; set it to 0."
            )

    @property
    def clip(self) -> Clip:
        """Bounds of the importance ratio."""
        return Clip(self.clip_low, self.clip_high)

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps that one batch gives."""
        return self.epochs * self.minibatches
