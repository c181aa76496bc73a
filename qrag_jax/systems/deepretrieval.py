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

from qrag_jax.environments.query_rewriting.task import RewriteTask, Rewritten
from qrag_jax.environments.tools.episode import Document, Look
from qrag_jax.evaluators.rewrite_scores import RewriteScores
from qrag_jax.evaluators.training_scores import Evaluation
from qrag_jax.feedback.rewrite_guards import GUARD_MEASURES, guard_measures
from qrag_jax.feedback.rewrite_reward import RewriteReward
from qrag_jax.learners import placement
from qrag_jax.learners.policy_state import PolicyState, first_state, state_shapes
from qrag_jax.learners.ppo_update import ppo_episodes, ppo_shardings
from qrag_jax.learners.token_update import episode_shardings, token_episodes
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import one_line
from qrag_jax.rollouts.agent_experience import AgentExperience, Playing, QuestionOrder
from qrag_jax.rollouts.experience import Experience
from qrag_jax.rollouts.scripted_tokens import Talk, all_sampled, encoded
from qrag_jax.rollouts.token_blocks import choose_shape
from qrag_jax.rollouts.token_episodes import TokenCounts, TokenEpisode, facts_of
from qrag_jax.rollouts.token_sampler import STOP
from qrag_jax.rollouts.trajectories import DONE, BatchRules, TokenTrajectory, Turn, token_batch
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
from qrag_jax.systems.deepretrieval_inputs import Inputs, agent_of, load_inputs
from qrag_jax.systems.deepretrieval_stages import Stage, stages_of
from qrag_jax.systems.episode_player import EpisodePlayer, PlayRules, Scene
from qrag_jax.systems.rlvr_stages import StagedOrder
from qrag_jax.systems.served_policy import ServedPolicy, Versioned

_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
_SCRIPTED = "scripted"  # among the facts of a demonstration
_REWARD = "reward"
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
            served=found.served,
        )


