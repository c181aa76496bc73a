"""DeepRetrieval (arXiv 2503.00223): a language model learns to rewrite queries by what they find.

One query in, one rewritten query out; a search of it, in any engine, gives the reward. The model
learns by PPO with a critic, or by GRPO. Imitation of scripted rewritings may come before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.errors import InputError
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.evaluators.rewrite_rows import played_row
from qrag_jax.evaluators.rewrite_scores import RewriteScores
from qrag_jax.learners.optimizers import (
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
)
from qrag_jax.learners.policy_state import Parts, PolicyState
from qrag_jax.learners.ppo_config import NONE
from qrag_jax.learners.ppo_update import make_ppo_update, ppo_episodes, ppo_shardings
from qrag_jax.learners.token_update import make_token_update
from qrag_jax.llm.outcomes import Failure
from qrag_jax.models.first_language_model import FirstLanguageModel
from qrag_jax.rollouts.experience import Experience, QuestionOrder
from qrag_jax.rollouts.token_blocks import BlockShape
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.rollouts.trajectories import TokenBatch, TokenTrajectory
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import put_whole
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.step_log import Told
from qrag_jax.systems.config import CAUSES
from qrag_jax.systems.deepretrieval_config import (
    FREE_FIELDS,
    PATHS,
    PPO,
    RL,
    SCRIPT,
    RewriteConfig,
    load_config,
)
from qrag_jax.systems.deepretrieval_episodes import (
    GuardedExperience,
    RewriteEpisodes,
    RewriteGuard,
)
from qrag_jax.systems.deepretrieval_inputs import Inputs, agent_of, load_inputs
from qrag_jax.systems.query_search import REMOTE
from qrag_jax.systems.token_system import (
    EVALUATED,
    BatchSystem,
    Opening,
    Stage,
    StagedOrder,
    StageRules,
    check_server,
    imitation_optimizer,
    make_stage,
)


@dataclasses.dataclass
class DeepRetrieval(BatchSystem[RewriteConfig, Inputs]):
    """See `systems.System`."""

    SECTION: ClassVar[str] = "rollout"
    NAME: ClassVar[str] = "deepretrieval"

    def __post_init__(self) -> None:
        super().__post_init__()
        config, inputs = self.config, self.inputs
        self.told = Told(
            self._names, {"loss": ".3f", "return": ".3f"}, self._advice, CAUSES["deepretrieval"]
        )
        self._shape: dict[str, float] = {}  # of the queries of the last batch
        self.episodes = RewriteEpisodes(config, inputs)
        self.guard = RewriteGuard(config.guards)
        told = []
        if SCRIPT in config.stages:
            told.append(
                f"{config.first_steps} steps of imitating {config.script.batch_size} scripted "
                "rewritings"
            )
        if RL in config.stages:
            told.append(
                f"{config.train.steps - config.first_steps} steps of {config.algorithm.upper()} by "
                f"{config.groups} queries × {config.rule.members}"
            )
        self.line = (
            f"{len(inputs.train)} training queries, {len(inputs.dev)} that choose the best "
            f"checkpoint, searched by {config.search.engine}; {', then '.join(told)}; "
            f"{self._where}"
        )

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        """See `System`; a server that samples is checked first."""
        prompt = self.inputs.agent.prompt
        check_server(self, (prompt.messages(task) for task in self.inputs.train), stop)
        return GuardedExperience(
            self._order,
            self.playing(),
            self._counted,
            self.guard,
            position=run.progress.batches,
            pending=run.progress.pending,
        )

    def update(self, state: PolicyState, episodes: Any) -> tuple[PolicyState, Any]:
        """See `System`."""
        stage, state = self._at_stage(state)
        state, metrics = self._learned(stage, state, episodes)
        if stage.kind == RL and self.guard.metrics:
            found = {name: metrics[name] for name in self.guard.metrics if name in metrics}
            self.guard.look(self._shape | jax.device_get(found))
        return state, metrics

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages, in their order."""
        return stages_of(self.config, self.mesh, self.inputs.model)

    # ---------------------------------------------------------------- episodes

    @cached_property
    def _order(self) -> Any:
        """Queries by batches; each stage has its own order, and its own size of batches."""
        config, inputs = self.config, self.inputs
        shown = len(inputs.script.given) if inputs.script is not None else 1
        return StagedOrder(
            config.first_steps,
            QuestionOrder(shown, config.script.batch_size, config.seed),
            QuestionOrder(len(inputs.train), config.groups, config.seed),
        )

    @property
    def _turn(self) -> int:
        """See `TokenSystem`."""
        return self.config.rollout.query_tokens

    def _play(
        self, weights: Any, numbers: Sequence[int], step: int, stop: StopSignal
    ) -> list[TokenTrajectory]:
        """See `experience.Playing`."""
        if step < self.config.first_steps:
            return self.episodes.imitated(numbers, step)
        members, tasks = self.config.rule.members, [self.inputs.train[n] for n in numbers]
        starts = self.player.starts(tasks, members, step)
        episodes = self.player.play(weights, starts, stop)
        patience = self.player.patience(stop, Failure)
        return self.episodes.trajectories(episodes, numbers, patience)

    def _batch(self, trajectories: Sequence[TokenTrajectory]) -> Any:
        """What an update takes, on the devices."""
        if self._stage_of(trajectories).kind != RL:
            return super()._batch(trajectories)
        self._shape = self.episodes.shape_of(trajectories)
        if self.config.algorithm != PPO:
            return super()._batch(trajectories)
        return put_whole(self._arrays(trajectories), ppo_shardings(self.mesh))

    def _episodes(self, stage: Stage, batch: TokenBatch, shape: BlockShape) -> Any:
        if stage.kind == RL and self.config.algorithm == PPO:
            return ppo_episodes(stage.policy, batch, shape)
        return super()._episodes(stage, batch, shape)

    def play(
        self, params: Any, tasks: Sequence[RewriteTask], stop: StopSignal, *, greedy: bool
    ) -> list[TokenEpisode]:
        """Plays queries for evaluation; they find as many documents as its measures need."""
        agent = agent_of(self.config, self.config.eval.depth)
        starts = self.player.starts(tasks, 1, EVALUATED)
        return self.player.on_device(params, starts, stop, greedy=greedy, agent=agent)

    @cached_property
    def _scores(self) -> RewriteScores:
        config, tasks = self.config, self.inputs.dev

        def play(params: Any, stop: StopSignal) -> list[TokenEpisode]:
            return self.play(params, tasks, stop, greedy=config.eval.greedy)

        def originals(stop: StopSignal) -> list[tuple[str, ...] | None]:
            stop.check()
            patience = self.player.patience(stop, Failure)
            found = self.episodes.originals.found(tasks, config.eval.depth, patience)
            return [None if isinstance(e, Failure) else tuple(d.id for d in e) for e in found]

        def logged(places: Sequence[int], episodes: Sequence[TokenEpisode]) -> list[RewriteRow]:
            speech, form = self.inputs.speech, config.writing.kind.form
            return [
                played_row(tasks[place], each, speech, form)
                for place, each in zip(places, episodes, strict=True)
            ]

        measures, best_by = config.eval.measures, config.eval.best_by
        return RewriteScores(tasks, play, originals, measures, best_by, logged)

    def _longest(self, stage: Stage) -> Any:
        """A batch whose rows are as long as they may be."""
        config, scripted = self.config, stage.kind == SCRIPT
        groups = config.script.batch_size if scripted else config.groups
        sampled = config.writing.query_tokens if scripted else config.learned_tokens
        return self._arrays(self._full(stage, groups, sampled, scripted=scripted))

    def _counted(self) -> dict[str, float]:
        library = self.inputs.library
        own = np.array([library.searched, library.asked])
        searched, asked = hosts.of_each(own).sum(axis=0).tolist()
        return (
            self._of_server()
            | {name: value for name, value in self._shape.items() if not np.isnan(value)}
            | {
                "failed_episodes": float(self.counted().failed),
                "searches": float(searched),
                "kept_search_share": 1.0 - searched / max(asked, 1),
            }
        )

    def _names(self, numbers: Sequence[int]) -> list[str]:
        if self._latest < self.config.first_steps:
            return [f"demonstration {number}" for number in numbers]
        return [self.inputs.train[number].id for number in numbers]


