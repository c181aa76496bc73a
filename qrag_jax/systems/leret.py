"""LeReT (arXiv 2410.23214): a language model learns to write search queries from its own tries.

In each iteration several prompts make the model try different queries at each hop. The average
precision of what these find says which is better. The model imitates the best ones by its bare
prompt (SFT), and then learns from pairs of them (IPO or DPO).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.environments.query_writing.agent import QueryAgent
from qrag_jax.environments.query_writing.few_shot import split_questions
from qrag_jax.environments.query_writing.few_shot_file import NAME
from qrag_jax.environments.query_writing.prompt import QueryPrompt
from qrag_jax.errors import InputError
from qrag_jax.evaluators.query_scores import QueryScores
from qrag_jax.evaluators.training_scores import Evaluation
from qrag_jax.feedback.pool_scores import PoolScores
from qrag_jax.learners import placement
from qrag_jax.learners.policy_state import PolicyState, first_state, state_shapes
from qrag_jax.rollouts.experience import Experience
from qrag_jax.rollouts.query_tries import Scoring
from qrag_jax.rollouts.token_episodes import TokenCounts, TokenEpisode, TokenStart
from qrag_jax.runtime.dry_run import Program
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.saved_config import check_same_config, save_config
from qrag_jax.runtime.step_log import Told
from qrag_jax.systems import token_system
from qrag_jax.systems.episode_player import EpisodePlayer, PlayRules, Scene
from qrag_jax.systems.leret_config import (
    FEW_SHOT,
    FREE_FIELDS,
    PREFERENCE,
    SCRIPT,
    SFT,
    LeretConfig,
    load_config,
)
from qrag_jax.systems.leret_experience import LessonExperience
from qrag_jax.systems.leret_hops import HopPlayer, Play
from qrag_jax.systems.leret_inputs import Inputs, load_inputs
from qrag_jax.systems.leret_prompts import PlayBy, PromptMaker, kept_prompts
from qrag_jax.systems.leret_stages import Learner, learner_of
from qrag_jax.systems.leret_tries import TryMaker
from qrag_jax.systems.served_policy import ServedPolicy, Versioned

EVALUATED = 2**31 - 1  # stream of the draws of evaluations


def check(config: ConfigDict) -> None:
    """Refuses values that are wrong for any data.

    Raises:
        InputError: a field is unknown, or its value makes no sense.
    """
    LeretConfig.of(config)


def before_devices(given: ConfigDict, *, dry: bool = False, described: bool = False) -> str:
    """See `token_system`."""
    return token_system.before_devices(LeretConfig.of(given), dry=dry, described=described)


@contextlib.contextmanager
def open_system(
    given: ConfigDict,
    run: Run,
    *,
    dry: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> Iterator[Leret]:
    """Opens the system, and the server that samples if the config has one; see `systems`."""
    if run.has_begun:
        check_same_config(load_config(run.config_path), given, FREE_FIELDS)
    config = LeretConfig.of(given)
    opening = token_system.Opening(
        load=lambda mesh: load_inputs(config, run.workdir, mesh),
        save=lambda: save_config(given, run.config_path),
        alone="tries are made",
    )
    with token_system.opened(config, run, opening, dry=dry, devices=devices) as found:
        yield Leret(
            config,
            found.mesh,
            found.inputs,
            run.workdir,
            placed=found.placed,
            keep=found.keep,
            served=found.served,
        )


@dataclasses.dataclass
class Leret:
    """See `systems.System`.

    Attributes:
        workdir: the run's folder, where tries are kept.
        placed: else the mesh's devices are described, and only shapes are made.
        keep: saves the parameters at the end of a stage, with the steps done until then.
        served: what samples tries; None: the device.
    """

    config: LeretConfig
    mesh: Mesh
    inputs: Inputs
    workdir: Path
    placed: bool = True
    keep: Callable[[int, Any], None] = lambda step, params: None
    served: ServedPolicy | None = None

    def __post_init__(self) -> None:
        config, inputs = self.config, self.inputs
        self.train, self.profile, self.data = config.train, config.profile, inputs.data
        self.provenance: dict[str, Any] = {}
        self.told = Told(self._names, {"loss": ".3f", "accuracy": ".2f"}, self._advice)
        self.counts = TokenCounts()
        self._step: int | None = None  # of the next update
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
            f"{config.search.engine}; {'; then '.join(told)}; on {self.mesh.size} "
            f"{Platform.of(self.mesh).kind} device(s){', sampled by vLLM' if self.served else ''}"
        )

    def first_state(self) -> PolicyState:
        """See `System`."""
        learner = self.learner(self.config.plan[0].kind)
        trained = self.inputs.model.trained
        return first_state(learner.policy.shardings, learner.parts, trained, self.config.seed)

    @property
    def param_shardings(self) -> Any:
        """Where the trained parameters lie."""
        return self.learner(self.config.plan[0].kind).policy.shardings.params

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        """See `System`."""
        if self.served is not None:
            self.served.wait(stop)
        return LessonExperience(self, run.progress.batches or 0)

    def update(self, state: PolicyState, episodes: Any) -> tuple[PolicyState, Any]:
        """See `System`."""
        step = self._updates(state)
        stage = self.config.stage_at(step)
        learner = self.learner(stage.kind)
        if step == stage.first > 0:
            self.keep(step, state.params)
            state = learner.begin(state)
        self._step = step + 1
        with jax.transfer_guard("disallow"):
            return learner.update(state, episodes, *self.base)

    def evaluate(self, state: PolicyState, step: int, stop: StopSignal) -> Evaluation:
        """See `System`."""
        return self._scores.evaluate(state.params, step, stop)

    def programs(self) -> list[Program]:
        """See `System`: the updates by one batch of the longest rows there may be."""
        found = []
        for kind in dict.fromkeys(each.kind for each in self.config.plan):
            learner = self.learner(kind)
            state = state_shapes(learner.parts, self.inputs.model.trained)
            episodes = LessonExperience(self, 0).longest(kind)
            found.append(
                Program(f"update of {kind}", learner.update, (state, episodes, *self.base))
            )
        return found

    # ---------------------------------------------------------------- stages

    def learner(self, kind: str) -> Learner:
        """How the stages of a kind learn; made once."""
        if kind not in self._learners:
            self._learners[kind] = learner_of(kind, self.config, self.mesh, self.inputs.model)
        return self._learners[kind]

    @cached_property
    def _learners(self) -> dict[str, Learner]:
        return {}

    @cached_property
    def base(self) -> tuple[Any, ...]:
        """What adapters are on, as updates take it; () if all weights are trained."""
        shardings = self.learner(self.config.plan[0].kind).policy.base_shardings
        if shardings is None:
            return ()
        put = placement.place if self.placed else placement.shapes_on
        return (put(self.inputs.model.loaded.stored, shardings),)

    def _updates(self, state: PolicyState) -> int:
        """Updates that the state has seen; asked of the device once, which would wait each time."""
        if self._step is None:
            self._step = int(jax.device_get(state.step))
        return self._step

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

        Raises:
            InputError: prompts are missing and cannot be made, or their file cannot be used.
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
        """Makes and keeps tries; the prompts must be there.

        Raises:
            InputError: so few prompts were made that a state would have one try.
        """
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

    @cached_property
    def player(self) -> EpisodePlayer:
        """Plays tries."""
        config, inputs = self.config, self.inputs
        rules = PlayRules(
            seed=config.seed,
            sampling=config.sampling,
            attempts=config.tries.attempts,
            max_failed_share=config.tries.max_failed_share,
            section="tries",
        )
        scene = Scene(inputs.model.loaded, inputs.agent, inputs.library, inputs.speech)
        base = self.base[0] if self.base else None
        return EpisodePlayer(rules, scene, self.mesh, base, self.served, self.counts)

    def play(self, state: PolicyState, stop: StopSignal) -> PlayBy:
        """Plays the tries that are learned from, by the weights of a state."""
        params: Any = state.params
        if self.served is None:
            return self._play_by(params, stop)
        versioned = Versioned(params, self._updates(state))

        def by_server(prompt: QueryPrompt, starts: Sequence[TokenStart]) -> list[TokenEpisode]:
            return self.player.on_server(versioned, starts, stop, agent=self._agent(prompt))

        return by_server

    def by_device(self, params: Any, stop: StopSignal, *, greedy: bool = False) -> Play:
        """Plays tries by these parameters, on the device that trains."""
        play = self._play_by(params, stop, greedy=greedy)
        return lambda starts: play(self.inputs.agent.prompt, starts)

    def _play_by(self, params: Any, stop: StopSignal, *, greedy: bool = False) -> PlayBy:
        def play(prompt: QueryPrompt, starts: Sequence[TokenStart]) -> list[TokenEpisode]:
            agent = self._agent(prompt)
            return self.player.on_device(params, starts, stop, greedy=greedy, agent=agent)

        return play

    def _agent(self, prompt: QueryPrompt) -> QueryAgent:
        return dataclasses.replace(self.inputs.agent, prompt=prompt)

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

        return QueryScores(play, config.eval.best_by)

    def counted(self) -> dict[str, float]:
        """What the tries of this start of the run needed."""
        asked = self.served.counts() if self.served is not None else {}
        return asked | {"failed_tries": float(self.counts.failed)}

    def _names(self, numbers: Sequence[int]) -> list[str]:
        script, before = self.inputs.script, max((self._step or 1) - 1, 0)
        if script is not None and self.config.stage_at(before).kind == SCRIPT:
            return [script.demonstrated[number][0].id for number in numbers]
        return [self.inputs.train[number].id for number in numbers]

    @property
    def _advice(self) -> str:
        return "a lower learning_rate of the stage (config.script, sft or preference), or "
