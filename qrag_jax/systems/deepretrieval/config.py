"""DeepRetrieval's config: its sections, and what follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from ml_collections import ConfigDict

from qrag_jax.data.sample import BLOCK
from qrag_jax.environments.queries import PromptKind, prompt_kind
from qrag_jax.errors import Count, Filled, Natural, Share, least, one_of, some_of, within
from qrag_jax.feedback.rewrite import ANSWER_RANK, GuardsConfig, RewriteRewardConfig
from qrag_jax.learners.config import TokenGRPOConfig, TokenPPOConfig
from qrag_jax.metrics.ranking import NAMED, cut_of
from qrag_jax.retrieval.index_folder import BOOLEAN
from qrag_jax.retrieval.pubmed import RemoteEngineConfig
from qrag_jax.runtime.config_fields import internal
from qrag_jax.systems.config import ALL, HalvedEvalConfig, refuse
from qrag_jax.systems.search import REMOTE, SearchConfig, of_corpus
from qrag_jax.systems.token_config import PlayedConfig, ScriptConfig, TokenConfig

TALKATIVE = "talkative"  # in place of data: queries that are made here
SCRIPT, RL = STAGES = ("script", "rl")
PPO, GRPO = ALGORITHMS = ("ppo", "grpo")


@dataclasses.dataclass(frozen=True)
class QueriesConfig:
    # Training queries: "talkative", made here; or parts of data, path,split;path,split: folders in
    # BEIR's layout, each with a corpus of its own, or files of rows, which search `search.corpus`
    train: Filled = TALKATIVE
    dev: str = ""  # queries that choose the best checkpoint, likewise; "": some of the training's
    test: Filled = TALKATIVE  # queries that `evaluate` scores, likewise; training never sees them
    held_out: Count = 100  # training queries that choose the best checkpoint where dev is ""
    most: Natural = 0  # training queries, the first ones; 0: all
    made_train: Count = 600  # number of training queries that are made
    made_test: Count = 300  # number of test queries that are made
    made_seed: Natural = 0  # of these
    made_corpus: Count = 1600  # the passages of so many training questions are searched
    clauses: Annotated[int, within(1, 4)] = 2  # about somebody else, in each query that is made


@dataclasses.dataclass(frozen=True)
class WritingConfig:
    # rewrite_pico, rewrite_bm25, rewrite_boolean, rewrite_dense, rewrite_plain or bare_rewrite
    # (nothing but the query); or a file .txt of your own
    prompt: str = "bare_rewrite"
    form: str = ""  # of the output, for your own file: tagged (think, answer, JSON) or bare
    boolean: bool = False  # your own file asks for Boolean queries
    # tokens that an output may have, its thinking included
    query_tokens: Annotated[int, least(2)] = 256

    def __post_init__(self) -> None:
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
    kinds: Annotated[tuple[str, ...], some_of(KINDS)] = (ANY,)
    share: Share = 0.25  # probability with which any word is left out
    frequent_share: Share = 0.9  # a frequent word, of the kind frequent
    rare_share: Share = 0.25  # another word, of the kind rare
    frequent_from: Share = 0.1  # a word is frequent that more than this share of the texts have
    least_words: Count = 4  # of a demonstration
    most_words: Count = 30
    # Of single sentences, of two neighbours, and so on up to so many. Long queries need long ones
    together: Count = 1


@dataclasses.dataclass(frozen=True)
class RolloutConfig(PlayedConfig):
    # Tokens that an output may have in learning; 0: as many as in evaluation. One that never ends
    # makes its whole batch slow
    query_tokens: Natural = 0


@dataclasses.dataclass(frozen=True)
class EvalConfig(HalvedEvalConfig):
    greedy: bool = True  # the likeliest tokens; False: sampled as in training
    # Of rankings, as metrics/ranking.py has them; their K is not the K of the reward
    measures: Annotated[tuple[str, ...], NAMED] = ("ndcg@10", "recall@100", "rr@10")
    best_by: str = "ndcg@10"  # the measure that chooses the best checkpoint
    part: str = internal(ALL)  # none of those that are reported chooses anything

    @property
    def depth(self) -> int:
        """Documents of a ranking that the measures need; 1000 without a cut, as in TREC."""
        return max(cut_of(measure) or 1000 for measure in self.measures)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewriteConfig(TokenConfig):
    NAME: ClassVar[str] = "deepretrieval"
    PLAYED: ClassVar[str] = "rollout"
    IMITATION: ClassVar[str] = SCRIPT
    FREE_FIELDS: ClassVar[tuple[str, ...]] = (
        *("rollout.max_failed_share", "queries.test", "engine.", "guards."),
    )
    PATHS: ClassVar[tuple[str, ...]] = (
        *("queries.train", "queries.dev", "search.corpus", "model.path"),
    )
    # script: imitate scripted rewritings; then rl: learn from what queries find; or one of them
    stages: Annotated[tuple[str, ...], some_of(STAGES, ordered=True)] = STAGES
    # of the stage rl: ppo, with a critic, or grpo, with groups
    algorithm: Annotated[str, one_of(ALGORITHMS)] = PPO
    queries: QueriesConfig
    search: SearchConfig
    engine: RemoteEngineConfig
    writing: WritingConfig
    reward: RewriteRewardConfig
    guards: GuardsConfig
    rollout: RolloutConfig
    dropped: DroppedConfig
    script: ScriptConfig
    ppo: TokenPPOConfig
    grpo: TokenGRPOConfig
    eval: EvalConfig

    def settled(self) -> RewriteConfig:
        rule, batch, ppo = self.rule, self.train.batch_size, self.algorithm == PPO
        remote, learns = self.search.engine == REMOTE, RL in self.stages
        data, scored, left = self.queries, self.eval, self.dropped
        needed, boolean = max(self.reward.k, scored.depth), self.writing.kind.boolean
        block = f"and must be a multiple of {BLOCK} (queries mention one another's persons) from "
        fewer = f"less than config.dropped.least_words, {left.least_words}; raise it"
        unscored = f"and none of config.eval.measures, {', '.join(scored.measures)}; use one"
        unknown = f"which knows no {TALKATIVE!r} queries; name data in config.queries"
        ids = f"and config.search.engine {REMOTE!r} gives ids alone"
        # A service would cut rankings without a word.
        cut = f"and config.reward.k or config.eval.measures need {needed}; lower these"
        kl, of_kl = (self.ppo.kl, "ppo.kl") if ppo else (self.grpo.beta, "grpo.beta")
        short = f"less than the {self.learned_tokens} tokens of an output in learning; raise it"
        members = f"no multiple of config.{self.algorithm}.members, {rule.members}"
        words = f"and config.search.engine reads words; use {BOOLEAN!r}, or another prompt"
        refuse(
            self,
            (
                data.made_corpus % BLOCK or data.made_corpus < data.made_train,
                "queries.made_corpus",
                f"{block}config.queries.made_train, {data.made_train}, up",
            ),
            *of_corpus(self.search, REMOTE),
            (left.most_words < left.least_words, "dropped.most_words", fewer),
            (scored.best_by not in scored.measures, "eval.best_by", unscored),
            (remote and SCRIPT in self.stages, "stages", f"{ids}; set it to {RL}"),
            (remote and needed > self.engine.most, "engine.most", cut),
            (remote and self.reward.reading_cost, "reward.reading_cost", f"{ids}; use 0"),
            (remote and self.reward.measure == ANSWER_RANK, "reward.measure", f"{ids}; use rr"),
            (remote and TALKATIVE in (data.train, data.dev, data.test), "search.engine", unknown),
        )
        rules = (
            (batch % rule.members, "train.batch_size", members),
            (ppo and batch % self.ppo.minibatches, "ppo.minibatches", f"no divisor of {batch}"),
            (not ppo and self.grpo.longest < self.learned_tokens, "grpo.longest", short),
            (self.guards.max_kl and not kl, "guards.max_kl", f"and config.{of_kl} is 0; raise it"),
            (boolean and self.search.engine not in (BOOLEAN, REMOTE), "writing.prompt", words),
        )
        refuse(self, *(rules if learns else ()))
        return self.with_stages()

    @classmethod
    def unread(cls, fields: Mapping[str, Any]) -> list[str]:
        return [*super().unread(fields), "search.gold_by", "search.clean"]

    @property
    def rule(self) -> TokenPPOConfig | TokenGRPOConfig:
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


def default_config() -> ConfigDict:
    """DeepRetrieval's settings (arXiv 2503.00223) on queries made here."""
    config = RewriteConfig.default()
    config.train.update(steps=200, batch_size=64, eval_every=50, checkpoint_every=50, log_every=5)
    config.optimizer.update(learning_rate=1e-6, beta2=0.999, clip_norm=1.0)
    config.optimizer.update(schedule="constant", warmup_steps=0)
    config.search.update(k1=0.9, b=0.4, stemmer="", stop_words="")
    return config


CONFIG = RewriteConfig
