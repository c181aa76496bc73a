"""LeReT (arXiv 2410.23214): a language model learns to write search queries from its own tries.

In each iteration several prompts make the model try different queries at each hop. The average
precision of what these find says which is better. The model imitates the best ones by its bare
prompt (SFT), and then learns from pairs of them (IPO or DPO).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from jax.sharding import Mesh

from qrag_jax.environments.query_writing.few_shot import split_questions
from qrag_jax.environments.query_writing.few_shot_file import NAME
from qrag_jax.environments.query_writing.prompt import QueryPrompt
from qrag_jax.errors import InputError
from qrag_jax.evaluators.query_scores import QueryScores
from qrag_jax.feedback.tries import PoolScores
from qrag_jax.learners.optimizers import learning_rate_schedule, make_optimizer
from qrag_jax.learners.policy_state import Parts, PolicyState
from qrag_jax.learners.preference_update import make_preference_update
from qrag_jax.learners.token_update import make_token_update
from qrag_jax.models.first_language_model import FirstLanguageModel
from qrag_jax.rollouts.experience import Experience
from qrag_jax.rollouts.query_tries import Scoring
from qrag_jax.rollouts.token_episodes import TokenEpisode, TokenStart
from qrag_jax.runtime.dry_run import Program
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.step_log import Told
from qrag_jax.systems.config import CAUSES
from qrag_jax.systems.leret_config import (
    FEW_SHOT,
    FREE_FIELDS,
    PATHS,
    PREFERENCE,
    SCRIPT,
    SFT,
    LeretConfig,
    load_config,
)
from qrag_jax.systems.leret_experience import LessonExperience
from qrag_jax.systems.leret_inputs import Inputs, load_inputs
from qrag_jax.systems.leret_tries import (
    HopPlayer,
    Play,
    PlayBy,
    PromptMaker,
    TryMaker,
    kept_prompts,
)
from qrag_jax.systems.token_system import (
    EVALUATED,
    WARM_UP,
    Opening,
    Stage,
    StageRules,
    TokenSystem,
    check_server,
    make_stage,
)


@dataclasses.dataclass
class Leret(TokenSystem[LeretConfig, Inputs]):
    """See `systems.System`; tries are kept in its folder."""

    SECTION: ClassVar[str] = "tries"
    NAME: ClassVar[str] = "leret"

    def __post_init__(self) -> None:
        super().__post_init__()
        config, inputs = self.config, self.inputs
        self.told = Told(
            self._names, {"loss": ".3f", "accuracy": ".2f"}, self._advice, CAUSES["leret"]
        )
        told = []
        if SCRIPT in config.stages:
            told.append(f"{config.script.steps} steps of imitating scripted styles")
        tried = []
        if SFT in config.stages:
            tried.append(f"{config.sft.steps} steps of imitating the best")
        if PREFERENCE in config.stages:
            tried.append(f"{config.preference.steps} of {config.preference.loss.upper()} by pairs")
        if tried:
            told.append(
                f"{config.iterations} × tries by {config.tries.asked} prompts × "
                f"{config.tries.samples}, {' and '.join(tried)}"
            )
        self.line = (
            f"{len(inputs.train)} training questions of {config.writing.hops} hops, "
            f"{len(inputs.dev)} scored, {len(inputs.library.corpus)} passages searched by "
            f"{config.search.engine}; {'; then '.join(told)}; {self._where}"
        )

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        """See `System`; a server that samples is checked first."""
        prompt = self.inputs.agent.prompt
        check_server(self, (prompt.messages(state) for state in self.inputs.train), stop)
        return LessonExperience(self, run.progress.batches or 0)

    def programs(self) -> list[Program]:
        """See `TokenSystem`; the stages of a kind have one update."""
        kinds = dict.fromkeys(each.kind for each in self.stages)
        return [self._program(f"update of {kind}", self.stage(kind)) for kind in kinds]

    def _longest(self, stage: Stage) -> Any:
        """See `TokenSystem`."""
        return LessonExperience(self, 0).longest(stage.kind)

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages, in their order."""
        return stages_of(self.config, self.mesh, self.inputs.model)

    def stage(self, kind: str) -> Stage:
        """The first stage of a kind."""
        return next(each for each in self.stages if each.kind == kind)

    # ---------------------------------------------------------------- play

    @cached_property
    def scoring(self) -> Scoring:
        """How tries and pools are scored."""
        config = self.config
        scores = PoolScores(config.writing.k, config.reward.recall_k)
        return Scoring(scores, config.reward, config.writing.order, config.search.gold_by)

    def prompt(self, play: PlayBy | None) -> QueryPrompt:
        """All ways to ask; those with examples are made first, if they are not there.

        Args:
            play: plays tries by the weights that make prompts; None: these are gone.
        """
        prompt = self.inputs.agent.prompt
        if self.config.tries.ways != FEW_SHOT or prompt.variants:
            return prompt
        if play is None:
            variants = kept_prompts(self.workdir, prompt)
        else:
            assert self.maker is not None
            variants = self.maker.prompts(self.workdir, play)
        prompt = dataclasses.replace(prompt, variants=variants)
        agent = dataclasses.replace(self.inputs.agent, prompt=prompt)
        self.inputs = dataclasses.replace(self.inputs, agent=agent)
        return prompt

    @cached_property
    def maker(self) -> PromptMaker | None:
        """Makes prompts with examples; None if the config has none."""
        config, inputs = self.config, self.inputs
        if config.tries.ways != FEW_SHOT:
            return None
        return PromptMaker(
            config.few_shot,
            inputs.agent.prompt,
            inputs.train,
            split_questions(len(inputs.train), config.few_shot),
            self.hops,
            config.search.gold_by,
        )

    @cached_property
    def asked(self) -> Sequence[int]:
        """The training questions that are tried: those that no example is of."""
        if self.maker is None:
            return range(len(self.inputs.train))
        return self.maker.split.training

    @property
    def variants(self) -> tuple[int, ...]:
        """Numbers of the prompts that try; there may be fewer than the config asks for."""
        there = range(len(self.inputs.agent.prompt.names))
        return tuple(number for number in self.config.tries.variants if number in there)

    @cached_property
    def tries(self) -> TryMaker:
        """Makes and keeps tries; the prompts must be there."""
        config, inputs = self.config, self.inputs
        if len(self.variants) * config.tries.samples < 2:
            raise InputError(
                f"{NAME} has one prompt, so each state would have one try, which can be compared "
                "with none; raise config.few_shot.candidates or config.tries.samples, or set "
                "config.tries.with_bare, in a new --workdir."
            )
        record = {
            **inputs.data,
            "model": self._model_told(),
            "search": dataclasses.asdict(config.search),
            "writing": dataclasses.asdict(config.writing),
            "prompts": hashlib.sha256(repr(inputs.agent.prompt.variants).encode()).hexdigest(),
            "tries": {
                name: getattr(config.tries, name)
                for name in ("ways", "prompts", "with_bare", "samples", "questions")
            },
            "reward": dataclasses.asdict(config.reward),
            "temperature": config.sampling.temperature,
            "seed": config.seed,
        }
        return TryMaker(
            config,
            [inputs.train[number] for number in self.asked],
            inputs.library,
            self.scoring,
            self.variants,
            record,
            self.workdir,
        )

    def _model_told(self) -> str:
        lora = self.config.model.lora
        return f"{self.inputs.data['model']}, {json.dumps(dataclasses.asdict(lora))}"

    def play(self, state: PolicyState, stop: StopSignal) -> PlayBy:
        """Plays the tries that are learned from, by the weights of a state."""
        weights = self.weights(state)

        def play(prompt: QueryPrompt, starts: Sequence[TokenStart]) -> list[TokenEpisode]:
            agent = dataclasses.replace(self.inputs.agent, prompt=prompt)
            return self.player.play(weights, starts, stop, agent=agent)

        return play

    def by_device(self, params: Any, stop: StopSignal, *, greedy: bool = False) -> Play:
        """Plays tries by these parameters, on the device that trains."""

        def play(starts: Sequence[TokenStart]) -> list[TokenEpisode]:
            agent = self.inputs.agent
            return self.player.on_device(params, starts, stop, greedy=greedy, agent=agent)

        return play

    @cached_property
    def hops(self) -> HopPlayer:
        """Plays questions hop by hop."""
        config = self.config
        return HopPlayer(
            config.writing.hops,
            config.writing.k,
            self.inputs.library,
            self.scoring,
            config.seed,
        )

    @cached_property
    def _scores(self) -> QueryScores:
        config = self.config

        def play(params: Any, step: int, stop: StopSignal):
            by_device = self.by_device(params, stop, greedy=config.eval.greedy)
            return self.hops.by_model(self.inputs.dev, by_device, EVALUATED)

        return QueryScores(play, config.eval.best_by, self.inputs.dev)

    def told_counts(self) -> dict[str, float]:
        """What the tries of this start of the run needed."""
        return self._of_server() | {"failed_tries": float(self.counted().failed)}

    def _names(self, numbers: Sequence[int]) -> list[str]:
        script = self.inputs.script
        if script is not None and self.config.stage_at(self._latest).kind == SCRIPT:
            return [script.demonstrated[number][0].id for number in numbers]
        return [self.inputs.train[number].id for number in numbers]

    @property
    def _advice(self) -> str:
        return "a lower learning_rate of the stage (config.script, sft or preference), or "


