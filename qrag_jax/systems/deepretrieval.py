"""DeepRetrieval (arXiv 2503.00223): a language model learns to rewrite queries by what they find.

One query in, one rewritten query out; a search of it, in any engine, gives the reward. The model
learns by PPO with a critic, or by GRPO. Imitation of scripted rewritings may come before.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.evaluators.rewrite_scores import RewriteScores
from qrag_jax.evaluators.training_scores import Evaluation
from qrag_jax.learners import placement
from qrag_jax.learners.policy_state import PolicyState, first_state, state_shapes
from qrag_jax.learners.ppo_update import ppo_episodes, ppo_shardings
from qrag_jax.learners.token_update import episode_shardings, token_episodes
from qrag_jax.llm.outcomes import Failure
from qrag_jax.rollouts.agent_experience import Playing, QuestionOrder
from qrag_jax.rollouts.experience import Experience
from qrag_jax.rollouts.token_blocks import choose_shape
from qrag_jax.rollouts.token_episodes import TokenCounts, TokenEpisode
from qrag_jax.rollouts.trajectories import BatchRules, TokenTrajectory, token_batch
from qrag_jax.runtime.dry_run import Program
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import Run, log
from qrag_jax.runtime.saved_config import check_same_config, save_config
from qrag_jax.runtime.step_log import Told
from qrag_jax.systems import token_system
from qrag_jax.systems.deepretrieval_config import (
    FREE_FIELDS,
    PPO,
    RL,
    SCRIPT,
    RewriteConfig,
    load_config,
)
from qrag_jax.systems.deepretrieval_episodes import REWARD, SCRIPTED, RewriteEpisodes, longest
from qrag_jax.systems.deepretrieval_inputs import Inputs, agent_of, load_inputs
from qrag_jax.systems.deepretrieval_stages import Stage, stages_of
from qrag_jax.systems.episode_player import EpisodePlayer, PlayRules, Scene
from qrag_jax.systems.rewrite_guard import GuardedExperience, RewriteGuard
from qrag_jax.systems.rlvr_stages import StagedOrder
from qrag_jax.systems.served_policy import ServedPolicy, Versioned

_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
EVALUATED = 2**31 - 1  # in place of a step's number: no training step has it
_CHECKED = 8  # prompts by which a server that samples is checked


def check(config: ConfigDict) -> None:
    """Refuses values that are wrong for any data.

    Raises:
        InputError: a field is unknown, or its value makes no sense.
    """
    RewriteConfig.of(config)


def before_devices(given: ConfigDict, *, dry: bool = False, described: bool = False) -> str:
    """See `token_system`."""
    return token_system.before_devices(RewriteConfig.of(given), dry=dry, described=described)


@contextlib.contextmanager
def open_system(
    given: ConfigDict,
    run: Run,
    *,
    dry: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> Iterator[DeepRetrieval]:
    """Opens the system, and the server that samples if the config has one; see `systems`."""
    if run.has_begun:
        check_same_config(load_config(run.config_path), given, FREE_FIELDS)
    config = RewriteConfig.of(given)
    opening = token_system.Opening(
        load=lambda mesh: load_inputs(config, run.workdir, mesh, test=config.queries.test),
        save=lambda: save_config(given, run.config_path),
        alone="queries are rewritten",
        staleness=config.rollout.staleness,
    )
    with token_system.opened(config, run, opening, dry=dry, devices=devices) as found:
        yield DeepRetrieval(
            config,
            found.mesh,
            found.inputs,
            placed=found.placed,
            keep=found.keep,
            kept=found.kept,
            last=found.last,
            served=found.served,
        )


@dataclasses.dataclass
class DeepRetrieval:
    """See `systems.System`.

    Attributes:
        placed: else the mesh's devices are described, and only shapes are made.
        keep: saves the parameters at the end of a stage, with the steps done until then.
        kept, last: see `token_system.Opened`.
        served: what samples the episodes that are learned from; None: the device.
    """

    config: RewriteConfig
    mesh: Mesh
    inputs: Inputs
    placed: bool = True
    keep: Callable[[int, Any], None] = lambda step, params: None
    kept: Callable[[int, Any], Any | None] = lambda step, template: None
    last: Callable[[Any], tuple[Any, int] | None] = lambda template: None
    served: ServedPolicy | None = None

    def __post_init__(self) -> None:
        config, inputs = self.config, self.inputs
        self.train, self.profile, self.data = config.train, config.profile, inputs.data
        self.provenance: dict[str, Any] = {}
        self.told = Told(self._names, {"loss": ".3f", "return": ".3f"}, self._advice)
        self.counts = TokenCounts()
        self._step: int | None = None  # of the next update
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
            f"checkpoint, searched by {config.search.engine}; {', then '.join(told)}; on "
            f"{self.mesh.size} {Platform.of(self.mesh).kind} device(s)"
            f"{', sampled by vLLM' if self.served else ''}"
        )

    def first_state(self) -> PolicyState:
        """See `System`."""
        stage = self.stages[0]
        given = self.inputs.model.trained, self.config.seed, *self.base
        return first_state(stage.policy.shardings, stage.parts, *given)

    @property
    def param_shardings(self) -> Any:
        """Where the trained parameters lie."""
        return self.stages[0].policy.shardings.params

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        """See `System`; a server that samples is checked first."""
        config = self.config
        if self.served is not None:
            self._check(self.served, stop)
        playing = Playing(
            play=self._play,
            batch=self._batch,
            save=TokenTrajectory.to_json,
            restore=TokenTrajectory.from_json,
            params=self._weights,
            staleness=config.rollout.staleness,
            steps=config.train.steps,
        )
        return GuardedExperience(
            self._order,
            playing,
            self._counted,
            self.guard,
            position=run.progress.batches,
            pending=run.progress.pending,
        )

    def update(self, state: PolicyState, episodes: Any) -> tuple[PolicyState, Any]:
        """See `System`."""
        step = self._updates(state)
        stage = next(each for each in reversed(self.stages) if each.first <= step)
        if step == stage.first > 0:
            self.keep(step, state.params)
            state = stage.begin(state, *self.base)
        if self.guard.back:
            state, self.guard.back = self._stepped_back(state, stage), False
        self._step = step + 1
        with jax.transfer_guard("disallow"):
            state, metrics = stage.update(state, episodes, *self.base)
        if stage.kind == RL and self.guard.metrics:
            found = {name: metrics[name] for name in self.guard.metrics if name in metrics}
            self.guard.look(self._shape | jax.device_get(found))
        return state, metrics

    def _stepped_back(self, state: PolicyState, stage: Stage) -> PolicyState:
        """The state of the last checkpoint, or of the stage's start; its counts go on."""
        found = self.last(state)
        if found is not None and found[1] > stage.first:
            return found[0]._replace(step=state.step, env_steps=state.env_steps)
        params = self.kept(stage.first, state.params) if stage.first else None
        if params is None:
            trained = self.inputs.model.trained
            params = placement.place(trained, self.param_shardings)
        return stage.begin(state._replace(params=params), *self.base)

    def evaluate(self, state: PolicyState, step: int, stop: StopSignal) -> Evaluation:
        """See `System`."""
        return self._scores.evaluate(state.params, step, stop)

    def programs(self) -> list[Program]:
        """See `System`: the updates by one batch of the longest rows there may be."""
        found, model = [], self.inputs.model
        for stage in self.stages:
            state = state_shapes(stage.parts, model.trained, model.base)
            name = f"update by {type(stage.policy.config).__name__}"
            found.append(
                Program(name, stage.update, (state, self._batch_of_longest(stage), *self.base))
            )
        return found

    def _updates(self, state: PolicyState) -> int:
        """Updates that the state has seen; asked of the device once, which would wait each time."""
        if self._step is None:
            self._step = int(jax.device_get(state.step))
        return self._step

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages, in their order."""
        return stages_of(self.config, self.mesh, self.inputs.model)

    @cached_property
    def base(self) -> tuple[Any, ...]:
        """What adapters are on, as updates take it; () if all weights are trained."""
        shardings = self.stages[0].policy.base_shardings
        if shardings is None:
            return ()
        put = placement.place if self.placed else placement.shapes_on
        return (put(self.inputs.model.loaded.stored, shardings),)

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

    def _weights(self, state: PolicyState) -> Any:
        """What `_play` takes."""
        params = _copied(state.params) if self.config.rollout.staleness else state.params
        return params if self.served is None else Versioned(params, self._updates(state))

    def _check(self, served: ServedPolicy, stop: StopSignal) -> None:
        """Waits for the server, and compares what it samples with the weights of the start."""
        served.wait(stop)
        inputs = self.inputs
        params = placement.place(inputs.model.trained, self.param_shardings)
        prompts = [
            np.array(inputs.speech.scaffold.opening(inputs.agent.prompt.messages(task)), np.int32)
            for task in inputs.train[:_CHECKED]
        ]
        base = self.base[0] if self.base else None
        distance = served.check(params, base, prompts, stop)
        log(f"the server's log-probabilities are {distance:.2g} nats a token from the trainer's")

    def _play(
        self, params: Any, numbers: Sequence[int], step: int, stop: StopSignal
    ) -> list[TokenTrajectory]:
        """See `agent_experience.Playing`."""
        if step < self.config.first_steps:
            return self.episodes.imitated(numbers, step)
        members, tasks = self.config.rule.members, [self.inputs.train[n] for n in numbers]
        starts = self.player.starts(tasks, members, step)
        is_served = isinstance(params, Versioned)
        play = self.player.on_server if is_served else self.player.on_device
        episodes = play(params, starts, stop)
        patience = self.player.patience(stop, Failure)
        return self.episodes.trajectories(episodes, numbers, patience)

    def _batch(self, trajectories: Sequence[TokenTrajectory]) -> Any:
        """What an update takes, on the devices."""
        scripted = SCRIPTED in trajectories[0].facts
        if not scripted:
            self._shape = self.episodes.shape_of(trajectories)
        is_ppo = not scripted and self.config.algorithm == PPO
        placed = ppo_shardings(self.mesh) if is_ppo else episode_shardings(self.mesh)
        return jax.device_put(self._arrays(trajectories), placed)

    def _arrays(self, trajectories: Sequence[TokenTrajectory]) -> Any:
        """What an update takes, on the host."""
        config = self.config
        scripted = SCRIPTED in trajectories[0].facts
        policy = self.stages[0 if scripted else -1].policy
        rules = BatchRules(
            members=policy.config.members,
            parts=(REWARD,),
            truncated=config.rollout.truncated,
            longest=config.sampling.room,
        )
        batch = token_batch(trajectories, rules)
        tokens = config.model.tokens(Platform.of(self.mesh))
        shape = choose_shape(batch, tokens, rules.members, room=config.sampling.room)
        if not scripted and config.algorithm == PPO:
            return ppo_episodes(policy, batch, shape)
        return token_episodes(policy, batch, shape)

    @cached_property
    def player(self) -> EpisodePlayer:
        """Plays episodes."""
        config, inputs = self.config, self.inputs
        rules = PlayRules(
            seed=config.seed,
            sampling=config.sampling,
            attempts=config.rollout.attempts,
            max_failed_share=config.rollout.max_failed_share,
            section="rollout",
        )
        scene = Scene(inputs.model.loaded, inputs.agent, inputs.library, inputs.speech)
        base = self.base[0] if self.base else None
        return EpisodePlayer(rules, scene, self.mesh, base, self.served, self.counts)

    def play(
        self,
        params: Any,
        tasks: Sequence[RewriteTask],
        stop: StopSignal,
        *,
        greedy: bool,
        draws: int = 1,
    ) -> list[TokenEpisode]:
        """Plays queries for evaluation; they find as many documents as its measures need.

        Args:
            draws: episodes of a query, which are neighbours.
        """
        agent = agent_of(self.config, self.config.eval.depth)
        starts = self.player.starts(tasks, draws, EVALUATED)
        return self.player.on_device(params, starts, stop, greedy=greedy, agent=agent)

    @cached_property
    def _scores(self) -> RewriteScores:
        config, tasks = self.config, self.inputs.dev

        def play(params: Any, stop: StopSignal) -> list[TokenEpisode]:
            return self.play(params, tasks, stop, greedy=config.eval.greedy)

        def originals(stop: StopSignal) -> list[tuple[str, ...]]:
            stop.check()
            patience = self.player.patience(stop, Failure)
            found = self.episodes.originals.found(tasks, config.eval.depth, patience)
            return [() if isinstance(e, Failure) else tuple(d.id for d in e) for e in found]

        return RewriteScores(tasks, play, originals, config.eval.measures, config.eval.best_by)

    def _batch_of_longest(self, stage: Stage) -> Any:
        """Shapes of a batch whose rows are as long as they may be."""
        scripted = stage.kind == SCRIPT
        groups = self.config.script.batch_size if scripted else self.config.groups
        members = stage.policy.config.members
        episodes = self._arrays(longest(self.config, groups, members, scripted=scripted))
        # Shapes alone: the devices of a dry run may be described ones.
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), episodes)

    def _counted(self) -> dict[str, float]:
        counts, library = self.counts, self.inputs.library
        asked = self.served.counts() if self.served is not None else {}
        return (
            asked
            | {name: value for name, value in self._shape.items() if not np.isnan(value)}
            | {
                "failed_episodes": float(counts.failed),
                "searches": float(library.searched),
                "kept_search_share": 1.0 - library.searched / max(library.asked, 1),
            }
        )

    def _names(self, numbers: Sequence[int]) -> list[str]:
        if max((self._step or 1) - 1, 0) < self.config.first_steps:
            return [f"demonstration {number}" for number in numbers]
        return [self.inputs.train[number].id for number in numbers]

    @property
    def _advice(self) -> str:
        rate = self.config.optimizer.learning_rate
        return f"a lower --config.optimizer.learning_rate (it is {rate:g}), or "
