"""Constants of the algorithms: the sections of a config that say how a policy learns."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from qrag_jax.algorithms.policy_gradient import AGGREGATIONS, DR_GRPO, GRPO, Clip
from qrag_jax.errors import Count, InputError, Natural, Positive, Rule, Share, Weight, least, one_of
from qrag_jax.runtime.config_fields import internal

# ------------------------------------------------------------------------ two towers


@dataclasses.dataclass(frozen=True)
class PQNConfig:
    """Section `pqn`: constants of the update, with the paper's symbols.

    Attributes:
        alpha: α_0, temperature at the peak learning rate; that of section `policy`.
    """

    gamma: Share = 0.99  # γ, discount
    lambda_: Share = 0.5  # λ of the returns
    tau: Share = 0.02  # τ, share of the online towers in an update of the target towers
    learning_start: Natural = 200  # the first 2·learning_start environment steps act at random
    alpha: float = internal(0.05)


@dataclasses.dataclass(frozen=True)
class ImitateConfig:
    """Section `imitate`: a stage that learns from the supporting facts, before or without RL."""

    steps: Count = 150  # optimizer steps of the stage
    batch_size: Count = 8  # questions per optimizer step
    learning_rate: Positive = 5e-5  # peak; all else is as section optimizer says
    temperature: Weight = 0.0  # Q is divided by it; 0: policy.alpha, so that the policy is learned
    own_states: bool = False  # also learn in the states that the own greedy search reaches
    distractors: Natural = 0  # wrong passages of its document that a question sees, drawn; 0: all
    shared_by: Count = 1  # questions that see the passages of each other as wrong ones; 1: none
    # Weight of the same loss in stage pqn that follows, over all passages of the question: returns
    # alone unlearn the ranking
    pqn_weight: Weight = 1.0


# ------------------------------------------------------------------------ GRPO

# What a ratio is of: each token (GRPO), the whole row (GSPO, arXiv 2507.18071), each token as a
# constant weight of its log-probability's gradient (CISPO, arXiv 2506.13585).
TOKEN, SEQUENCE, CISPO = RATIOS = ("token", "sequence", "cispo")
ALL, BEST = LEARNED = ("all", "best")


@dataclasses.dataclass(frozen=True)
class _Passes:
    """What all have in common that learn from batches of episodes."""

    members: Count = 1  # episodes of one question
    epochs: Count = 1  # passes over one batch

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps that one batch gives."""
        return self.epochs * getattr(self, "minibatches", 1)


@dataclasses.dataclass(frozen=True)
class SFTConfig(_Passes):
    """Section `sft`: the policy imitates the sampled tokens of given episodes."""


@dataclasses.dataclass(frozen=True)
class _ByRewards(_Passes):
    """What GRPO and PPO have in common, over searches and over tokens."""

    clip_low: Weight = 0.2  # ε below 1
    clip_high: Weight = 0.2  # ε above 1

    @property
    def clip(self) -> Clip:
        """Bounds of the importance ratio."""
        return Clip(self.clip_low, self.clip_high)


@dataclasses.dataclass(frozen=True)
class GRPOConfig(_ByRewards):
    """Section `grpo` (Shao et al., arXiv 2402.03300; HARR, arXiv 2602.03645, eq. 10 to 12)."""

    members: Annotated[int, least(2)] = 8  # G, episodes of one question that are compared
    beta: Weight = 0.0  # β, of the KL (k3) to the stage's first weights, in the loss
    # of the losses of actions: grpo, bnpo, dr_grpo or dapo
    aggregation: Annotated[str, one_of(AGGREGATIONS)] = GRPO
    scaled: bool = True  # divide by the group's standard deviation; False: Dr. GRPO

    @property
    def kl_weight(self) -> float:
        """Of the KL in the loss."""
        return self.beta


@dataclasses.dataclass(frozen=True)
class SearchGRPOConfig(GRPOConfig):
    """Section `grpo` of a query encoder, whose actions are searches."""

    entropy: Weight = 0.0  # bonus on the entropy of the pool's softmax
    minibatches: Count = 1  # parts of a batch, each with an optimizer step