OPENING = Opening(
    system=Leret,
    config=LeretConfig.of,
    saved=load_config,
    free=FREE_FIELDS,
    paths=PATHS,
    load=load_inputs,
)
check, before_devices, open_system = OPENING.check, OPENING.before_devices, OPENING.open_system


def stages_of(config: LeretConfig, mesh: Mesh, model: FirstLanguageModel) -> list[Stage]:
    """The stages of a config, in their order; those of a kind differ in their first step alone."""
    width = model.loaded.model.trunk.config.hidden_size
    by_kind = {
        kind: make_stage(config, mesh, model, _rules(kind, config, width))
        for kind in dict.fromkeys(each.kind for each in config.plan)
    }
    return [by_kind[each.kind]._replace(first=each.first) for each in config.plan]


def _rules(kind: str, config: LeretConfig, width: int) -> StageRules:
    """Of the first stage of a kind."""
    algorithm: Any = getattr(config, kind)
    steps = algorithm.steps * getattr(algorithm, "epochs", 1)
    optimizer = dataclasses.replace(
        config.optimizer,
        learning_rate=algorithm.learning_rate,
        total_steps=steps,
        warmup_steps=min(config.optimizer.warmup_steps, steps // WARM_UP),
    )
    firsts = [each.first for each in config.plan if each.kind == kind]
    # Stages of a kind begin again after as many steps as an iteration has.
    period = firsts[1] - firsts[0] if len(firsts) > 1 else config.train.steps
    schedule = learning_rate_schedule(optimizer)
    return StageRules(
        kind=kind,
        algorithm=algorithm,
        parts=Parts(make_optimizer(optimizer), None, False, width),
        weights=(),
        schedule=lambda step: schedule((step - firsts[0]) % period),
        make_update=make_preference_update if kind == PREFERENCE else make_token_update,
        first=firsts[0],
    )
