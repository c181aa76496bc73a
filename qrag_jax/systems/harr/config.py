"""HARR's config: its sections, and what follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from qrag_jax.data.loading import DataConfig
from qrag_jax.environments import rag
from qrag_jax.errors import Count, Natural, Share, least, one_of
from qrag_jax.feedback.rag import LLM, RELEVANCE, Mixture
from qrag_jax.learners.config import PPOConfig, SearchGRPOConfig
from qrag_jax.llm.config import LlmConfig, RerankerConfig
from qrag_jax.models.first_encoder import EncoderConfig
from qrag_jax.policies.plackett_luce import PlackettLuceConfig
from qrag_jax.runtime import own_code, pretrained_files
from qrag_jax.systems.config import HalvedEvalConfig, SystemConfig, refuse
from qrag_jax.systems.search import BY_VECTORS, SearchConfig, of_corpus, unread

BEST_BY = ("f1", "em", "recall")
GRPO, PPO = ALGORITHMS = ("grpo", "ppo")
SCRIPTED, REACT, SEARCH_R1, PLANNER = "scripted", "react", "search_r1", "planner"
OWN = "own"
AGENTS = (SCRIPTED, REACT, SEARCH_R1, PLANNER, OWN)
WITHOUT_MODEL = (SCRIPTED, OWN)  # agents that ask no language model of ours


@dataclasses.dataclass(frozen=True)
class StateConfig:
    stateful: bool = True  # original question, history and query; False: the query alone
    instruction: bool = True  # a first line "Instruct: …", as Qwen3-Embedding was trained with
    # longest state; the oldest hops are left out first
    max_tokens: Annotated[int, least(16)] = 1024


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    # scripted follows the data's own decompositions, without a model; react, search_r1 and planner
    # ask the language model of section llm; own is the generator of config.agent.path
    name: Annotated[str, one_of(AGENTS)] = SCRIPTED
    max_hops: Count = 5  # searches of an episode
    max_turns: Count = 5  # search_r1: replies of the model, before the answer is forced
    # Folder with prompts of your own, named as ours in qrag_jax/llm/text/templates; "": ours
    prompts: str = ""
    # K: updates between playing a batch and learning from it; the agent may play meanwhile. 0: the
    # device waits, strictly on-policy
    staleness: Natural = 0
    max_broken_share: Share = 0.5  # of a batch's episodes; above it the run pauses, and plays again
    attempts: Count = 2  # an episode that breaks is played again, so often in all
    # own: FILE.py:FUNCTION of (question, max_searches), which yields searches and returns the
    # answer; it runs without a sandbox
    path: str = ""

    def __post_init__(self) -> None:
        if self.name == OWN:
            own_code.check_form(self.path, rag.PATH)


@dataclasses.dataclass(frozen=True)
class QuestionsConfig:
    kept: str = ""  # file of `qrag filter_data`, whose kept questions are trained on; "": all


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    mixture: str = "f1=1"  # rewards and their weights: f1, em, sub_em, recall, llm, relevance, …

    def __post_init__(self) -> None:
        Mixture.of(self.mixture)

    @property
    def rewards(self) -> Mixture:
        return Mixture.of(self.mixture)


@dataclasses.dataclass(frozen=True)
class AgentEvalConfig(HalvedEvalConfig):
    path: str = ""  # data to evaluate on; "": the dev part of data.path
    samples: Natural = 500  # fixed questions scored during training, 0: all
    # the score whose mean chooses the best checkpoint: f1, em or recall
    best_by: Annotated[str, one_of(BEST_BY)] = "f1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HarrConfig(SystemConfig):
    NAME: ClassVar[str] = "harr"
    COMMANDS: ClassVar[tuple[str, ...]] = ("filter_data",)
    UNTRAINED: ClassVar[tuple[str, ...]] = COMMANDS
    FLAGS: ClassVar[tuple[str, ...]] = ("sampled",)
    FREE_FIELDS: ClassVar[tuple[str, ...]] = (
        *("data.cache", "agent.max_broken_share", "reranker."),
    )
    PATHS: ClassVar[tuple[str, ...]] = (
        *("data.path", "eval.path", "search.index", "search.corpus", "questions.kept"),
    )
    algorithm: Annotated[str, one_of(ALGORITHMS)] = GRPO  # what trains the policy: grpo or ppo
    grpo: SearchGRPOConfig
    ppo: PPOConfig
    encoder: EncoderConfig
    state: StateConfig
    policy: PlackettLuceConfig
    agent: AgentConfig
    search: SearchConfig  # an index is one by the encoder that the run starts from
    questions: QuestionsConfig
    reward: RewardConfig
    reranker: RerankerConfig
    data: DataConfig
    eval: AgentEvalConfig
    # Of the agent's language model, and of the reward `llm`; None if nothing asks it
    llm: LlmConfig | None

    def settled(self) -> HarrConfig:
        rule, rewards = self.rule, self.reward.rewards.weights
        vectors = f"but a query encoder compares vectors; use one of {', '.join(BY_VECTORS)}"
        parts = f"no divisor of the {self.episodes} episodes of config.train.batch_size questions"
        refuse(
            self,
            (self.episodes % rule.minibatches, f"{self.algorithm}.minibatches", parts),
            *of_corpus(self.search),
            (self.search.engine not in BY_VECTORS, "search.engine", vectors),
        )
        if RELEVANCE in rewards:
            self.reranker.client.api_key()  # checks the fields
        asks = ""
        if LLM in rewards:
            asks = f"config.reward.mixture has {LLM}, which"
        if self.agent.name not in WITHOUT_MODEL:
            asks = f"config.agent.name is {self.agent.name}, which"
        updates = self.train.steps * rule.epochs * rule.minibatches
        return dataclasses.replace(
            self,
            optimizer=dataclasses.replace(self.optimizer, total_steps=updates),
            llm=self.llm.asked(asks) if self.llm and asks else None,
        )

    @property
    def rule(self) -> SearchGRPOConfig | PPOConfig:
        return self.grpo if self.algorithm == GRPO else self.ppo

    @property
    def dev_data(self) -> DataConfig:
        """The data of evaluations: those of `eval.path`; else the same object as `data`."""
        return self.data.at(self.eval.path) if self.eval.path else self.data

    @property
    def episodes(self) -> int:
        return self.train.batch_size * self.rule.members

    @classmethod
    def unread(cls, fields: Mapping[str, Any]) -> list[str]:
        rewards = Mixture.of(fields["reward.mixture"]).weights
        by_model = LLM in rewards or fields["agent.name"] not in WITHOUT_MODEL
        read = {
            GRPO: fields["algorithm"] == GRPO,
            PPO: fields["algorithm"] == PPO,
            "agent.path": fields["agent.name"] == OWN,
            "encoder.scratch": fields["encoder.path"] in ("", pretrained_files.MINILM_OR_SCRATCH),
            "data.columns": False,
            "train.accumulation": False,  # a step is computed in blocks of encoder.block_tokens
            "llm": by_model,
            "llm.server": by_model and not fields["llm.url"],
            "reranker": RELEVANCE in rewards,
        }
        lacking = [name for name, is_read in read.items() if not is_read]
        return [*lacking, *unread("index", "corpus", "engine", "dtype")]


CONFIG = HarrConfig
