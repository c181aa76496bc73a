"""DeepRetrieval's config: its sections, and the dataclass of settings that is read from them."""

from __future__ import annotations

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from qrag_jax.data.scripted import BLOCK
from qrag_jax.environments.demonstrations import RewriteStylesConfig
from qrag_jax.environments.queries import PromptKind, prompt_kind
from qrag_jax.errors import InputError, check_known, check_least, check_share
from qrag_jax.feedback.rewrite import GuardsConfig, RewriteRewardConfig
from qrag_jax.learners.config import TokenGRPOConfig, TokenPPOConfig
from qrag_jax.metrics.ranking import cut_of
from qrag_jax.retrieval.opening import BOOLEAN
from qrag_jax.retrieval.pubmed import RemoteEngineConfig
from qrag_jax.rollouts.trajectories import SCORED, TREATMENTS
from qrag_jax.runtime import saved_config
from qrag_jax.runtime.config_fields import internal, refusing_types
from qrag_jax.systems import token_config
from qrag_jax.systems.config import COMMON, check_stages, sections_of
from qrag_jax.systems.search import REMOTE, RewriteSearchConfig
from qrag_jax.systems.token_config import ScriptConfig, TokenConfig, settle_stages

NAME = "deepretrieval"
TALKATIVE = "talkative"  # in place of data: queries that are made here
SCRIPT, RL = STAGES = ("script", "rl")
PPO, GRPO = ALGORITHMS = ("ppo", "grpo")


@dataclasses.dataclass(frozen=True)
class QueriesConfig:
    """Section `queries`: what is rewritten."""

    # Training queries: "talkative", made here; or parts of data, path,split;path,split: folders in
    # BEIR's layout, each with a corpus of its own, or files of rows, which search `search.corpus`
    train: str = TALKATIVE
    dev: str = ""  # queries that choose the best checkpoint, likewise; "": some of the training's
    test: str = TALKATIVE  # queries that `evaluate` scores, likewise; training never sees them
    held_out: int = 100  # training queries that choose the best checkpoint where dev is ""
    most: int = 0  # training queries, the first ones; 0: all
    made_train: int = 600  # number of training queries that are made
    made_test: int = 300  # number of test queries that are made
    made_seed: int = 0  # of these
    made_corpus: int = 1600  # the passages of so many training questions are searched
    clauses: int = 2  # about somebody else, in each query that is made

    def __post_init__(self) -> None:
        least = {"held_out": 1, "most": 0, "made_train": 1, "made_test": 1, "made_seed": 0}
        check_least("queries", self, **least, made_corpus=self.made_train)
        for name in ("train", "test"):
            if not getattr(self, name):
                raise InputError(
                    f"config.queries.{name} is empty; use {TALKATIVE!r}, or name parts of data as "
                    "path,split."
                )
        if self.made_corpus % BLOCK:
            raise InputError(
                f"config.queries.made_corpus is {self.made_corpus}; it must be a multiple of "
                f"{BLOCK}, within which queries mention one another's persons."
            )
        if self.clauses not in range(1, 5):
            raise InputError(f"config.queries.clauses is {self.clauses}; use 1 to 4.")


@dataclasses.dataclass(frozen=True)
class WritingConfig:
    """Section `writing`: how a query is asked for."""

    # rewrite_pico, rewrite_bm25, rewrite_boolean, rewrite_dense, rewrite_plain or bare_rewrite
    # (nothing but the query); or a file .txt of your own
    prompt: str = "bare_rewrite"
    form: str = ""  # of the output, for your own file: tagged (think, answer, JSON) or bare
    boolean: bool = False  # your own file asks for Boolean queries
    query_tokens: int = 256  # tokens that an output may have, its thinking included

    def __post_init__(self) -> None:
        check_least("writing", self, query_tokens=2)
        self.kind  # noqa: B018 – refused here, before anything is read

    @property
    def kind(self) -> PromptKind:
        """What the prompt asks for."""
        return prompt_kind(self.prompt, self.form, boolean=self.boolean)


ANY, FREQUENT, RARE = KINDS = ("any", "frequent", "rare")


