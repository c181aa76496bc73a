"""Constants of the algorithms: the sections of a config that say how a policy learns."""

from __future__ import annotations

import dataclasses
import math

from qrag_jax.algorithms.policy_gradient import AGGREGATIONS, DR_GRPO, GRPO, Clip
from qrag_jax.errors import InputError, check_above, check_known, check_least, check_share
from qrag_jax.runtime.config_fields import internal

# ------------------------------------------------------------------------ two towers


@dataclasses.dataclass(frozen=True)
class PQNConfig:
    """Section `pqn`: constants of the update, with the paper's symbols.

    Attributes:
        alpha: α_0, temperature at the peak learning rate; that of section `policy`.
    """

    gamma: float = 0.99  # γ, discount
    lambda_: float = 0.5  # λ of the returns
    tau: float = 0.02  # τ, share of the online towers in an update of the target towers
    learning_start: int = 200  # the first 2·learning_start environment steps act at random
    alpha: float = internal(0.05)

    def __post_init__(self) -> None:
        check_least("pqn", self, learning_start=0)
        check_share("pqn", self, "gamma", "lambda_", "tau")


@dataclasses.dataclass(frozen=True)
class ImitateConfig:
    """Section `imitate`: a stage that learns from the supporting facts, before or without RL."""

    steps: int = 150  # optimizer steps of the stage
    batch_size: int = 8  # questions per optimizer step
    learning_rate: float = 5e-5  # peak; all else is as section optimizer says
    temperature: float = 0.0  # Q is divided by it; 0: policy.alpha, so that the policy is learned
    # weight of ½(2q_1 - G)² + ½(2q_2 - G)² on the facts' own path, so that Q means returns, as PQN
    # needs it; 0: Q is known but for a constant of each state
    returns: float = 0.0
    own_states: bool = False  # also learn in the states that the own greedy search reaches
    shared_by: int = 1  # questions that see the passages of each other as wrong ones; 1: none

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch_size": 1, "temperature": 0, "returns": 0, "shared_by": 1}
        check_least("imitate", self, **least)
        check_above("imitate", self, "learning_rate")


# ------------------------------------------------------------------------ GRPO

# What a ratio is of: each token (GRPO), the whole row (GSPO, arXiv 2507.18071), each token as a
# constant weight of its log-probability's gradient (CISPO, arXiv 2506.13585).
TOKEN, SEQUENCE, CISPO = RATIOS = ("token", "sequence", "cispo")
ALL, BEST = LEARNED = ("all", "best")


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """Section `sft`: the policy imitates the sampled tokens of given episodes."""

    members: int = 1  # episodes of one question
    epochs: int = 1  # updates from one batch

    def __post_init__(self) -> None:
        check_least("sft", self, members=1, epochs=1)

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps that one batch gives."""
        return self.epochs


@dataclasses.dataclass(frozen=True)
class _ByRewards:
    """What GRPO and PPO have in common, over searches and over tokens."""

    members: int = 1  # episodes of one question
    clip_low: float = 0.2  # ε below 1
    clip_high: float = 0.2  # ε above 1
    epochs: int = 1  # passes over one batch

    @property
    def clip(self) -> Clip:
        """Bounds of the importance ratio."""
        return Clip(self.clip_low, self.clip_high)

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps that one batch gives."""
        return self.epochs * getattr(self, "minibatches", 1)

    def _check(self, section: str, *numbers: str, **least: int) -> None:
        """Refuses wrong fields of all algorithms: numbers from 0 on, and those that count."""
        check_least(section, self, epochs=1, **least)
        for name in ("clip_low", "clip_high", *numbers):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InputError(
                    f"config.{section}.{name} is {value}; it must be a finite number, 0 at least."
                )


@dataclasses.dataclass(frozen=True)
class GRPOConfig(_ByRewards):
    """Section `grpo` (Shao et al., arXiv 2402.03300; HARR, arXiv 2602.03645, eq. 10 to 12)."""

    members: int = 8  # G, episodes of one question that are compared
    beta: float = 0.0  # β, of the KL (k3) to the stage's first weights, in the loss
    aggregation: str = GRPO  # of the losses of actions: grpo, bnpo, dr_grpo or dapo
    scaled: bool = True  # divide by the group's standard deviation; False: Dr. GRPO

    def __post_init__(self) -> None:
        self._check("grpo", "beta", members=2)
        check_known("grpo", self, "aggregation", AGGREGATIONS)

    @property
    def kl_weight(self) -> float:
        """Of the KL in the loss."""
        return self.beta


