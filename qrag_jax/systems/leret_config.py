"""LeReT's config: its sections, and the dataclass of settings that is read from them."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ml_collections import ConfigDict

from qrag_jax.environments.demonstrations import StylesConfig
from qrag_jax.environments.few_shot import FewShotConfig
from qrag_jax.environments.queries import BY_HOP, ORDERS
from qrag_jax.errors import InputError, check_known, check_least, check_share
from qrag_jax.feedback.pairs import NextStatesConfig, PairsConfig
from qrag_jax.feedback.tries import POOL_SCORES, QueryRewardConfig
from qrag_jax.learners.config import PreferenceConfig
from qrag_jax.rollouts.trajectories import SERVER
from qrag_jax.runtime import saved_config
from qrag_jax.runtime.config_fields import internal, refusing_types
from qrag_jax.systems import token_config
from qrag_jax.systems.config import COMMON, HalvedEvalConfig, check_stages, sections_of
from qrag_jax.systems.query_search import SearchConfig
from qrag_jax.systems.token_config import (
    BRIDGE,
    BridgeQuestionsConfig,
    ScriptConfig,
    StageSFTConfig,
    TokenConfig,
    check_stage,
    served_config,
)

NAME = "leret"
SCRIPT, SFT, PREFERENCE = STAGES = ("script", "sft", "preference")
STYLED, FEW_SHOT, BARE_ONLY = WAYS = ("styles", "few_shot", "bare")


@dataclasses.dataclass(frozen=True)
class QuestionsConfig(BridgeQuestionsConfig):
    """Section `questions`: what is asked."""

    most: int = 0  # training questions that are tried, the first ones; 0: all
    bridge_train: int = 600
    bridge_corpus: int = 2000  # the passages of so many training questions are searched

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("questions", self, bridge_corpus=self.bridge_train, most=0)


@dataclasses.dataclass(frozen=True)
class WritingConfig:
    """Section `writing`: how queries are asked for, and what they find."""

    hops: int = 2  # queries of a question
    k: int = 3  # passages that a query finds
    prompt: str = "query_writing"  # a name of ours, or a file .txt of your own
    passage_words: int = 0  # words of a passage that are shown, at most; 0: all
    # Order of the passages found: by hop, then rank; or by raw score, as in LeReT
    order: str = BY_HOP
    query_tokens: int = 48  # tokens of a query, at most; longer ones are masked and counted
    stop: str = ""  # what the model may write to end the search; "": it cannot

    def __post_init__(self) -> None:
        check_least("writing", self, hops=1, k=1, passage_words=0, query_tokens=2)
        check_known("writing", self, "order", ORDERS)


@dataclasses.dataclass(frozen=True)
class TriesConfig:
    """Section `tries`: how the model is made to try different queries."""

    # Prompts besides the bare one: styles (of the model made here), few_shot (examples of its own
    # tries), or bare: there are none, and the temperature alone makes tries differ
    ways: str = STYLED
    prompts: int = 4  # of styles or few_shot: prompts besides the bare one
    with_bare: bool = False  # the bare prompt tries, too
    samples: int = 1  # tries of each prompt at a state
    attempts: int = 2  # a try that fails is made again, so often in all
    max_failed_share: float = 0.5  # of the tries made at once; above it the run pauses
    questions: int = 64  # questions whose tries are made at once, and kept together

    def __post_init__(self) -> None:
        check_known("tries", self, "ways", WAYS)
        check_least("tries", self, prompts=1, samples=1, attempts=1, questions=1)
        check_share("tries", self, "max_failed_share")
        if self.asked * self.samples < 2:
            raise InputError(
                "config.tries has one try a state, which can be compared with none; raise "
                "config.tries.prompts or config.tries.samples."
            )

    @property
    def asked(self) -> int:
        """Prompts that try at a state."""
        return 1 if self.ways == BARE_ONLY else self.prompts + self.with_bare

    @property
    def variants(self) -> tuple[int, ...]:
        """Numbers of the prompts that try at a state; 0 is the bare one."""
        if self.ways == BARE_ONLY:
            return (0,)
        return tuple(range(0 if self.with_bare else 1, self.prompts + 1))


@dataclasses.dataclass(frozen=True)
class StagePreferenceConfig(PreferenceConfig):
    """Section `preference`: the policy learns which of two queries is better."""

    steps: int = 150  # optimizer steps of the stage, in each iteration
    batch_size: int = 16  # pairs of a step
    learning_rate: float = 5e-5  # peak; its warm-up and decay are over the stage

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stage(PREFERENCE, self)


@dataclasses.dataclass(frozen=True)
class EvalConfig(HalvedEvalConfig):
    """Section `eval`."""

    BEST_BY: ClassVar[tuple[str, ...]] = POOL_SCORES
    greedy: bool = False  # the likeliest tokens; False: sampled as in training
    best_by: str = "all_gold"  # the score after the last hop that chooses the best checkpoint


FIELDS: dict[str, tuple[Any, str]] = {
    **COMMON,
    "iterations": (2, "how often tries are made and learned from"),
    "stages": (
        STAGES,
        "script: imitate scripted styles, once; then in each iteration sft: imitate the best "
        "tries, and preference: learn from pairs of tries",
    ),
}
# Fields that do not change what a run computes: a resumed run may have other values.
FREE_FIELDS = (*saved_config.FREE_FIELDS, "tries.max_failed_share")
# Of data whose digests are kept.
PATHS = ("questions.train", "questions.dev", "model.path")


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """One stage of a run."""

    kind: str
    iteration: int  # from 1; 0 for the script
    first: int
    steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeretConfig(TokenConfig):
    """The settings of a config, one dataclass for each section."""

    iterations: int
    questions: QuestionsConfig
    search: SearchConfig
    writing: WritingConfig
    tries: TriesConfig
    few_shot: FewShotConfig
    styles: StylesConfig
    reward: QueryRewardConfig
    pairs: PairsConfig
    next_state: NextStatesConfig
    script: ScriptConfig
    sft: StageSFTConfig
    preference: StagePreferenceConfig
    eval: EvalConfig
    plan: tuple[StagePlan, ...] = internal(())

    @classmethod
    @refusing_types("the config")
    def of(cls, config: ConfigDict) -> LeretConfig:
        """Reads the settings of a config."""
        parts = LAYOUT.parts(config)
        stages = parts["stages"]
        check_stages(stages, STAGES)
        if config.iterations < 1:
            raise InputError(f"config.iterations is {config.iterations}; it must be at least 1.")
        if parts["tries"].ways == FEW_SHOT:
            kept = parts["tries"].prompts
            parts["few_shot"] = dataclasses.replace(parts["few_shot"], kept=kept)
        _check_together(stages, parts)
        plan = _planned(stages, config.iterations, parts)
        steps = plan[-1].first + plan[-1].steps
        parts["train"] = dataclasses.replace(parts["train"], steps=steps)
        if parts["sampling"].engine == SERVER:
            parts["llm"] = served_config(config, parts, versions=2)
        return cls(plan=plan, **parts)

    def stage_at(self, step: int) -> StagePlan:
        """The stage of a step, from 0."""
        return next(each for each in reversed(self.plan) if each.first <= step)


LAYOUT = token_config.layout(NAME, FIELDS, sections_of(LeretConfig))
load_config, help_lines, unread = LAYOUT.load, LAYOUT.help_lines, token_config.unread


def _planned(
    stages: tuple[str, ...], iterations: int, parts: dict[str, Any]
) -> tuple[StagePlan, ...]:
    order = [(SCRIPT, 0)] if SCRIPT in stages else []
    tried = [kind for kind in (SFT, PREFERENCE) if kind in stages]
    order += [(kind, number) for number in range(1, iterations + 1) for kind in tried]
    first, plan = 0, []
    for kind, iteration in order:
        plan.append(StagePlan(kind, iteration, first, parts[kind].steps))
        first += parts[kind].steps
    return tuple(plan)


def _check_together(stages: tuple[str, ...], parts: dict[str, Any]) -> None:
    """Refuses sections that do not go together."""
    questions, tries, sampling = parts["questions"], parts["tries"], parts["sampling"]
    if SCRIPT in stages and questions.train != BRIDGE:
        raise InputError(
            f"config.stages has {SCRIPT}, whose demonstrations are of the questions {BRIDGE!r}, "
            f"and config.questions.train is {questions.train!r}; leave the stage out."
        )
    if tries.ways == STYLED and SCRIPT not in stages:
        raise InputError(
            f"config.tries.ways is {STYLED!r}, whose marks a model knows from the stage {SCRIPT} "
            f"only; use {FEW_SHOT}, or add the stage."
        )
    alone = tries.samples > 1 or tries.ways == BARE_ONLY
    if alone and not sampling.temperature:
        raise InputError(
            "config.sampling.temperature is 0, so several tries of one prompt would be alike; use "
            "a number above 0, such as 1, or set config.tries.samples to 1."
        )


def default_config() -> ConfigDict:
    """LeReT's settings (arXiv 2410.23214) on questions made here."""
    config = token_config.default_config(LAYOUT)
    config.train.update(eval_every=10**6, checkpoint_every=100, log_every=10)
    config.optimizer.update(weight_decay=0.0, beta1=0.9, beta2=0.99, eps=1e-8, clip_norm=1.0)
    config.optimizer.update(schedule="linear", warmup_steps=10)
    return config