def _load(config: RewriteConfig, workdir: Path, mesh: Mesh) -> Inputs:
    if config.search.engine == REMOTE and jax.process_count() > 1:
        raise InputError(
            f"config.search.engine is {REMOTE!r}, which each of {jax.process_count()} hosts would "
            "ask for the original queries; start one process."
        )
    return load_inputs(config, workdir, mesh, test=config.queries.test)


OPENING = Opening(
    system=DeepRetrieval,
    config=RewriteConfig.of,
    saved=load_config,
    free=FREE_FIELDS,
    paths=PATHS,
    load=_load,
)
check, before_devices, open_system = OPENING.check, OPENING.before_devices, OPENING.open_system


def stages_of(config: RewriteConfig, mesh: Mesh, model: FirstLanguageModel) -> list[Stage]:
    """The stages of a config, in their order."""
    found = []
    if SCRIPT in config.stages:
        steps = config.script.steps * config.script.epochs
        optimizer = imitation_optimizer(config.optimizer, config.script, steps)
        found.append(_rules(config, model, SCRIPT, optimizer))
    if RL in config.stages:
        found.append(_rules(config, model, RL, config.optimizer))
    return [make_stage(config, mesh, model, rules) for rules in found]


def _rules(
    config: RewriteConfig, model: FirstLanguageModel, kind: str, optimizer: OptimizerConfig
) -> StageRules:
    learns, ppo = kind == RL, config.algorithm == PPO
    algorithm: Any = config.rule if learns else config.script
    first = config.first_steps if learns else 0
    per_batch = algorithm.updates_per_batch if learns and ppo else algorithm.epochs
    schedule, critic = learning_rate_schedule(optimizer), _critic(config)
    return StageRules(
        kind=kind,
        algorithm=algorithm,
        parts=_parts(config, make_optimizer(optimizer), critic, model),
        weights=(1.0,),
        schedule=lambda step: schedule(step - first * per_batch),
        make_update=make_ppo_update if learns and ppo else make_token_update,
        first=first,
        critic_optimizer=critic,
        rests_until=first + config.ppo.critic_warmup if learns and ppo else 0,
    )


def _critic(config: RewriteConfig) -> optax.GradientTransformation | None:
    if RL not in config.stages or config.algorithm != PPO or config.ppo.critic == NONE:
        return None
    rate = config.ppo.critic_learning_rate
    return make_optimizer(dataclasses.replace(config.optimizer, learning_rate=rate))


def _parts(
    config: RewriteConfig,
    optimizer: optax.GradientTransformation,
    critic: optax.GradientTransformation | None,
    model: FirstLanguageModel,
) -> Parts:
    """One state serves all stages, so all of them have a reference and a critic if one does."""
    ppo = config.algorithm == PPO
    weight = config.ppo.kl if ppo else config.grpo.beta
    return Parts(
        optimizer,
        critic,
        keeps_reference=RL in config.stages and weight > 0,
        width=model.loaded.model.trunk.config.hidden_size,
    )