@dataclasses.dataclass(frozen=True)
class SearchGRPOConfig(GRPOConfig):
    """Section `grpo` of a query encoder, whose actions are searches."""

    entropy: float = 0.0  # bonus on the entropy of the pool's softmax
    minibatches: int = 1  # parts of a batch, each with an optimizer step

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("grpo", "entropy", minibatches=1)


@dataclasses.dataclass(frozen=True)
class TokenGRPOConfig(GRPOConfig):
    """Section `grpo` of a token policy."""

    aggregation: str = DR_GRPO  # of the losses of tokens: grpo, bnpo, dr_grpo or dapo
    ratio: str = TOKEN  # what a ratio is of: token, sequence or cispo
    scaled: bool = False  # divide by the group's standard deviation
    # Which episodes are learned from: all, by their advantages; or, to compare with, each group's
    # best one, which is imitated (RAFT, arXiv 2304.06767)
    learned: str = ALL
    sampler_cap: float = 2.0  # C, most that the weight π_old/q of a sampled token may be
    longest: int = 1024  # most tokens that an episode samples, for dr_grpo

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("grpo", longest=1, sampler_cap=1)
        check_known("grpo", self, "ratio", RATIOS)
        check_known("grpo", self, "learned", LEARNED)


# ------------------------------------------------------------------------ PPO

OWN, NONE = CRITICS = ("own", "none")
REWARD, LOSS = KL_PLACES = ("reward", "loss")


@dataclasses.dataclass(frozen=True)
class PPOConfig(_ByRewards):
    """Section `ppo` (Schulman et al., arXiv 1707.06347), with HARR's constants."""

    gamma: float = 1.0  # γ, discount
    lambda_: float = 0.95  # λ of the advantages (GAE)
    value_clip: float = 0.2  # how far a value may move from the one before the update
    kl: float = 0.005  # of the KL (k1) to the first weights, taken from each search's reward
    entropy: float = 0.0  # bonus on the entropy of the pool's softmax
    whiten: bool = True  # advantages of a batch have mean 0 and variance 1
    minibatches: int = 1  # parts of a batch, each with an optimizer step
    critic_learning_rate: float = 1e-4  # peak; warm-up and decay are those of the policy

    def __post_init__(self) -> None:
        self._check("ppo", "value_clip", "kl", "entropy", members=1, minibatches=1)
        check_share("ppo", self, "gamma", "lambda_")
        check_above("ppo", self, "critic_learning_rate")

    @property
    def kl_weight(self) -> float:
        """Of the KL in the loss."""
        return 0.0


@dataclasses.dataclass(frozen=True)
class TokenPPOConfig(PPOConfig):
    """Section `ppo` of a token policy.

    The defaults are DeepRetrieval's (arXiv 2503.00223).
    """

    gamma: float = 1.0  # γ, discount from token to token
    lambda_: float = 1.0  # λ of the advantages (GAE); with γ = 1: the reward less the value
    value_clip: float = 0.5  # how far a value may move from the one before the update
    entropy: float = 0.001  # bonus on the entropy of the tokens, in nats
    kl: float = 0.001  # weight of the KL to the stage's first weights
    # Where it is: reward (k1, taken from each token's) or loss (k3, which is never below 0)
    kl_in: str = REWARD
    # What estimates the return: own (the policy's model again, trained as the policy is: adapters
    # of its own, or all weights), or none
    critic: str = OWN
    critic_learning_rate: float = 1e-5  # peak; warm-up and decay are those of the policy
    critic_warmup: int = 0  # first updates of the stage, in which only the critic learns
    sampler_cap: float = 2.0  # C, most that the weight π_old/q of a sampled token may be

    def __post_init__(self) -> None:
        super().__post_init__()
        # A cap of 1 is the weight where sampler and learner agree.
        check_least("ppo", self, critic_warmup=0, sampler_cap=1)
        check_known("ppo", self, "kl_in", KL_PLACES)
        check_known("ppo", self, "critic", CRITICS)
        if self.critic == NONE and self.critic_warmup:
            raise InputError(
                f"config.ppo.critic is {NONE!r}, and config.ppo.critic_warmup is "
                f"{self.critic_warmup}: nothing would learn; set it to 0."
            )

    @property
    def kl_weight(self) -> float:
        """Of the KL in the loss."""
        return self.kl if self.kl_in == LOSS else 0.0


# ------------------------------------------------------------------------ pairs

IPO, DPO = PAIR_LOSSES = ("ipo", "dpo")


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
        check_known("preference", self, "loss", PAIR_LOSSES)
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