@dataclasses.dataclass(frozen=True)
class DroppedConfig:
    """Section `dropped`: demonstrations for data: sentences of the corpora, with words left out."""

    # What a demonstration leaves out, one of these drawn for each: any words, frequent ones alone,
    # or rare ones alone
    kinds: tuple[str, ...] = (ANY,)
    share: float = 0.25  # probability with which any word is left out
    frequent_share: float = 0.9  # a frequent word, of the kind frequent
    rare_share: float = 0.25  # another word, of the kind rare
    frequent_from: float = 0.1  # a word is frequent that more than this share of the texts have
    least_words: int = 4  # of a demonstration
    most_words: int = 30
    # Of single sentences, of two neighbours, and so on up to so many. Long queries need long ones
    together: int = 1

    def __post_init__(self) -> None:
        check_least("dropped", self, least_words=1, most_words=self.least_words, together=1)
        if not self.kinds or not {*self.kinds} <= {*KINDS}:
            raise InputError(
                f"config.dropped.kinds is {self.kinds}; name some of {', '.join(KINDS)}."
            )
        check_share("dropped", self, "share", "frequent_share", "rare_share", "frequent_from")


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Section `rollout`: how episodes are played."""

    attempts: int = 2  # an episode that fails is played again, so often in all
    max_failed_share: float = 0.5  # of a batch's episodes; above it the run pauses, and plays again
    # An output that was cut off: masked (it trains nothing) or scored as it is
    truncated: str = SCORED
    # K: updates between playing a batch and learning from it. 0: strictly on-policy
    staleness: int = 0
    # Tokens that an output may have in learning; 0: as many as in evaluation. One that never ends
    # makes its whole batch slow
    query_tokens: int = 0

    def __post_init__(self) -> None:
        check_least("rollout", self, attempts=1, staleness=0, query_tokens=0)
        check_known("rollout", self, "truncated", TREATMENTS)
        check_share("rollout", self, "max_failed_share")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Section `eval`."""

    samples: int = 300  # fixed queries scored during training, 0: all
    greedy: bool = True  # the likeliest tokens; False: sampled as in training
    # Of rankings, as metrics/ranking.py has them; their K is not the K of the reward
    measures: tuple[str, ...] = ("ndcg@10", "recall@100", "rr@10")
    best_by: str = "ndcg@10"  # the measure that chooses the best checkpoint
    seed: int = 42  # draws the scored queries

    def __post_init__(self) -> None:
        check_least("eval", self, samples=0)
        if not self.measures:
            raise InputError("config.eval.measures is empty; name one, such as ndcg@10.")
        for name in self.measures:
            try:
                cut_of(name)
            except InputError as error:
                raise InputError(f"config.eval.measures: {error}") from None
        check_known("eval", self, "best_by", self.measures)

    @property
    def depth(self) -> int:
        """Documents of a ranking that the measures need; 1000 without a cut, as in TREC."""
        return max(cut_of(measure) or 1000 for measure in self.measures)


FIELDS: dict[str, tuple[Any, str]] = {
    **COMMON,
    "stages": (
        STAGES,
        "script: imitate scripted rewritings; then rl: learn from what queries find; or one of "
        "them",
    ),
    "algorithm": (PPO, "of the stage rl: ppo, with a critic, or grpo, with groups"),
}
# Fields that do not change what a run computes: a resumed run may have other values.
FREE_FIELDS = (
    *saved_config.FREE_FIELDS,
    "rollout.max_failed_share",
    "queries.test",
    "engine.",
    "guards.",
)
# Of data whose digests are kept.
PATHS = ("queries.train", "queries.dev", "search.corpus", "model.path")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewriteConfig(TokenConfig):
    """The settings of a config, one dataclass for each section."""

    algorithm: str
    queries: QueriesConfig
    search: RewriteSearchConfig
    engine: RemoteEngineConfig
    writing: WritingConfig
    reward: RewriteRewardConfig
    guards: GuardsConfig
    rollout: RolloutConfig
    styles: RewriteStylesConfig
    dropped: DroppedConfig
    script: ScriptConfig
    ppo: TokenPPOConfig
    grpo: TokenGRPOConfig
    eval: EvalConfig
    first_steps: int = internal(0)

    @classmethod
    @refusing_types("the config")
    def of(cls, config: ConfigDict) -> RewriteConfig:
        """Reads the settings of a config."""
        parts = LAYOUT.parts(config)
        stages = parts["stages"]
        check_stages(stages, STAGES)
        if config.algorithm not in ALGORITHMS:
            raise InputError(
                f"config.algorithm is {config.algorithm!r}; use {' or '.join(ALGORITHMS)}."
            )
        if SCRIPT in stages and parts["search"].engine == REMOTE:
            raise InputError(
                f"config.stages has {SCRIPT}, whose demonstrations are of texts that are searched, "
                f"and config.search.engine {REMOTE!r} gives ids alone; set config.stages to {RL}."
            )
        if parts["search"].engine == REMOTE:
            most, needed = parts["engine"].most, max(parts["reward"].k, parts["eval"].depth)
            if needed > most:  # the service would cut rankings without a word
                raise InputError(
                    f"config.reward.k and config.eval.measures need {needed} documents of a "
                    f"search, which gives {most} at most (config.engine.most); lower the former, "
                    "or raise the latter."
                )
        rule = parts[config.algorithm]
        if RL in stages:
            _check_learning(config.algorithm, parts)
        per_batch = rule.updates_per_batch if config.algorithm == PPO else rule.epochs
        stale = parts["rollout"].staleness
        first = settle_stages(config, parts, SCRIPT, RL, per_batch=per_batch, stale=stale)
        return cls(first_steps=first, **parts)

    @property
    def rule(self) -> TokenPPOConfig | TokenGRPOConfig:
        """The constants of the algorithm."""
        return self.ppo if self.algorithm == PPO else self.grpo

    @property
    def learned_tokens(self) -> int:
        """Tokens that an output may have in learning."""
        most = self.writing.query_tokens
        return min(self.rollout.query_tokens or most, most)

    @property
    def groups(self) -> int:
        """Queries of a batch of the stage `rl`, each with the algorithm's `members`."""
        return self.train.batch_size // self.rule.members


