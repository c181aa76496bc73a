"""LeReT's config: its sections, and what follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from ml_collections import ConfigDict

from qrag_jax.environments.few_shot import FewShotConfig
from qrag_jax.environments.queries import BY_HOP, ORDERS, StylesConfig
from qrag_jax.errors import Count, Natural, Positive, Share, least, one_of, some_of
from qrag_jax.feedback.pairs import POOL_SCORES, PairsConfig, QueryRewardConfig
from qrag_jax.learners.config import PreferenceConfig
from qrag_jax.systems import token_config
from qrag_jax.systems.config import HalvedEvalConfig, refuse
from qrag_jax.systems.search import SearchConfig, of_corpus

SCRIPT, SFT, PREFERENCE = STAGES = ("script", "sft", "preference")
STYLED, FEW_SHOT, BARE_ONLY = WAYS = ("styles", "few_shot", "bare")


@dataclasses.dataclass(frozen=True)
class QuestionsConfig(token_config.BridgeQuestionsConfig):
    most: Natural = 0  # training questions that are tried, the first ones; 0: all
    bridge_train: Count = 600  # number of training questions that are made
    bridge_corpus: Count = 2000  # the passages of so many training questions are searched


@dataclasses.dataclass(frozen=True)
class WritingConfig:
    hops: Count = 2  # queries of a question
    k: Count = 3  # passages that a query finds
    prompt: str = "query_writing"  # a name of ours, or a file .txt of your own
    passage_words: Natural = 0  # words of a passage that are shown, at most; 0: all
    # Order of the passages found: by hop, then rank; or by raw score, as in LeReT
    order: Annotated[str, one_of(ORDERS)] = BY_HOP
    # tokens of a query, at most; longer ones are masked and counted
    query_tokens: Annotated[int, least(2)] = 48
    stop: str = ""  # what the model may write to end the search; "": it cannot


@dataclasses.dataclass(frozen=True)
class TriesConfig:
    """Section `tries`: how the model is made to try different queries."""

    # Prompts besides the bare one: styles (of the model made here), few_shot (examples of its own
    # tries), or bare: there are none, and the temperature alone makes tries differ
    ways: Annotated[str, one_of(WAYS)] = STYLED
    prompts: Count = 4  # of styles or few_shot: prompts besides the bare one
    with_bare: bool = False  # the bare prompt tries, too
    samples: Count = 1  # tries of each prompt at a state
    attempts: Count = 2  # a try that fails is made again, so often in all
    max_failed_share: Share = 0.5  # of the tries made at once; above it the run pauses
    questions: Count = 64  # questions whose tries are made at once, and kept together

    @property
    def variants(self) -> tuple[int, ...]:
        """Numbers of the prompts that try at a state; 0 is the bare one."""
        if self.ways == BARE_ONLY:
            return (0,)
        return tuple(range(0 if self.with_bare else 1, self.prompts + 1))


@dataclasses.dataclass(frozen=True)
class StagePreferenceConfig(PreferenceConfig):
    """Section `preference`: the policy learns which of two queries is better."""

    steps: Count = 150  # optimizer steps of the stage, in each iteration
    batch_size: Count = 16  # pairs of a step
    learning_rate: Positive = 5e-5  # peak; its warm-up and decay are over the stage


@dataclasses.dataclass(frozen=True)
class EvalConfig(HalvedEvalConfig):
    greedy: bool = False  # the likeliest tokens; False: sampled as in training
    # the score after the last hop that chooses the best checkpoint
    best_by: Annotated[str, one_of(POOL_SCORES)] = "all_gold"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeretConfig(token_config.TokenConfig):
    NAME: ClassVar[str] = "leret"
    PLAYED: ClassVar[str] = "tries"
    IMITATION: ClassVar[str] = SCRIPT
    FREE_FIELDS: ClassVar[tuple[str, ...]] = ("tries.max_failed_share",)
    PATHS: ClassVar[tuple[str, ...]] = (
        *("questions.train", "questions.dev", "search.corpus", "model.path", "pairs.path"),
    )
    iterations: Count = 2  # how often tries are made and learned from; see config.pairs.path, too
    # script: imitate scripted styles, once; then in each iteration sft: imitate the best tries, and
    # preference: learn from pairs of tries
    stages: Annotated[tuple[str, ...], some_of(STAGES, ordered=True)] = STAGES
    questions: QuestionsConfig
    search: SearchConfig
    writing: WritingConfig
    tries: TriesConfig
    few_shot: FewShotConfig
    styles: StylesConfig
    reward: QueryRewardConfig
    pairs: PairsConfig
    script: token_config.ScriptConfig
    sft: token_config.StageSFTConfig
    preference: StagePreferenceConfig
    eval: EvalConfig

    def settled(self) -> LeretConfig:
        scripted, tries, asked = SCRIPT in self.stages, self.tries, self.questions
        alone = "so a state has one try, which can be compared with none; raise it"
        few = f"less than config.questions.bridge_train, {asked.bridge_train}; raise it"
        other = f"and the stage {SCRIPT} demonstrates {token_config.BRIDGE!r}; leave the stage out"
        unknown = f"whose marks a model knows from the stage {SCRIPT} only; add that"
        alike = "so several tries of one prompt would be alike; raise it, or take one"
        repeats = tries.samples > 1 or tries.ways == BARE_ONLY
        tried, examples = self.iterations > 1 or not self.pairs.path, tries.ways == FEW_SHOT
        late = "and the first weights make prompts with examples; use other config.tries.ways"
        refuse(
            self,
            *of_corpus(self.search),
            (asked.bridge_corpus < asked.bridge_train, "questions.bridge_corpus", few),
            (tried and len(tries.variants) * tries.samples < 2, "tries.samples", alone),
            (scripted and asked.train != token_config.BRIDGE, "questions.train", other),
            (tried and tries.ways == STYLED and not scripted, "tries.ways", unknown),
            (tried and repeats and not self.sampling.temperature, "sampling.temperature", alike),
            (tried and examples and self.pairs.path, "pairs.path", late),
        )
        few_shot = self.few_shot
        if self.tries.ways == FEW_SHOT:
            few_shot = dataclasses.replace(few_shot, kept=self.tries.prompts)
        return dataclasses.replace(self, few_shot=few_shot).with_stages(self.iterations)

    @classmethod
    def unread(cls, fields: Mapping[str, Any]) -> list[str]:
        return [*super().unread(fields), "search.kept"]


def default_config() -> ConfigDict:
    """LeReT's settings (arXiv 2410.23214) on questions made here."""
    config = LeretConfig.default()
    config.train.update(eval_every=10**6, checkpoint_every=100, log_every=10)
    config.optimizer.update(beta2=0.99, clip_norm=1.0, schedule="linear", warmup_steps=10)
    return config


CONFIG = LeretConfig