@dataclasses.dataclass
class DeepRetrieval:
    """See `systems.System`.

    Attributes:
        placed: else the mesh's devices are described, and only shapes are made.
        keep: saves the parameters at the end of a stage, with the steps done until then.
        served: what samples the episodes that are learned from; None: the device.
    """

    config: RewriteConfig
    mesh: Mesh
    inputs: Inputs
    placed: bool = True
    keep: Callable[[int, Any], None] = lambda step, params: None
    served: ServedPolicy | None = None

    def __post_init__(self) -> None:
        config, inputs = self.config, self.inputs
        self.train, self.profile, self.data = config.train, config.profile, inputs.data
        self.provenance: dict[str, Any] = {}
        self.told = Told(self._names, {"loss": ".3f", "return": ".3f"}, self._advice)
        self.counts = TokenCounts()
        self._step: int | None = None  # of the next update
        self._shape: dict[str, float] = {}  # of the queries of the last batch
        self._original: dict[tuple[str, str], float] = {}  # measures by collection and query
        self.reward = RewriteReward(config.reward)
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
        trained = self.inputs.model.trained
        return first_state(stage.policy.shardings, stage.parts, trained, self.config.seed)

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
        done, pending = run.progress.batches or 0, run.progress.pending
        return AgentExperience(self._order, playing, self._counted, done, pending=pending)

    def update(self, state: PolicyState, episodes: Any) -> tuple[PolicyState, Any]:
        """See `System`."""
        step = self._updates(state)
        stage = next(each for each in reversed(self.stages) if each.first <= step)
        if step == stage.first > 0:
            self.keep(step, state.params)
            state = stage.begin(state)
        self._step = step + 1
        with jax.transfer_guard("disallow"):
            return stage.update(state, episodes, *self.base)

    def evaluate(self, state: PolicyState, step: int, stop: StopSignal) -> Evaluation:
        """See `System`."""
        return self._scores.evaluate(state.params, step, stop)

    def programs(self) -> list[Program]:
        """See `System`: the updates by one batch of the longest rows there may be."""
        found = []
        for stage in self.stages:
            state = state_shapes(stage.parts, self.inputs.model.trained)
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
            return self._imitated(numbers, step)
        members, tasks = self.config.rule.members, [self.inputs.train[n] for n in numbers]
        starts = self.player.starts(tasks, members, step)
        is_served = isinstance(params, Versioned)
        play = self.player.on_server if is_served else self.player.on_device
        episodes = play(params, starts, stop)
        originals = self._originals(tasks)
        shapes, found = [], []
        for place, episode in enumerate(episodes):
            task, number = tasks[place // members], numbers[place // members]
            original = originals[place // members]
            found.append(self._trajectory(episode, (number, place % members), task, original))
            ended = episode.ended
            if isinstance(ended, Rewritten) and ended.answer:
                shapes.append(guard_measures(task.question, ended.answer, task.answers))
        self._shape = {
            name: float(np.mean([each[name] for each in shapes])) if shapes else float("nan")
            for name in GUARD_MEASURES
        } | _parts_of(found)
        return found

    def _imitated(self, numbers: Sequence[int], step: int) -> list[TokenTrajectory]:
        config, inputs, found = self.config, self.inputs, []
        assert inputs.script is not None
        for place, number in enumerate(numbers):
            shown = inputs.script.at(config, number, step * config.script.batch_size + place)
            talk = Talk(
                Rewritten(answer=shown.query),
                ((inputs.agent.prompt.messages(shown.task), shown.query),),
            )
            episode = encoded(talk, inputs.speech)
            if config.script.observed:
                episode = all_sampled(episode)
            found.append(
                TokenTrajectory(
                    question=number,
                    member=0,
                    attempt=1,
                    segments=episode.segments,
                    status=DONE,
                    parts={_REWARD: 0.0},
                    facts={_SCRIPTED: True},
                )
            )
        return found

    def _trajectory(
        self,
        episode: TokenEpisode,
        of: tuple[int, int],
        task: RewriteTask,
        original: float | Failure,
    ) -> TokenTrajectory:
        """A played episode with the parts of its reward; none if it, or the original, failed.

        Args:
            of: numbers of its query, and of it among the episodes of this query.
        """
        ended, status, parts = episode.ended, episode.status, {}
        if isinstance(original, Failure):
            status = original.cause
        elif isinstance(ended, Rewritten):
            parts = self.reward.of(task, ended, original)
        return TokenTrajectory(
            question=of[0],
            member=of[1],
            attempt=episode.attempts,
            segments=episode.segments,
            status=status,
            parts=parts,
            facts=facts_of(ended),
        )

    def _originals(self, tasks: Sequence[RewriteTask]) -> list[float | Failure]:
        """The measure of what each task's original query finds; a search is done once."""
        new = {(each.collection, each.id): each for each in tasks}
        new = {key: each for key, each in new.items() if key not in self._original}
        failed: dict[tuple[str, str], Failure] = {}
        for _ in range(self.config.rollout.attempts):
            if not new:
                break
            results = self.searched([*new.values()], self.config.reward.k)
            for key, found in zip([*new], results, strict=True):
                if isinstance(found, Failure):
                    failed[key] = found
                else:
                    self._original[key] = self.reward.measure(new.pop(key), found)
        keys = [(each.collection, each.id) for each in tasks]
        return [self._original[key] if key in self._original else failed[key] for key in keys]

    def searched(
        self, tasks: Sequence[RewriteTask], k: int, queries: Sequence[str] | None = None
    ) -> list[tuple[Document, ...] | Failure]:
        """What queries find, best first.

        Args:
            queries: None: the original ones.
        """
        given = [each.question for each in tasks] if queries is None else queries
        looks = [Look(one_line(query), k) for query in given]
        return self.inputs.library.look([*zip(tasks, looks, strict=True)])

    def _batch(self, trajectories: Sequence[TokenTrajectory]) -> Any:
        """What an update takes, on the devices."""
        scripted = _SCRIPTED in trajectories[0].facts
        is_ppo = not scripted and self.config.algorithm == PPO
        placed = ppo_shardings(self.mesh) if is_ppo else episode_shardings(self.mesh)
        return jax.device_put(self._arrays(trajectories), placed)

    def _arrays(self, trajectories: Sequence[TokenTrajectory]) -> Any:
        """What an update takes, on the host."""
        config = self.config
        scripted = _SCRIPTED in trajectories[0].facts
        policy = self.stages[0 if scripted else -1].policy
        rules = BatchRules(
            members=policy.config.members,
            parts=(_REWARD,),
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
            found = self.searched(tasks, config.eval.depth)
            return [() if isinstance(e, Failure) else tuple(d.id for d in e) for e in found]

        return RewriteScores(tasks, play, originals, config.eval.measures, config.eval.best_by)

    def _batch_of_longest(self, stage: Stage) -> Any:
        """Shapes of a batch whose rows are as long as they may be."""
        config, members = self.config, stage.policy.config.members
        scripted = stage.kind == SCRIPT
        groups = config.script.batch_size if scripted else config.groups
        after = config.writing.query_tokens
        ids, log_probs = np.zeros(after, np.int32), np.zeros(after, np.float32)
        before = np.zeros(config.sampling.room - after, np.int32)
        episodes = self._arrays(
            [
                TokenTrajectory(
                    question=group,
                    member=member,
                    attempt=1,
                    segments=((Turn(before, ids, log_probs, STOP),),),
                    status=DONE,
                    parts={_REWARD: float(member)},
                    facts={_SCRIPTED: True} if scripted else {},
                )
                for group in range(groups)
                for member in range(members)
            ]
        )
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


def _parts_of(trajectories: Sequence[TokenTrajectory]) -> dict[str, float]:
    """Means of the parts of rewards but the reward itself, over the episodes that have them."""
    rows = [each.parts for each in trajectories if each.parts]
    names = [name for name in (rows[0] if rows else {}) if name != _REWARD]
    return {f"train/{name}": float(np.mean([row[name] for row in rows])) for name in names}
