"""HARR's config: its sections, and the dataclass of settings that is read from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from ml_collections import ConfigDict

from qrag_jax.data.config import DataConfig
from qrag_jax.environments.episode import Limits
from qrag_jax.environments.rag import PATH
from qrag_jax.errors import InputError, check_known, check_least, check_share
from qrag_jax.evaluators.agents import BEST_BY
from qrag_jax.feedback.rag import LLM, RELEVANCE, Mixture
from qrag_jax.learners.config import PPOConfig, SearchGRPOConfig
from qrag_jax.learners.optimizers import OptimizerConfig
from qrag_jax.llm.config import ClientConfig, LlmConfig
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.policies.plackett_luce import PlackettLuceConfig
from qrag_jax.rollouts.agents import PlayConfig
from qrag_jax.runtime import own_code, saved_config
from qrag_jax.runtime.config_fields import refusing_types
from qrag_jax.runtime.mesh import RuntimeConfig
from qrag_jax.runtime.minilm import MINILM_OR_SCRATCH
from qrag_jax.runtime.train_config import LogConfig, TrainConfig
from qrag_jax.systems.config import COMMON, ConfigLayout, HalvedEvalConfig, sections_of

NAME = "harr"
GRPO, PPO = ALGORITHMS = ("grpo", "ppo")
SCRIPTED, REACT, SEARCH_R1, PLANNER = "scripted", "react", "search_r1", "planner"
OWN = "own"
AGENTS = (SCRIPTED, REACT, SEARCH_R1, PLANNER, OWN)
WITHOUT_MODEL = (SCRIPTED, OWN)  # agents that ask no language model of ours


@dataclasses.dataclass(frozen=True)
class StateConfig:
    """Section `state`: what the query encoder reads."""

    stateful: bool = True  # original question, history and query; False: the query alone
    instruction: bool = True  # a first line "Instruct: …", as Qwen3-Embedding was trained with
    max_tokens: int = 1024  # longest state; the oldest hops are left out first

    def __post_init__(self) -> None:
        check_least("state", self, max_tokens=16)


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """Section `agent`."""

    # scripted follows the data's own decompositions, without a model; react, search_r1 and planner
    # ask the language model of section llm; own is the generator of config.agent.path
    name: str = SCRIPTED
    max_hops: int = 5  # searches of an episode
    max_turns: int = 5  # search_r1: replies of the model, before the answer is forced
    # Folder with prompts of your own, named as ours in qrag_jax/llm/text/templates; "": ours
    prompts: str = ""
    # search_r1: the text around the first prompt, with {prompt}; "": the tokenizer's own template
    chat_template: str = ""
    # K: updates between playing a batch and learning from it; the agent may play meanwhile. 0: the
    # device waits, strictly on-policy
    staleness: int = 0
    max_broken_share: float = 0.5  # of a batch's episodes; above it the run pauses, and plays again
    attempts: int = 2  # an episode that breaks is played again, so often in all
    gather: float = 0.02  # seconds that a search waits for those of other episodes
    # own: FILE.py:FUNCTION of (question, max_searches), which yields searches and returns the
    # answer; it runs without a sandbox
    path: str = ""

    def __post_init__(self) -> None:
        check_known("agent", self, "name", AGENTS)
        if self.name == OWN:
            own_code.check_form(self.path, PATH)
        elif self.path:
            raise InputError(
                f"{PATH} is given, but config.agent.name is {self.name}; use {OWN}, or leave the "
                "path out."
            )
        check_least("agent", self, staleness=0)
        check_share("agent", self, "max_broken_share")
        Limits(max_hops=self.max_hops, max_turns=self.max_turns)
        PlayConfig(self.attempts, self.gather)

    @property
    def limits(self) -> Limits:
        """How long an episode may be."""
        return Limits(max_hops=self.max_hops, max_turns=self.max_turns)

    @property
    def play(self) -> PlayConfig:
        """How episodes are played."""
        return PlayConfig(self.attempts, self.gather)


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
    """Section `corpus`: what is searched."""

    # File or folder as `qrag index` reads it; "": the passages of all questions.
    path: str = ""


@dataclasses.dataclass(frozen=True)
class QuestionsConfig:
    """Section `questions`: which of the training questions are trained on."""

    kept: str = ""  # file of `qrag filter_data`, whose kept questions are trained on; "": all


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Section `reward`."""

    mixture: str = "f1=1"  # rewards and their weights: f1, em, sub_em, recall, llm, relevance, …

    def __post_init__(self) -> None:
        Mixture.of(self.mixture)

    @property
    def rewards(self) -> Mixture:
        """The mixture."""
        return Mixture.of(self.mixture)


@dataclasses.dataclass(frozen=True)
class RerankerConfig:
    """Section `reranker`: a running model server with `/rerank`, for the reward `relevance`."""

    url: str = ""  # such as http://127.0.0.1:8002/v1
    model: str = ""  # its name on the server
    api_key_env: str = ""  # environment variable that holds the server's API key; "": no key

    @property
    def client(self) -> ClientConfig:
        """Settings of its client."""
        return ClientConfig(
            self.url, self.model, api_key_env=self.api_key_env, prefix="config.reranker."
        )


@dataclasses.dataclass(frozen=True)
class AgentEvalConfig(HalvedEvalConfig):
    """Section `eval`."""

    BEST_BY: ClassVar[tuple[str, ...]] = BEST_BY
    path: str = ""  # data to evaluate on; "": the dev part of data.path
    samples: int = 500
    best_by: str = "f1"  # the score whose mean chooses the best checkpoint: f1, em or recall


