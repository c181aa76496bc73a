"""RLVR (github.com/bdsaglam/rlvr): a language model learns to search with tools, by GRPO.

The model is the policy; the tools over each question's documents are the environment. A stage of
imitation may come before that of rewards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from qrag_jax.algorithms.policy_gradient import DR_GRPO
from qrag_jax.environments.tools.demonstrations import Demonstration, draw_choices
from qrag_jax.environments.tools.documents import bridge_task
from qrag_jax.environments.tools.episode import Closed, ToolTask
from qrag_jax.errors import InputError
from qrag_jax.evaluators.tool_scores import REWARD, ToolScores
from qrag_jax.feedback.llm import OWN_CAUSES, FeedbackLost, Unscored
from qrag_jax.feedback.rubric import OWN_PATH, OwnRubric, reward_of, score
from qrag_jax.learners.optimizers import (
    learning_rate_schedule,
    make_optimizer,
)
from qrag_jax.learners.policy_state import Parts
from qrag_jax.learners.token_config import SFTConfig, TokenGRPOConfig
from qrag_jax.learners.token_update import (
    TokenEpisodes,
    make_token_update,
    token_episodes,
)
from qrag_jax.metrics.predictions import Prediction
from qrag_jax.models.first_language_model import FirstLanguageModel
from qrag_jax.rollouts.experience import AgentExperience, Experience, QuestionOrder
from qrag_jax.rollouts.scripted_tokens import all_sampled, encoded, scripted_talk
from qrag_jax.rollouts.token_blocks import BlockShape
from qrag_jax.rollouts.token_episodes import (
    Speech,
    TokenEpisode,
    facts_of,
)
from qrag_jax.rollouts.trajectories import (
    TokenBatch,
    TokenTrajectory,
)
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run, log
from qrag_jax.runtime.step_log import Told
from qrag_jax.systems.config import CAUSES
from qrag_jax.systems.rlvr_config import FREE_FIELDS, GRPO, PATHS, SFT, RlvrConfig, load_config
from qrag_jax.systems.rlvr_inputs import Inputs, load_inputs, told_documents
from qrag_jax.systems.token_system import (
    EVALUATED,
    SCRIPTED,
    BatchSystem,
    Opening,
    Stage,
    StagedOrder,
    StageRules,
    check_server,
    imitation_optimizer,
    make_stage,
)

_WHY = "message"  # among the facts of an episode for which a user's rubric gave no reward


@dataclasses.dataclass
class Rlvr(BatchSystem[RlvrConfig, Inputs]):
    """See `systems.System`."""

    SECTION: ClassVar[str] = "tools"
    NAME: ClassVar[str] = "rlvr"

    def __post_init__(self) -> None:
        super().__post_init__()
        config, inputs = self.config, self.inputs
        self._rubric, self._unscored = config.rubric.load(), 0
        if isinstance(self._rubric, OwnRubric):
            code = self._rubric.code
            self.provenance = {OWN_PATH: f"{code.spec} {code.digest}"}
            log(f"rewards by {code.spec}, which runs in this process, without a sandbox")
        self.told = Told(
            self._names, {"loss": ".3f", "return": ".2f"}, self._advice, CAUSES["rlvr"]
        )
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
            f"{self.train.eval_every} steps; {', then '.join(stages)}; tools over "
            f"{told_documents(config.tools)} by {config.tools.retriever}, {self._where}"
        )

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        """See `System`; a server that samples is checked first."""
        agent = self.inputs.agent
        check_server(self, (agent.opening(task.question) for task in self.inputs.train), stop)
        done, pending = run.progress.batches or 0, run.progress.pending
        return AgentExperience(self._order, self.playing(), self._counted, done, pending=pending)

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages, in their order."""
        return stages_of(self.config, self.mesh, self.inputs.model)

    # ---------------------------------------------------------------- episodes

    @cached_property
    def _order(self) -> Any:
        """Questions by batches; each stage has its own order, and its own size of batches."""
        config, inputs = self.config, self.inputs
        imitated = max(len(inputs.demonstrated), 1)
        easy = sorted(range(len(inputs.train)), key=lambda number: inputs.train[number].hops)
        return StagedOrder(
            config.sft_steps,
            QuestionOrder(imitated, config.sft.batch_size, config.seed),
            QuestionOrder(
                len(inputs.train),
                config.train.batch_size,
                config.seed,
                first=easy if config.tasks.easy_first else None,
            ),
        )

    def _play(
        self, weights: Any, numbers: Sequence[int], step: int, stop: StopSignal
    ) -> list[TokenTrajectory]:
        """See `experience.Playing`."""
        if step < self.config.sft_steps:
            return self._imitated(numbers, step)
        config, tasks = self.config, [self.inputs.train[n] for n in numbers]
        members = config.grpo.members
        starts = self.player.starts(tasks, members, step)
        episodes = self.player.play(weights, starts, stop)
        found = [
            self.trajectory(episode, numbers[place // members], place % members, start.task)
            for place, (start, episode) in enumerate(zip(starts, episodes, strict=True))
        ]
        lost = [each for each in found if each.status in OWN_CAUSES]
        self._unscored += len(lost)
        if len(lost) > config.tools.max_failed_share * len(found):
            raise FeedbackLost(
                f"{len(lost)} of {len(found)} episodes have no reward (for example: "
                f"{lost[0].facts[_WHY]}); mend it, or raise config.tools.max_failed_share"
            )
        return found

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
            facts = {**each.facts, SCRIPTED: True}
            found.append(dataclasses.replace(each, facts=facts))
        return found

    def trajectory(
        self, episode: TokenEpisode, question: int, member: int, task: ToolTask
    ) -> TokenTrajectory:
        """A played episode with the parts of its reward; none if it, or a user's rubric, failed.

        Args:
            question: number of its question.
            member: its number among the episodes of this question.
        """
        ended, parts, status = episode.ended, {}, episode.status
        facts = facts_of(ended)
        if isinstance(ended, Closed):
            measured = score(ended, task)
            reward = reward_of(self._rubric, ended, task, measured)
            if isinstance(reward, Unscored):
                status, facts = reward.cause, {**facts, _WHY: reward.message}
            else:
                parts = measured | {REWARD: reward}
        return TokenTrajectory(
            question=question,
            member=member,
            attempt=episode.attempts,
            segments=episode.segments,
            status=status,
            parts=parts,
            facts=facts,
        )

    @property
    def _learned_parts(self) -> tuple[str, ...]:
        differ = self.config.rubric.differ_by
        return (REWARD, differ) if differ else (REWARD,)

    def _episodes(self, stage: Stage, batch: TokenBatch, shape: BlockShape) -> TokenEpisodes:
        differ_by = 1 if self.config.rubric.differ_by else None
        return token_episodes(stage.policy, batch, shape, differ_by=differ_by)

    @cached_property
    def _scores(self) -> ToolScores:
        config, tasks = self.config, self.inputs.dev

        def play(params: Any, stop: StopSignal) -> list[TokenEpisode]:
            starts = self.player.starts(tasks, 1, EVALUATED)
            return self.player.on_device(params, starts, stop, greedy=config.eval.greedy)

        texts = TurnTexts(self.inputs.speech)

        def logged(places: Sequence[int], episodes: Sequence[TokenEpisode]) -> list[Prediction]:
            return [
                prediction_of(tasks[place], self.trajectory(each, place, 0, tasks[place]), texts)
                for place, each in zip(places, episodes, strict=True)
            ]

        return ToolScores(tasks, play, self._rubric, config.eval.best_by, logged)

    def _longest(self, stage: Stage) -> TokenEpisodes:
        """A batch whose rows are as long as they may be; half of each is sampled."""
        config, imitates = self.config, stage.kind == SFT
        groups = config.sft.batch_size if imitates else config.train.batch_size
        return self._arrays(self._full(stage, groups, config.sampling.room // 2, scripted=imitates))

    def _counted(self) -> dict[str, float]:
        counts = self.counted()
        return self._of_server() | {
            "turns_per_batch": counts.turns / max(counts.batches, 1),
            "failed_episodes": float(counts.failed),
            **({"unscored_episodes": float(self._unscored)} if self.config.rubric.path else {}),
        }

    def _names(self, numbers: Sequence[int]) -> list[str]:
        return [self.inputs.train[number].id for number in numbers]


OPENING = Opening(
    system=Rlvr,
    config=RlvrConfig.of,
    saved=load_config,
    free=FREE_FIELDS,
    paths=PATHS,
    load=load_inputs,
)
before_devices = OPENING.before_devices


def check(given: ConfigDict) -> None:
    """See `Opening.check`; `grpo.longest` is checked here, since no scoring of a run reads it."""
    config = RlvrConfig.of(given)
    turns = config.env.max_turns if config.env.verifiers else config.tools.max_turns
    room = config.sampling.room
    most = min(turns * config.tools.turn_tokens, config.env.max_tokens or room, room)
    grpo = config.grpo
    if GRPO in config.stages and grpo.aggregation == DR_GRPO and grpo.longest < most:
        raise InputError(
            f"config.grpo.longest is {grpo.longest}, and an episode may sample {most} tokens (its "
            f"{turns} turns of config.tools.turn_tokens, within config.sampling.room); raise it."
        )


def open_system(
    given: ConfigDict,
    run: Run,
    *,
    dry: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> AbstractContextManager[Any]:
    """Opens the system: with our own tools, or in an environment of verifiers (config.env)."""
    if given.get("env", {}).get("verifiers"):
        from qrag_jax.systems.rlvr_environment import open_environment

        return open_environment(given, run, dry=dry, devices=devices)
    return OPENING.open_system(given, run, dry=dry, devices=devices)


def stages_of(config: RlvrConfig, mesh: Mesh, model: FirstLanguageModel) -> list[Stage]:
    """The stages of a config, in their order."""
    width = model.loaded.model.trunk.config.hidden_size
    return [make_stage(config, mesh, model, _rules(kind, config, width)) for kind in config.stages]


def _rules(kind: str, config: RlvrConfig, width: int) -> StageRules:
    algorithm: SFTConfig | TokenGRPOConfig = config.sft if kind == SFT else config.grpo
    optimizer = config.optimizer
    if kind == SFT:
        optimizer = imitation_optimizer(optimizer, config.sft, config.sft.steps)
    first = 0 if kind == SFT else config.sft_steps
    schedule = learning_rate_schedule(optimizer)
    # One state serves all stages, so all of them keep a reference if one needs it.
    keeps = GRPO in config.stages and config.grpo.beta > 0
    return StageRules(
        kind=kind,
        algorithm=algorithm,
        parts=Parts(make_optimizer(optimizer), None, keeps, width),
        # A part that groups must differ by is a second reward, of no weight.
        weights=(1.0, 0.0) if config.rubric.differ_by else (1.0,),
        schedule=lambda step: schedule(step - first * algorithm.epochs),
        make_update=make_token_update,
        first=first,
    )


class TurnTexts:
    """The texts of turns, as a whole and token by token."""

    def __init__(self, speech: Speech) -> None:
        self._speech, self._known = speech, dict[int, str]()

    def of(self, trajectory: TokenTrajectory) -> list[dict[str, Any]]:
        """See `predictions.Prediction.turns`."""
        return [
            {
                "segment": number,
                "observed": self._decoded(turn.observed.tolist()),
                "sampled": self._speech.text(turn.sampled),
                "observed_tokens": [self._token(each) for each in turn.observed.tolist()],
                "sampled_tokens": [self._token(each) for each in turn.sampled.tolist()],
            }
            for number, segment in enumerate(trajectory.segments)
            for turn in segment
        ]

    def _token(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decoded([token])
        return self._known[token]

    def _decoded(self, ids: list[int]) -> str:
        return self._speech.tokenizer.decode(ids, skip_special_tokens=False)


def prediction_of(task: ToolTask, trajectory: TokenTrajectory, texts: TurnTexts) -> Prediction:
    """The prediction of an episode."""
    return Prediction(
        id=task.id,
        question=task.question,
        answers=[*task.answers],
        hops=task.hops,
        draw=trajectory.member,
        prediction=trajectory.facts.get("answer", ""),
        reward=trajectory.parts.get(REWARD),
        turns=texts.of(trajectory),
        trajectory=trajectory.to_json(),
    )
