"""RLVR (github.com/bdsaglam/rlvr): a language model learns to search with tools, by GRPO.

The model is the policy; the tools over each question's documents are the environment. A stage of
imitation may come before that of rewards.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.environments.tools.bridge_tasks import bridge_task
from qrag_jax.environments.tools.demonstrations import Demonstration, draw_choices
from qrag_jax.environments.tools.episode import Closed, ToolTask
from qrag_jax.evaluators.tool_scores import REWARD, ToolScores
from qrag_jax.evaluators.training_scores import Evaluation
from qrag_jax.feedback.rubric import PARTS, score
from qrag_jax.learners import placement
from qrag_jax.learners.policy_state import (
    PolicyState,
    first_state,
    next_stage,
    state_shapes,
)
from qrag_jax.learners.token_update import (
    TokenEpisodes,
    episode_shardings,
    token_episodes,
)
from qrag_jax.rollouts.agent_experience import AgentExperience, Playing, QuestionOrder
from qrag_jax.rollouts.experience import Experience
from qrag_jax.rollouts.scripted_tokens import all_sampled, encoded, scripted_talk
from qrag_jax.rollouts.token_blocks import choose_shape
from qrag_jax.rollouts.token_episodes import (
    TokenCounts,
    TokenEpisode,
    facts_of,
)
from qrag_jax.rollouts.token_sampler import STOP
from qrag_jax.rollouts.trajectories import (
    DONE,
    BatchRules,
    TokenTrajectory,
    Turn,
    token_batch,
)
from qrag_jax.runtime.dry_run import Program
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import Run, log
from qrag_jax.runtime.saved_config import check_same_config, save_config
from qrag_jax.runtime.step_log import Told
from qrag_jax.systems import token_system
from qrag_jax.systems.episode_player import EpisodePlayer, PlayRules, Scene
from qrag_jax.systems.rlvr_config import FREE_FIELDS, GRPO, SFT, RlvrConfig, load_config
from qrag_jax.systems.rlvr_inputs import Inputs, load_inputs
from qrag_jax.systems.rlvr_stages import Stage, StagedOrder, stages_of
from qrag_jax.systems.served_policy import ServedPolicy, Versioned

_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
_SCRIPTED = "scripted"  # among the facts of a demonstration
_EVALUATED = 2**31 - 1  # in place of a step's number: no training step has it
_CHECKED = 8  # prompts by which a server that samples is checked


def check(config: ConfigDict) -> None:
    """Refuses values that are wrong for any data.

    Raises:
        InputError: a field is unknown, or its value makes no sense.
    """
    RlvrConfig.of(config)


def before_devices(given: ConfigDict, *, dry: bool = False, described: bool = False) -> str:
    """See `token_system`."""
    return token_system.before_devices(RlvrConfig.of(given), dry=dry, described=described)


@contextlib.contextmanager
def open_system(
    given: ConfigDict,
    run: Run,
    *,
    dry: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> Iterator[Rlvr]:
    """Opens the system, and the server that samples if the config has one; see `systems`."""
    if run.has_begun:
        check_same_config(load_config(run.config_path), given, FREE_FIELDS)
    config = RlvrConfig.of(given)
    opening = token_system.Opening(
        load=lambda mesh: load_inputs(config, run.workdir, mesh),
        save=lambda: save_config(given, run.config_path),
        alone="episodes with tools are played",
        staleness=config.tools.staleness,
    )
    with token_system.opened(config, run, opening, dry=dry, devices=devices) as found:
        yield Rlvr(
            config,
            found.mesh,
            found.inputs,
            placed=found.placed,
            keep=found.keep,
            served=found.served,
        )


@dataclasses.dataclass
class Rlvr:
    """See `systems.System`.

    Attributes:
        placed: else the mesh's devices are described, and only shapes are made.
        keep: saves the parameters at the end of a stage, with the steps done until then.
        served: what samples the episodes that are learned from; None: the device.
    """

    config: RlvrConfig
    mesh: Mesh
    inputs: Inputs
    placed: bool = True
    keep: Callable[[int, Any], None] = lambda step, params: None
    served: ServedPolicy | None = None

    def __post_init__(self) -> None:
        config, inputs = self.config, self.inputs
        self.train, self.profile, self.data = config.train, config.profile, inputs.data
        self.provenance: dict[str, Any] = {}
        self.told = Told(self._names, {"loss": ".3f", "return": ".2f"}, self._advice)
        self.counts = TokenCounts()
        self._step: int | None = None  # of the next update
        stages = []
        if SFT in config.stages:
            stages.append(
                f"{config.sft_steps} steps of imitating {config.sft.batch_size} scripted "
                "demonstrations"
            )
        if GRPO in config.stages:
            stages.append(
                f"{config.train.steps - config.sft_steps} steps of GRPO by "
                f"{config.train.batch_size} questions × {config.grpo.members} episodes"
            )
        self.line = (
            f"{len(inputs.train)} training questions, {len(inputs.dev)} scored every "
            f"{self.train.eval_every} steps; {', then '.join(stages)}; tools over each question's "
            f"documents by {config.tools.retriever}, on {self.mesh.size} "
            f"{Platform.of(self.mesh).kind} device(s)"
            f"{', sampled by vLLM' if self.served else ''}"
        )

    def first_state(self) -> PolicyState:
        """See `System`."""
        stage = self._stages[0]
        trained = self.inputs.model.trained
        return first_state(stage.policy.shardings, stage.parts, trained, self.config.seed)

    @property
    def param_shardings(self) -> Any:
        """Where the trained parameters lie."""
        return self._stages[0].policy.shardings.params

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
            staleness=config.tools.staleness,
            steps=config.train.steps,
        )
        done, pending = run.progress.batches or 0, run.progress.pending
        return AgentExperience(self._order, playing, self._counted, done, pending=pending)

    def update(self, state: PolicyState, episodes: TokenEpisodes) -> tuple[PolicyState, Any]:
        """See `System`."""
        step = self._updates(state)
        stage = self._stage(step)
        if step == stage.first > 0:
            self.keep(step, state.params)
            begin = partial(next_stage, stage.parts)
            state = jax.jit(begin, out_shardings=stage.policy.shardings)(state)
        self._step = step + 1
        with jax.transfer_guard("disallow"):
            return stage.update(state, episodes, *self._base)

    def evaluate(self, state: PolicyState, step: int, stop: StopSignal) -> Evaluation:
        """See `System`."""
        return self._scores.evaluate(state.params, step, stop)

    def programs(self) -> list[Program]:
        """See `System`: the updates by one batch of the longest rows there may be."""
        found = []
        for stage in self._stages:
            state = state_shapes(stage.parts, self.inputs.model.trained)
            episodes = self._batch_of_longest(stage)
            name = f"update by {type(stage.policy.config).__name__}"
            found.append(Program(name, stage.update, (state, episodes, *self._base)))
        return found

    def _updates(self, state: PolicyState) -> int:
        """Updates that the state has seen; asked of the device once, which would wait each time."""
        if self._step is None:
            self._step = int(jax.device_get(state.step))
        return self._step

    # ---------------------------------------------------------------- stages

    @cached_property
    def _stages(self) -> list[Stage]:
        return stages_of(self.config, self.mesh, self.inputs.model)

    def _stage(self, step: int) -> Stage:
        """The stage of a step."""
        return next(stage for stage in reversed(self._stages) if stage.first <= step)

    @cached_property
    def _base(self) -> tuple[Any, ...]:
        shardings = self._stages[0].policy.base_shardings
        if shardings is None:
            return ()
        put = placement.place if self.placed else placement.shapes_on
        return (put(self.inputs.model.loaded.stored, shardings),)

    # ---------------------------------------------------------------- episodes

    @cached_property
    def _order(self) -> Any:
        """Questions by batches; each stage has its own order, and its own size of batches."""
        config, inputs = self.config, self.inputs
        imitated = max(len(inputs.demonstrated), 1)
        return StagedOrder(
            config.sft_steps,
            QuestionOrder(imitated, config.sft.batch_size, config.seed),
            QuestionOrder(len(inputs.train), config.train.batch_size, config.seed),
        )

    def _weights(self, state: PolicyState) -> Any:
        """What `_play` takes."""
        params = _copied(state.params) if self.config.tools.staleness else state.params
        return params if self.served is None else Versioned(params, self._updates(state))

    def _check(self, served: ServedPolicy, stop: StopSignal) -> None:
        """Waits for the server, and compares what it samples with the weights of the start."""
        served.wait(stop)
        inputs = self.inputs
        params = placement.place(inputs.model.trained, self.param_shardings)
        prompts = [
            np.array(inputs.speech.scaffold.opening(inputs.agent.opening(task.question)), np.int32)
            for task in inputs.train[:_CHECKED]
        ]
        base = self._base[0] if self._base else None
        distance = served.check(params, base, prompts, stop)
        log(f"the server's log-probabilities are {distance:.2g} nats a token from the trainer's")

    def _play(
        self, params: Any, numbers: Sequence[int], step: int, stop: StopSignal
    ) -> list[TokenTrajectory]:
        """See `agent_experience.Playing`."""
        if step < self.config.sft_steps:
            return self._imitated(numbers, step)
        members, tasks = self.config.grpo.members, [self.inputs.train[n] for n in numbers]
        starts = self.player.starts(tasks, members, step)
        is_served = isinstance(params, Versioned)
        play = self.player.on_server if is_served else self.player.on_device
        episodes = play(params, starts, stop)
        return [
            self.trajectory(episode, numbers[place // members], place % members, start.task)
            for place, (start, episode) in enumerate(zip(starts, episodes, strict=True))
        ]

    def _imitated(self, numbers: Sequence[int], step: int) -> list[TokenTrajectory]:
        config, inputs, found = self.config, self.inputs, []
        for place, number in enumerate(numbers):
            question = inputs.demonstrated[number]
            index = step * config.sft.batch_size + place
            choices = draw_choices(config.demonstrations, config.seed, index)
            task = bridge_task(question)
            script = Demonstration(question, choices, config.tools.form)
            talk = scripted_talk(inputs.agent, task, script, inputs.library)
            episode = encoded(talk, inputs.speech)
            if config.sft.observed:
                episode = all_sampled(episode)
            each = self.trajectory(episode, number, 0, task)
            facts = {**each.facts, _SCRIPTED: True}
            found.append(dataclasses.replace(each, facts=facts))
        return found

    def trajectory(
        self, episode: TokenEpisode, question: int, member: int, task: ToolTask
    ) -> TokenTrajectory:
        """A played episode with the parts of its reward; none if it failed.

        Args:
            question: number of its question.
            member: its number among the episodes of this question.
        """
        ended, parts = episode.ended, {}
        if isinstance(ended, Closed):
            parts = score(ended, task)
            parts |= {REWARD: self.config.rubric.rubric.reward(parts, task.hops)}
        return TokenTrajectory(
            question=question,
            member=member,
            attempt=episode.attempts,
            segments=episode.segments,
            status=episode.status,
            parts=parts,
            facts=facts_of(ended),
        )

    def _batch(self, trajectories: Sequence[TokenTrajectory]) -> TokenEpisodes:
        """What an update takes, on the devices."""
        return jax.device_put(self._arrays(trajectories), episode_shardings(self.mesh))

    def _arrays(self, trajectories: Sequence[TokenTrajectory]) -> TokenEpisodes:
        """What an update takes, on the host."""
        config = self.config
        stage = self._stages[0] if _SCRIPTED in trajectories[0].facts else self._stages[-1]
        differ = config.rubric.differ_by
        names = (REWARD, differ) if differ else (REWARD,)
        rules = BatchRules(
            members=stage.policy.config.members,
            parts=names,
            truncated=config.tools.truncated,
            longest=config.sampling.room,
        )
        batch = token_batch(trajectories, rules)
        tokens = config.model.tokens(Platform.of(self.mesh))
        shape = choose_shape(batch, tokens, rules.members, room=config.sampling.room)
        return token_episodes(stage.policy, batch, shape, differ_by=1 if differ else None)

    @cached_property
    def player(self) -> EpisodePlayer:
        """Plays episodes."""
        base = self._base[0] if self._base else None
        config, inputs = self.config, self.inputs
        rules = PlayRules(
            seed=config.seed,
            sampling=config.sampling,
            attempts=config.tools.attempts,
            max_failed_share=config.tools.max_failed_share,
            section="tools",
        )
        scene = Scene(inputs.model.loaded, inputs.agent, inputs.library, inputs.speech)
        return EpisodePlayer(rules, scene, self.mesh, base, self.served, self.counts)

    @cached_property
    def _scores(self) -> ToolScores:
        config, tasks = self.config, self.inputs.dev

        def play(params: Any, stop: StopSignal) -> list[TokenEpisode]:
            starts = self.player.starts(tasks, 1, _EVALUATED)
            return self.player.on_device(params, starts, stop, greedy=config.eval.greedy)

        return ToolScores(tasks, play, config.rubric.rubric, config.eval.best_by)

    def _batch_of_longest(self, stage: Stage) -> Any:
        """Shapes of a batch whose rows are as long as they may be; half of each is sampled."""
        config, members = self.config, stage.policy.config.members
        imitates = stage.policy.config is config.sft
        groups = config.sft.batch_size if imitates else config.train.batch_size
        half = config.sampling.room // 2
        ids, log_probs = np.zeros(half, np.int32), np.zeros(half, np.float32)
        facts = {_SCRIPTED: True} if imitates else {}
        rewards = dict.fromkeys((*PARTS, REWARD), 0.0)
        episodes = self._arrays(
            [
                TokenTrajectory(
                    question=group,
                    member=member,
                    attempt=1,
                    segments=((Turn(ids, ids, log_probs, STOP),),),
                    status=DONE,
                    parts={**rewards, REWARD: float(member)},
                    facts=facts,
                )
                for group in range(groups)
                for member in range(members)
            ]
        )
        # Shapes alone: the devices of a dry run may be described ones.
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), episodes)

    def _counted(self) -> dict[str, float]:
        counts, asked = self.counts, self.served.counts() if self.served is not None else {}
        return asked | {
            "turns_per_batch": counts.turns / max(counts.batches, 1),
            "failed_episodes": float(counts.failed),
        }

    def _names(self, numbers: Sequence[int]) -> list[str]:
        return [self.inputs.train[number].id for number in numbers]

    @property
    def _advice(self) -> str:
        rate = self.config.optimizer.learning_rate
        return f"a lower --config.optimizer.learning_rate (it is {rate:g}), or "
