"""LeReT (arXiv 2410.23214): a language model learns to write search queries from its own tries.

In each iteration several prompts make the model try different queries at each hop. The average
precision of what these find says which is better. The model imitates the best ones by its bare
prompt (SFT), and then learns from pairs of them (IPO or DPO).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

from qrag_jax.environments.few_shot import split_questions
from qrag_jax.environments.queries import QueryPrompt
from qrag_jax.evaluators.evaluation import Evaluation
from qrag_jax.evaluators.query_scores import logged, query_evaluation
from qrag_jax.feedback.pairs import PoolScores
from qrag_jax.learners.preference_update import make_preference_update
from qrag_jax.learners.state import TrainState
from qrag_jax.learners.token_update import make_token_update
from qrag_jax.llm.text.prompts import Messages
from qrag_jax.rollouts.experience import Experience
from qrag_jax.rollouts.query_tries import Scoring
from qrag_jax.rollouts.token_episodes import TokenEpisode, TokenStart
from qrag_jax.runtime import hosts
from qrag_jax.runtime.dry_run import Program
from qrag_jax.runtime.embedding_files import encoder_key
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.systems.leret_config import FEW_SHOT, PREFERENCE, SCRIPT, LeretConfig
from qrag_jax.systems.leret_inputs import Inputs, load_inputs
from qrag_jax.systems.leret_pairs import LessonExperience, Tried
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
    TokenSystem,
)


@dataclasses.dataclass
class Leret(TokenSystem[LeretConfig, Inputs]):
    """See `systems.System`; tries are kept in its folder."""

    SECTION: ClassVar[str] = "tries"
    NAME: ClassVar[str] = "leret"
    SHOWN: ClassVar[Mapping[str, str]] = {"loss": ".3f", "accuracy": ".2f"}

    def __post_init__(self) -> None:
        super().__post_init__()
        config, inputs = self.config, self.inputs
        stages = ", ".join(f"{each.steps} steps of {each.kind}" for each in config.plan)
        self.line = (
            f"{len(inputs.train)} training questions of {config.writing.hops} hops, "
            f"{len(inputs.dev)} scored, {len(inputs.library.corpus)} passages searched by "
            f"{config.search.engine}; {config.tries.asked} prompts × {config.tries.samples} tries "
            f"at a state; {stages}; {self._where}"
        )

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        """See `System`; a server that samples is checked first."""
        self.check_server(stop)
        return self.lessons(run.progress.batches or 0)

    def lessons(self, batches: int = 0) -> LessonExperience:
        """What the run learns from, behind so many batches."""
        return LessonExperience(
            self.config,
            self.inputs,
            self.mesh,
            {stage.kind: stage.policy for stage in self.stages},
            self.asked,
            self.base,
            tries_of=self.tried,
            shape_of=self.block_shape,
            counted=self._counted,
            batches=batches,
        )

    def _openings(self) -> Iterable[Messages]:
        prompt = self.inputs.agent.prompt
        return (prompt.messages(state) for state in self.inputs.train)

    def programs(self) -> list[Program]:
        """See `TokenSystem`; the stages of a kind have one update."""
        by_kind = dict[str, Stage]()
        for stage in self.stages:
            by_kind.setdefault(stage.kind, stage)
        return [self._program(f"update of {kind}", stage) for kind, stage in by_kind.items()]

    def _longest(self, stage: Stage) -> Any:
        """See `TokenSystem`."""
        return self.lessons().longest(stage.kind)

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages, in their order; those of a kind differ in their first step alone."""
        plan = self.config.plan
        kinds = {kind: self._first_stage(kind) for kind in {stage.kind for stage in plan}}
        return [kinds[stage.kind]._replace(first=stage.first) for stage in plan]

    def _first_stage(self, kind: str) -> Stage:
        config = self.config
        algorithm: Any = getattr(config, kind)
        steps = algorithm.steps * getattr(algorithm, "epochs", 1)
        firsts = [each.first for each in config.plan if each.kind == kind]
        # Stages of a kind begin again after as many steps as an iteration has.
        period = firsts[1] - firsts[0] if len(firsts) > 1 else config.train.steps
        return self.make_stage(
            kind,
            algorithm,
            optimizer=dataclasses.replace(
                config.optimizer,
                learning_rate=algorithm.learning_rate,
                total_steps=steps,
                warmup_steps=min(config.optimizer.warmup_steps, steps // WARM_UP),
            ),
            make_update=make_preference_update if kind == PREFERENCE else make_token_update,
            first=firsts[0],
            step_of=lambda step: (step - firsts[0]) % period,
        )

    # ---------------------------------------------------------------- play

    @cached_property
    def scoring(self) -> Scoring:
        """How tries and pools are scored."""
        config = self.config
        scores = PoolScores(config.writing.k, config.reward.recall_k)
        return Scoring(scores, config.reward, config.writing.order, config.search.gold_by)

    def tried(self, iteration: int, state: TrainState | None, stop: StopSignal) -> Tried:
        """See `leret_pairs.TriesOf`: prompts are made first, then the tries by them."""
        if state is None:
            weights, play = self.tries.weights_of(iteration), None
        else:
            by_weights = self.play(state, stop)
            if self.maker is not None and iteration == 1:
                self.maker.prompts(self.workdir, by_weights)
            weights = encoder_key(hosts.of_all(state.params), {})
            play = partial(by_weights, self.prompt)
        found = self.tries.iteration(iteration, play, weights, stop)
        return Tried(found, self.prompt, self.variants, self.tries.folder(iteration))

    @cached_property
    def prompt(self) -> QueryPrompt:
        """All ways to ask; those with examples must be there, see `maker`."""
        prompt = self.inputs.agent.prompt
        if self.maker is None:
            return prompt
        return dataclasses.replace(prompt, variants=kept_prompts(self.workdir, prompt))

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
        there = range(len(self.prompt.names))
        return tuple(number for number in self.config.tries.variants if number in there)

    @cached_property
    def tries(self) -> TryMaker:
        """Makes and keeps tries; the prompts must be there."""
        config, inputs = self.config, self.inputs
        record = {
            **inputs.data,
            "model": f"{inputs.data['model']}, {json.dumps(dataclasses.asdict(config.model.lora))}",
            "search": dataclasses.asdict(config.search),
            "writing": dataclasses.asdict(config.writing),
            "prompts": hashlib.sha256(repr(self.prompt.variants).encode()).hexdigest(),
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

    def play(self, state: TrainState, stop: StopSignal) -> PlayBy:
        """Plays the tries that are learned from, by the weights of a state."""
        weights = self.weights(state)

        def play(prompt: QueryPrompt, starts: Sequence[TokenStart]) -> list[TokenEpisode]:
            agent = dataclasses.replace(self.inputs.agent, prompt=prompt)
            return self.player.play(weights, starts, stop, agent=agent)

        return play

    def by_device(
        self,
        params: Any,
        stop: StopSignal,
        *,
        greedy: bool = False,
        prompt: QueryPrompt | None = None,
    ) -> Play:
        """Plays tries by these parameters, on the device that trains.

        Args:
            prompt: asks; None: that of the inputs, without examples.
        """
        agent = self.inputs.agent
        agent = dataclasses.replace(agent, prompt=prompt or agent.prompt)

        def play(starts: Sequence[TokenStart]) -> list[TokenEpisode]:
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

    def _evaluated(self, params: Any, step: int, stop: StopSignal) -> Evaluation:
        shown, settings = self.inputs.dev, self.config.eval
        by_device = self.by_device(params, stop, greedy=settings.greedy)
        rows = logged(shown, self.hops.by_model(shown, by_device, EVALUATED))
        return query_evaluation(step, rows, settings.best_by)

    def _counted(self) -> dict[str, float]:
        return self._of_server() | {"failed_tries": float(self.counted().failed)}

    def _names(self, numbers: Sequence[int]) -> list[str]:
        script = self.inputs.script
        if script is not None and self.config.stage_at(self._latest).kind == SCRIPT:
            return [script.demonstrated[number][0].id for number in numbers]
        return [self.inputs.train[number].id for number in numbers]

    @property
    def _advice(self) -> str:
        return "a lower learning_rate of the stage (config.script, sft or preference), or "


OPENING = Opening(Leret, LeretConfig, load_inputs)
open_system, before_devices = OPENING.open_system, LeretConfig.before_devices
check = LeretConfig.of