FIELDS: dict[str, tuple[Any, str]] = {
    **COMMON,
    "algorithm": (GRPO, "what trains the policy: grpo or ppo"),
}
# Fields that do not change what a run computes: a resumed run may have other values.
FREE_FIELDS = (
    *saved_config.FREE_FIELDS,
    "data.cache",
    "agent.gather",
    "agent.max_broken_share",
    "reranker.",
)
# Of data whose digests are kept.
PATHS = ("data.path", "eval.path", "corpus.path", "questions.kept")


@dataclasses.dataclass(frozen=True)
class HarrConfig:
    """The settings of a config, one dataclass for each section."""

    seed: int
    profile: int
    algorithm: SearchGRPOConfig | PPOConfig
    encoder: EncoderConfig
    state: StateConfig
    policy: PlackettLuceConfig
    agent: AgentConfig
    corpus: CorpusConfig
    questions: QuestionsConfig
    reward: RewardConfig
    reranker: RerankerConfig
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    eval: AgentEvalConfig
    runtime: RuntimeConfig
    log: LogConfig
    # Of the agent's language model, and of the reward `llm`; None if nothing asks it
    llm: LlmConfig | None = None

    @classmethod
    @refusing_types("the config")
    def of(cls, config: ConfigDict) -> HarrConfig:
        """Reads the settings of a config."""
        name = config.algorithm
        if name not in ALGORITHMS:
            raise InputError(f"config.algorithm is {name!r}; use {' or '.join(ALGORITHMS)}.")
        parts = LAYOUT.parts(config)
        algorithm = {each: parts.pop(each) for each in ALGORITHMS}[name]
        train = parts["train"]
        if train.batch_size * algorithm.members % algorithm.minibatches:
            raise InputError(
                f"config.train.batch_size × config.{name}.members is "
                f"{train.batch_size * algorithm.members} episodes, which do not split into "
                f"config.{name}.minibatches = {algorithm.minibatches} equal parts."
            )
        if RELEVANCE in parts["reward"].rewards.weights:
            parts["reranker"].client.api_key()  # checks the fields
        updates = train.steps * algorithm.epochs * algorithm.minibatches
        parts["optimizer"] = dataclasses.replace(parts["optimizer"], total_steps=updates)
        parts["algorithm"] = algorithm
        return cls(llm=_llm(config, parts["agent"], parts["reward"].rewards), **parts)

    @property
    def dev_data(self) -> DataConfig:
        """The data of evaluations: those of `eval.path`; else the same object as `data`."""
        return self.data.at(self.eval.path) if self.eval.path else self.data

    @property
    def episodes(self) -> int:
        """Episodes of one batch, on all hosts."""
        return self.train.batch_size * self.algorithm.members


LAYOUT = ConfigLayout(
    NAME,
    FIELDS,
    sections_of(HarrConfig) | {GRPO: SearchGRPOConfig, PPO: PPOConfig},
    LlmConfig,
    has_data=True,
    blocks="encoder.block_tokens",
)
load_config, help_lines = LAYOUT.load, LAYOUT.help_lines


def _llm(config: ConfigDict, agent: AgentConfig, rewards: Mixture) -> LlmConfig | None:
    """The section `llm`, if the agent or a reward asks its model."""
    if LLM not in rewards.weights and agent.name in WITHOUT_MODEL:
        return None
    if not config.llm.url and not config.llm.server.model:
        asks = f"agent.name is {agent.name}"
        if agent.name in WITHOUT_MODEL:
            asks = f"reward.mixture has {LLM}"
        raise InputError(
            f"config.{asks}, which needs a language model; give config.llm.url and "
            "config.llm.model of a server that runs, or config.llm.server.model to start one."
        )
    return LAYOUT.llm_settings(config)


def unread(fields: Mapping[str, Any]) -> list[str]:
    """Sections that a run with these values does not read."""
    rewards = Mixture.of(fields["reward.mixture"]).weights
    by_model = LLM in rewards or fields["agent.name"] not in WITHOUT_MODEL
    read = {
        GRPO: fields["algorithm"] == GRPO,
        PPO: fields["algorithm"] == PPO,
        "encoder.scratch": fields["encoder.path"] in ("", MINILM_OR_SCRATCH),
        "data.columns": False,
        "llm": by_model,
        "llm.server": by_model and not fields["llm.url"],
        "reranker": RELEVANCE in rewards,
    }
    return [name for name, is_read in read.items() if not is_read]


def default_config(algorithm: str, *sources: str, agent: str = SCRIPTED) -> ConfigDict:
    """HARR's settings (arXiv 2602.03645) on these data sources."""
    config = LAYOUT.default(*sources)
    config.update(algorithm=algorithm)
    config.agent.name = agent
    config.encoder.path = "Qwen/Qwen3-Embedding-0.6B"
    config.encoder.update(pooling="last", normalise=True, scale=1.0)
    config.encoder.lora.update(rank=32, alpha=64.0, dropout=0.0)
    config.train.update(steps=100, batch_size=16, eval_every=50, log_every=1)
    config.optimizer.update(
        learning_rate=1e-5, weight_decay=0.0, beta2=0.999, eps=1e-8, clip_norm=1.0
    )
    config.optimizer.update(schedule="constant", warmup_steps=0)
    return config


def with_scratch(config: ConfigDict, **sizes: Any) -> ConfigDict:
    """The config for an encoder from scratch, which is trained whole."""
    config.encoder.path = ""
    config.encoder.lora.rank = 0
    config.encoder.scratch.update(**sizes)
    return config
