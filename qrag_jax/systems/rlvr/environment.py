"""RLVR on an environment of `verifiers`: its tasks, tools, ends and rewards; our policy and update.

The environment is played in a process of its own (`rollouts.environment_play`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.environments.episode import Failed, ToolTask
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import well_formed
from qrag_jax.llm.text.scaffolds import ChatRenderer, content_text
from qrag_jax.metrics.bootstrap import columns_of, means, score_table, with_intervals
from qrag_jax.metrics.row_log import PREDICTIONS, scored_episodes
from qrag_jax.rollouts import environment_play
from qrag_jax.rollouts.token_episodes import Counts, Episode
from qrag_jax.rollouts.trajectories import REWARD, TokenTrajectory
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import log
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.rlvr.config import EnvironmentConfig, RlvrConfig
from qrag_jax.systems.rlvr.system import ToolSystem, episode_columns
from qrag_jax.systems.scoring import Logs, Predictor
from qrag_jax.systems.token_system import TokenInputs, starts_of, token_inputs

TRACE = "trace"  # among the facts of a prediction: what verifiers itself would write, as JSON
TRACES = "traces.jsonl"  # the file that verifiers writes
MODEL = "policy"  # its name for environments
LOG = "verifiers.log"
ENDLESS = 1000  # tasks that are taken of a taskset that has no end
_HELD_OUT = 10  # one task of so many is scored


@dataclasses.dataclass(frozen=True, slots=True)
class EnvironmentTask(ToolTask):
    """A task of the environment; its question is the last text of its first messages."""

    number: int = 0  # its number there


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentInputs(TokenInputs):
    """What a run reads; the environment plays elsewhere."""

    process: environment_play.EnvironmentProcess
    about: environment_play.About
    renderer: ChatRenderer


def _task(number: int, about: environment_play.About) -> EnvironmentTask:
    name = question = f"train-{number}"
    if number < len(about.prompts) and about.prompts[number]:  # else they are not known here
        question = content_text(about.prompts[number][-1].get("content"))
    return EnvironmentTask(name, question, (), hops=0, number=number)


def load_environment(config: RlvrConfig, workdir: Path, mesh: Mesh, **_: Any) -> EnvironmentInputs:
    """Starts the process, prepares the model, and looks at the first prompts."""
    env = config.env
    if jax.process_count() > 1:
        raise InputError(f"config.env.verifiers is for one host, not {jax.process_count()}.")
    fields = {
        "id": env.verifiers,
        "arguments": env.given(),
        "model": MODEL,
        "limits": {
            "seconds": env.seconds,
            "turns": env.max_turns,
            "tokens": env.max_tokens,
            "turn_tokens": config.tools.turn_tokens,
        },
        "tasks": env.tasks,
        "endless": ENDLESS,
        "harness": env.harness,
    }
    with contextlib.ExitStack() as unless_opened:
        process = environment_play.EnvironmentProcess(env.interpreter(), workdir / LOG, fields)
        unless_opened.callback(process.end)
        try:
            about = process.start(lambda: None)
        except environment_play.ProcessLost as lost:
            raise InputError(f"config.env.verifiers={env.verifiers}: {lost}; mend it.") from None
        train, dev = ([_task(number, about) for number in part] for part in _split(env, about))
        log(
            f"environment {env.verifiers} by verifiers {about.version}, in a process of "
            f"its own, without a sandbox: {len(train)} tasks to train, {len(dev)} to score"
        )
        inputs = token_inputs(
            config,
            workdir,
            mesh,
            turn=config.tools.turn_tokens,
            texts=lambda: (
                well_formed(content_text(message.get("content")))
                for messages in about.prompts
                for message in messages
            ),
            train=train,
            dev=dev,
            data={"questions": about.digest, "verifiers": about.version},
        )
        renderer = ChatRenderer(inputs.model.tokenizer, config.tools.form, config.thinking)
        _check_prompts(config, about, renderer)
        unless_opened.pop_all()
        return EnvironmentInputs(process=process, about=about, renderer=renderer, **vars(inputs))


def _split(env: EnvironmentConfig, about: environment_play.About) -> tuple[range, range]:
    """Tasks to train and to score: some of them are held out."""
    count = min(about.tasks, env.tasks or about.tasks)
    if not count:
        raise InputError(f"config.env.verifiers: {env.verifiers} has no tasks; name another.")
    if count == 1:
        log("the environment has one task; it is trained on and scored")
        return range(1), range(1)
    train = count - max(count // _HELD_OUT, 1)
    return range(train), range(train, count)


def _check_prompts(
    config: RlvrConfig, about: environment_play.About, renderer: ChatRenderer
) -> None:
    for number, messages in enumerate(about.prompts):
        try:
            tokens = len(renderer.opening(messages, [])) if messages else 0
        except InputError as lost:
            raise InputError(
                f"task {number} of config.env.verifiers cannot be shown to the model: {lost}."
            ) from None
        if tokens >= config.sampling.room:
            raise InputError(
                f"the first prompt of task {number} has {tokens} tokens, and config.sampling.room "
                f"is {config.sampling.room}; raise it, up to the model's positions."
            )


_ADVICE = (
    "mend the environment (see verifiers.log in the run's folder), give it other arguments or "
    "limits (config.env), or raise config.{section}.max_failed_share"
)


@dataclasses.dataclass(kw_only=True)
class EnvironmentRlvr(ToolSystem):
    LOAD = staticmethod(load_environment)

    def __post_init__(self) -> None:
        super().__post_init__()
        config, inputs = self.config, self.inputs
        self.provenance = {"env.verifiers": f"{config.env.verifiers} {inputs.about.code}"}
        self._parts: dict[str, float] = {}  # means over the last batch
        self.line = (
            f"{len(inputs.train)} tasks of {config.env.verifiers}, {len(inputs.dev)} scored "
            f"every {self.train.eval_every} steps; {config.train.steps} steps of GRPO by "
            f"{config.train.batch_size} tasks × {config.grpo.members} episodes, {self._where}"
        )

    def close(self) -> None:
        self.inputs.process.end()

    def _openings(self) -> Iterator[Any]:
        for messages in self.inputs.about.prompts:
            if messages:
                yield tuple(self.inputs.renderer.text(message) for message in messages)

    # ---------------------------------------------------------------- episodes

    def _played(self, *how: Any) -> list[TokenTrajectory]:
        trajectories = super()._played(*how)
        self._parts = means(columns_of(trajectory.parts for trajectory in trajectories))
        return trajectories

    def episodes(
        self, weights: Any, tasks: Sequence[Any], keys: np.ndarray, stop: StopSignal, **how: Any
    ) -> list[Episode]:
        starts = starts_of([task.number for task in tasks], keys)
        greedy = how.get("greedy", False)
        sampler, watch = self.acting(weights, stop, greedy=greedy)()
        play = self._environments[greedy].play
        patience = self.patience(watch, advice=_ADVICE)
        return patience.play(starts, lambda starts: play(starts, sampler, watch))

    @cached_property
    def _environments(self) -> dict[bool, environment_play.EnvironmentPlay]:
        """By whether the likeliest tokens are sampled."""
        config, inputs, env = self.config, self.inputs, self.config.env
        drawn = environment_play.PlaySettings(
            turn=config.tools.turn_tokens,
            room=config.sampling.room,
            tokens=env.max_tokens,
            temperature=config.sampling.temperature,
            seconds=env.seconds,
            attempts=config.tools.attempts,
            side_by_side=env.side_by_side,
            renderer=inputs.renderer,
        )
        ways = {False: drawn, True: dataclasses.replace(drawn, temperature=None)}
        kind, process = environment_play.EnvironmentPlay, inputs.process
        return {greedy: kind(process, how, self.counts) for greedy, how in ways.items()}

    def trajectory(
        self, episode: Episode, of: tuple[int, int], task: EnvironmentTask, *more: Any
    ) -> TokenTrajectory:
        ended = episode.ended
        turns = [turn for segment in episode.segments for turn in segment]
        tally = {"turns": len(turns), "sampled_tokens": sum(len(turn.sampled) for turn in turns)}
        facts: dict[str, Any] = {"tally": tally, "cited": [], "seen": []}
        parts, record = dict[str, float](), dict[str, Any]()  # `record`: verifiers' own
        if isinstance(ended, Failed):
            facts["message"] = ended.message
            record = {"error": {"error": ended.cause, "message": ended.message}, "reward": None}
        else:
            assert isinstance(ended, environment_play.Scored)
            parts = {**ended.parts, REWARD: ended.reward}
            if REWARD in ended.parts:  # a part has the name of the whole
                parts[f"{REWARD}_part"] = ended.parts[REWARD]
            facts |= {"answer": "", "stop": ended.stop, "outside": ended.outside}
            record = {**ended.record}
        facts[TRACE] = json.dumps(record)
        at = task.number, of[1], episode.attempts
        return TokenTrajectory(*at, episode.segments, episode.status, parts, facts)

    def _counted(self, counts: Counts) -> dict[str, float]:
        return super()._counted(counts) | {
            "lost_processes": float(counts.lost),
            "untrained_tokens": float(counts.outside),
            **{f"env/{name}": value for name, value in self._parts.items()},
        }

    def summary(self, predictor: Predictor, logs: Logs) -> tuple[dict[str, Any], list[str]]:
        """The file that verifiers itself would write is written next to each log."""
        scores, ended = dict[str, dict[str, Any]](), list[str]()
        for label, path in logs:
            facts = [row.trajectory["facts"] for row in PREDICTIONS.each(path)]
            traces = path.with_name(TRACES)
            write_whole(traces, "".join(f"{episode[TRACE]}\n" for episode in facts))
            rows = scored_episodes(path)
            columns = columns_of(
                episode_columns(
                    row.parts, row.trajectory["facts"]["tally"], row.trajectory["status"]
                )
                for row in rows
                if row.reward is not None
            )
            lost = sum(row.reward is None for row in rows) / max(len(rows), 1)
            scores[label] = with_intervals(columns) | {"failed_share": lost}
            for name, values in columns.items():
                scores[label][name]["std"] = float(np.std(values))
            ends = collections.Counter(episode["stop"] for episode in facts if "stop" in episode)
            shares = (f"{name} {count / ends.total():.0%}" for name, count in ends.most_common())
            ended.append(f"{label} ended by: {', '.join(shares)} ({traces})")
        names = dict.fromkeys(name for score in scores.values() for name in score)
        del names["failed_share"]
        table = score_table(scores.items(), [*names], {"no reward": "{failed_share:.0%}"})
        about = {
            "environment": self.config.env.verifiers,
            "verifiers": self.inputs.about.version,
            "main": logs[0][0],
            "tasks": len(self.inputs.dev),
            "episodes_per_task": len(rows) // len(self.inputs.dev),
            "scores": scores,
        }
        return about, [*table, *ended]