LAYOUT = token_config.layout(NAME, FIELDS, sections_of(RewriteConfig))
load_config, help_lines, unread = LAYOUT.load, LAYOUT.help_lines, token_config.unread


def _check_learning(algorithm: str, parts: dict[str, Any]) -> None:
    """Refuses sections that do not go together in the stage `rl`."""
    rule, batch = parts[algorithm], parts["train"].batch_size
    writing, guards, reward = parts["writing"], parts["guards"], parts["reward"]
    if batch % rule.members:
        raise InputError(
            f"config.train.batch_size is {batch} episodes, which are no groups of "
            f"config.{algorithm}.members, {rule.members}; use a multiple of it."
        )
    if algorithm == PPO and (batch < rule.minibatches or batch % rule.minibatches):
        raise InputError(
            f"config.ppo.minibatches is {rule.minibatches}, which does not divide the "
            f"{batch} episodes of config.train.batch_size; use a divisor of it."
        )
    most = min(parts["rollout"].query_tokens or writing.query_tokens, writing.query_tokens)
    if algorithm == GRPO and rule.longest < most:
        raise InputError(
            f"config.grpo.longest is {rule.longest}, less than an output may have in learning, "
            f"{most} tokens; raise it."
        )
    weight = rule.kl if algorithm == PPO else rule.beta
    if guards.max_kl and not weight:
        field = "ppo.kl" if algorithm == PPO else "grpo.beta"
        raise InputError(
            f"config.guards.max_kl is {guards.max_kl}, and no KL is measured, because "
            f"config.{field} is 0; set that above 0, such as 0.001, or the limit to 0."
        )
    remote = parts["search"].engine == REMOTE
    executed = remote or parts["search"].engine == BOOLEAN
    if writing.kind.boolean and not executed:
        raise InputError(
            f"config.writing.prompt {writing.prompt} asks for Boolean queries, and "
            f"config.search.engine {parts['search'].engine} reads them as words; use "
            f"{BOOLEAN!r} or {REMOTE!r}, or another prompt."
        )
    if remote and (reward.reading_cost or reward.measure == "answer_rank"):
        raise InputError(
            "config.reward.reading_cost and config.reward.measure 'answer_rank' read documents, "
            f"and config.search.engine {REMOTE!r} gives ids alone; set the cost to 0 and use ndcg, "
            "recall or rr."
        )


def default_config() -> ConfigDict:
    """DeepRetrieval's settings (arXiv 2503.00223) on queries made here."""
    config = token_config.default_config(LAYOUT)
    config.train.update(steps=200, batch_size=64)
    config.train.update(eval_every=50, checkpoint_every=50, log_every=5)
    config.optimizer.update(learning_rate=1e-6, weight_decay=0.0, beta1=0.9, beta2=0.999, eps=1e-8)
    config.optimizer.update(clip_norm=1.0, schedule="constant", warmup_steps=0)
    return config
