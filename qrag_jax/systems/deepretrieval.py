"""DeepRetrieval (arXiv 2503.00223): a language model learns to rewrite queries by what they find.

One query in, one rewritten query out; a search of it, in any engine, gives the reward. The model
learns by PPO with a critic, or by GRPO. Imitation of scripted rewritings may come before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.errors import InputError
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.evaluators.rewrite_rows import played_row
from qrag_jax.evaluators.rewrite_scores import RewriteScores
from qrag_jax.learners.optimizers import make_optimizer
from qrag_jax.learners.policy_state import PolicyState
from qrag_jax.learners.ppo_config import NONE
from qrag_jax.learners.ppo_update import make_ppo_update, ppo_episodes, ppo_shardings
from qrag_jax.learners.token_update import make_token_update
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import Messages
from qrag_jax.models.first_language_model import FirstLanguageModel
from qrag_jax.rollouts.agent_experience import QuestionOrder
from qrag_jax.rollouts.experience import Experience
from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.token_blocks import BlockShape
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.rollouts.trajectories import TokenTrajectory
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import put_whole
from qrag_jax.runtime.run import Run
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
    imitation_optimizer,
    make_stage,
)


@dataclasses.dataclass
class DeepRetrieval(BatchSystem[RewriteConfig, Inputs]):
    """See `systems.System`."""

    SECTION: ClassVar[str] = "rollout"
    NAME: ClassVar[str] = "deepretrieval"
    SHOWN: ClassVar[Mapping[str, str]] = {"loss": ".3f", "return": ".3f"}

    def __post_init__(self) -> None:
        super().__post_init__()
        config, inputs = self.config, self.inputs
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
        self.check_server(stop)
        return GuardedExperience(
            self._order,
            self._playing(),
            self._counted,
            self.guard,
            position=run.progress.batches,
            pending=run.progress.pending,
        )

    def _openings(self) -> Iterable[Messages]:
        prompt = self.inputs.agent.prompt
        return (prompt.messages(task) for task in self.inputs.train)

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
        """See `agent_experience.Playing`."""
        if step < self.config.first_steps:
            return self.episodes.imitated(numbers, step)
        members, tasks = self.config.rule.members, [self.inputs.train[n] for n in numbers]
        starts = self.player.starts(tasks, members, step)
        episodes = self.player.play(weights, starts, stop)
        patience = self.player.patience(stop, Failure)
        return self.episodes.trajectories(episodes, numbers, patience)

    def _batch(self, stage: Stage, trajectories: Sequence[TokenTrajectory]) -> Any:
        """What an update takes, on the devices."""
        if stage.kind == RL:
            self._shape = self.episodes.shape_of(trajectories)
        if not self._by_ppo(stage):
            return super()._batch(stage, trajectories)
        return put_whole(self._arrays(stage, trajectories), ppo_shardings(self.mesh))

    def _by_ppo(self, stage: Stage) -> bool:
        return stage.kind == RL and self.config.algorithm == PPO

    def _episodes(self, stage: Stage, batch: TokenBatch, shape: BlockShape) -> Any:
        if self._by_ppo(stage):
            return ppo_episodes(stage.policy, batch, shape)
        return super()._episodes(stage, batch, shape)

    def play(
        self,
        params: Any,
        tasks: Sequence[RewriteTask],
        stop: StopSignal,
        *,
        greedy: bool,
        stream: int = EVALUATED,
    ) -> list[TokenEpisode]:
        """Plays queries for evaluation; they find as many documents as its measures need.

        Args:
            greedy: the likeliest tokens.
            stream: another one has other draws.
        """
        agent = agent_of(self.config, self.config.eval.depth)
        starts = self.player.starts(tasks, 1, stream)
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

    def _groups(self, stage: Stage) -> int:
        return self.config.script.batch_size if stage.kind == SCRIPT else self.config.groups

    def _sampled(self, stage: Stage) -> int:
        config = self.config
        return config.writing.query_tokens if stage.kind == SCRIPT else config.learned_tokens

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
    return [_stage(kind, config, mesh, model) for kind in config.stages]


def _stage(kind: str, config: RewriteConfig, mesh: Mesh, model: FirstLanguageModel) -> Stage:
    rl, ppo, optimizer = RL in config.stages, config.algorithm == PPO, config.optimizer
    algorithm: Any = config.rule if kind == RL else config.script
    if kind == SCRIPT:
        steps = config.script.steps * config.script.epochs
        optimizer = imitation_optimizer(config.optimizer, config.script, steps)
    by_ppo, first = kind == RL and ppo, config.first_steps if kind == RL else 0
    per_batch = algorithm.updates_per_batch if by_ppo else algorithm.epochs
    # One state serves all stages, so all of them have a reference and a critic if one does.
    critic = None
    if rl and ppo and config.ppo.critic != NONE:
        rate = config.ppo.critic_learning_rate
        critic = make_optimizer(dataclasses.replace(config.optimizer, learning_rate=rate))
    return make_stage(
        config,
        mesh,
        model,
        kind,
        algorithm,
        optimizer=optimizer,
        make_update=make_ppo_update if by_ppo else make_token_update,
        first=first,
        step_of=lambda step: step - first * per_batch,
        weights=(1.0,),
        keeps_reference=rl and (config.ppo.kl if ppo else config.grpo.beta) > 0,
        critic_optimizer=critic,
        rests_until=first + config.ppo.critic_warmup if by_ppo else 0,
    )