@dataclasses.dataclass(frozen=True)
class TokenGRPOConfig(GRPOConfig):
    """Section `grpo` of a token policy."""

    # of the losses of tokens: grpo, bnpo, dr_grpo or dapo
    aggregation: Annotated[str, one_of(AGGREGATIONS)] = DR_GRPO
    ratio: Annotated[str, one_of(RATIOS)] = TOKEN  # what a ratio is of: token, sequence or cispo
    scaled: bool = False  # divide by the group's standard deviation
    # Which episodes are learned from: all, by their advantages; or, to compare with, each group's
    # best one, which is imitated (RAFT, arXiv 2304.06767)
    learned: Annotated[str, one_of(LEARNED)] = ALL
    # C, most that the weight π_old/q of a sampled token may be; 1 where sampler and learner agree
    sampler_cap: Annotated[float, least(1)] = 2.0
    longest: Count = 1024  # most tokens that an episode samples, for dr_grpo


# ------------------------------------------------------------------------ PPO

OWN, NONE = CRITICS = ("own", "none")
REWARD, LOSS = KL_PLACES = ("reward", "loss")


@dataclasses.dataclass(frozen=True)
class PPOConfig(_ByRewards):
    """Section `ppo` (Schulman et al., arXiv 1707.06347), with HARR's constants."""

    gamma: Share = 1.0  # γ, discount
    lambda_: Share = 0.95  # λ of the advantages (GAE)
    value_clip: Weight = 0.2  # how far a value may move from the one before the update
    kl: Weight = 0.005  # of the KL (k1) to the first weights, taken from each search's reward
    entropy: Weight = 0.0  # bonus on the entropy of the pool's softmax
    whiten: bool = True  # advantages of a batch have mean 0 and variance 1
    minibatches: Count = 1  # parts of a batch, each with an optimizer step
    critic_learning_rate: Positive = 1e-4  # peak; warm-up and decay are those of the policy

    @property
    def kl_weight(self) -> float:
        """Of the KL in the loss."""
        return 0.0


@dataclasses.dataclass(frozen=True)
class TokenPPOConfig(PPOConfig):
    """Section `ppo` of a token policy.

    The defaults are DeepRetrieval's (arXiv 2503.00223).
    """

    lambda_: Share = 1.0  # λ of the advantages (GAE); with γ = 1: the reward less the value
    value_clip: Weight = 0.5  # how far a value may move from the one before the update
    entropy: Weight = 0.001  # bonus on the entropy of the tokens, in nats
    kl: Weight = 0.001  # weight of the KL to the stage's first weights
    # Where it is: reward (k1, taken from each token's) or loss (k3, which is never below 0)
    kl_in: Annotated[str, one_of(KL_PLACES)] = REWARD
    # What estimates the return: own (the policy's model again, trained as the policy is: adapters
    # of its own, or all weights), or none
    critic: Annotated[str, one_of(CRITICS)] = OWN
    critic_learning_rate: Positive = 1e-5  # peak; warm-up and decay are those of the policy
    critic_warmup: Natural = 0  # first updates of the stage, in which only the critic learns
    # C, most that the weight π_old/q of a sampled token may be; 1 where sampler and learner agree
    sampler_cap: Annotated[float, least(1)] = 2.0

    def __post_init__(self) -> None:
        if self.critic == NONE and self.critic_warmup:
            raise InputError(
                "config.ppo.critic_warmup is above 0, and config.ppo.critic is none; change one."
            )

    @property
    def kl_weight(self) -> float:
        """Of the KL in the loss."""
        return self.kl if self.kl_in == LOSS else 0.0


# ------------------------------------------------------------------------ pairs

IPO, DPO = PAIR_LOSSES = ("ipo", "dpo")
_SMOOTHING = Rule(lambda value: 0 <= value < 0.5, "it must be at least 0 and below 0.5")


@dataclasses.dataclass(frozen=True)
class PreferenceConfig:
    """Section `preference`: pairs of a better and a worse answer to one prompt."""

    members: ClassVar[int] = 2  # rows of a pair: the winner, then the loser
    updates_per_batch: ClassVar[int] = 1
    # ipo (arXiv 2310.12036) or dpo (arXiv 2305.18290)
    loss: Annotated[str, one_of(PAIR_LOSSES)] = IPO
    # β. Of ipo: the margin that is aimed at is 1/(2β) nats, 10 as LeReT has it; of dpo: how firmly
    # the policy is held to the reference
    beta: Positive = 0.05
    # The log-probability of a sequence is the mean over its tokens, as TRL has it for ipo; False:
    # their sum, as LeReT. β is for one of them: a mean is as many times smaller as there are tokens
    averaged: bool = False
    # ε of dpo, the share of pairs that are the wrong way round; ipo does not read it
    label_smoothing: Annotated[float, _SMOOTHING] = 0.0
