"""Scores an RLVR run: its model answers the evaluation questions by several weights and retrievers.

The weights are a trained checkpoint, those at the end of imitation if they are kept, and the
untrained ones. What is scored are the files of predictions that this writes: every episode, token
by token, whose draws depend on the numbers of its question and of its draw alone.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.evaluators.eval_config import report_on
from qrag_jax.metrics import prediction_scores
from qrag_jax.metrics.bootstrap import mean_interval
from qrag_jax.metrics.rows import PREDICTIONS, TOOL_EPISODES, Prediction, scored_episodes
from qrag_jax.rollouts.schedule import draw_keys
from qrag_jax.rollouts.token_episodes import Library
from qrag_jax.rollouts.trajectories import TRUNCATED
from qrag_jax.runtime.embedding_files import encoder_key
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.rlvr import Rlvr, load_inputs, open_library
from qrag_jax.systems.rlvr_config import GRPO, SFT, RlvrConfig
from qrag_jax.systems.rlvr_environment import TRACE, EnvironmentRlvr, load_environment
from qrag_jax.systems.saved_token_run import FIRST, IMITATED, SavedWeights, Weights, mesh_of_run
from qrag_jax.systems.scoring import (
    ASKED,
    NOT_KEPT,
    PlayedParts,
    ScoreOptions,
    are_others,
    of_others,
    write_summary,
)
from qrag_jax.systems.token_system import fingerprint

_PREDICTED = 2**31 - 4  # in place of a step's number: no step has it, and no evaluation
# Sections of the config that episodes of given weights do not depend on. The questions have a
# digest of their own.
_OF_TRAINING = (
    *("train", "optimizer", "runtime", "profile", "demonstrations"),
    *("sft", "grpo", "stages", "eval", "questions", "llm"),
)
_OF_QUESTIONS = ("questions.", "tasks.")

PREDICTED_BY = "predictions"  # the log of an environment, which has no retriever


def score_language_model(workdir: Path, given: ConfigDict, options: ScoreOptions) -> dict[str, Any]:
    """Scores the run's checkpoint; returns the summary."""
    given = given.copy_and_resolve_references()
    if given.env.verifiers and options.retrievers:
        raise InputError(
            f"--retrievers={','.join(options.retrievers)} is for questions of our own, and the "
            f"run's environment is {given.env.verifiers!r}; leave it out."
        )
    are_others(workdir, given, _OF_QUESTIONS, options.out)
    others = bool(of_others(workdir, given, ASKED))
    chose = report_on(given, options.samples, others=others)
    out = options.out or workdir / "eval"
    retrievers = options.retrievers or (given.tools.retriever,)
    if given.env.verifiers:
        retrievers = (PREDICTED_BY,)
    if len(set(retrievers)) < len(retrievers):
        raise InputError(f"--retrievers={','.join(retrievers)} names one twice; give each once.")
    logs: dict[str, dict[str, Path]] = {name: {} for name in retrievers}
    notes = []
    with open_player(given, workdir, workdir) as player:
        for name in retrievers:  # refused before anything is played
            player.library(name)
        trained = player.weights(options.checkpoint)
        assert trained is not None
        halves = player.system.inputs.drawn.summary(chose, others=others)
        for which in (None, IMITATED, FIRST):
            weights = trained if which is None else player.weights(which)
            if weights is None:
                if step := player.imitation_ends:
                    notes.append(f"after imitation, step {step}, is not here: {NOT_KEPT}")
                continue
            for name in retrievers:
                log = logs[name][weights.told] = out / weights.name / f"{name}.jsonl"
                player.predict(weights, log, name, options.sampled, restart=options.restart)
    summarise = environment_summary if given.env.verifiers else _summary
    summary, lines = summarise(player, logs, trained.told, options)
    summary = write_summary(out, given, summary | {"questions": halves, "notes": notes})
    print("\n".join([*lines, *(f"note: {note}" for note in notes), halves["line"]]))
    print(f"predictions and summary: {out}")
    return summary


Logs = Mapping[str, Mapping[str, Path]]  # by retriever, then by what the weights are


def _summary(
    player: Player, logs: Logs, main: str, options: ScoreOptions
) -> tuple[dict[str, Any], list[str]]:
    """The summary, and the lines of its table."""
    files, scores, gains = ({name: dict[str, Any]() for name in logs} for _ in range(3))
    groups, differences = dict[str, Any](), dict[str, Any]()
    for name, own in logs.items():
        trained = scored_episodes(own[main])
        for told, log in own.items():
            # Each log is in the folder of its weights, in that of all.
            files[name][told] = f"{log.parent.name}/{log.name}"
            rows = scored_episodes(log)
            scores[name][told] = found = prediction_scores.summarised(rows)
            groups[f"{name}, {told}"] = found
            if told != main:
                gains[name][told] = gain = prediction_scores.gains(trained, rows)
                differences[f"{name}, gain over {told}"] = gain
    about = {"retriever": next(iter(logs)), "weights": main}
    summary: dict[str, Any] = {"main": about, "scores": scores, "gains": gains, "files": files}
    return summary, prediction_scores.table(groups, differences)


def played_config(given: ConfigDict) -> dict[str, Any]:
    """The sections of a config that episodes of given weights depend on, as JSON has them."""
    every = given.to_dict().items()
    return json.loads(json.dumps({name: each for name, each in every if name not in _OF_TRAINING}))


@dataclasses.dataclass(frozen=True)
class Player:
    """Predicts with the model of one run."""

    given: ConfigDict  # the config, with the questions that are asked
    system: Any  # the run's, with tools or in an environment of verifiers
    workdir: Path | None  # the run's folder; None: there is no run, and the model is untrained
    stop: StopSignal
    libraries: dict[str, Library | None]  # what the tools read, by the retriever's name

    def weights(self, which: str) -> Weights | None:
        """The weights of one of `CHECKPOINTS`; see `SavedWeights.named`."""
        which = which if self.workdir else FIRST
        return SavedWeights(self.system).named(which, self.imitation_ends, "after imitation")

    @property
    def imitation_ends(self) -> int:
        """The step at which a stage of rewards takes over from one of imitation; 0: none does."""
        both = {SFT, GRPO} <= set(self.system.config.stages)
        return self.system.config.imitated if both else 0

    @property
    def retriever(self) -> str:
        """The run's own, by which a log is named."""
        return next(iter(self.libraries))

    def library(self, retriever: str) -> Library | None:
        """What the tools read with a retriever; it is made once. None: of an environment."""
        if retriever not in self.libraries:
            config = self.system.config
            tools = dataclasses.replace(config.tools, retriever=retriever)
            other = dataclasses.replace(config, tools=tools)
            self.libraries[retriever] = open_library(other, self.system.mesh)
        return self.libraries[retriever]

    def predict(
        self,
        weights: Weights,
        log: Path,
        retriever: str,
        sampled: int = 0,
        *,
        restart: bool = False,
    ) -> None:
        """Plays all questions that the file lacks; see `PlayedParts`.

        Args:
            retriever: what the tool that searches uses.
            sampled: episodes drawn for each question; 0: one, as `config.eval.greedy` says.
        """
        system, library, draws = self.system, self.library(retriever), sampled or 1
        config = system.config
        greedy = not sampled and config.eval.greedy

        def play(asked: Sequence[Any], first: int) -> list[Prediction]:
            keys = keys_of(config.seed, first, len(asked), draws)
            return system.predict(
                weights.params, asked, keys, self.stop, first=first, greedy=greedy, library=library
            )

        parts = PlayedParts(
            rows=PREDICTIONS,
            asked=system.asked,
            # As many episodes side by side as in training, whose memory is known to suffice.
            size=max(1, config.train.batch_size * config.grpo.members // draws),
            play=play,
            is_of=lambda row, asked: row.id == system.id_of(asked),
            names=("question", "questions"),
            draws=draws,
        )
        played = played_config(self.given)
        played["tools"]["retriever"] = retriever
        record = {
            "kind": TOOL_EPISODES,
            "checkpoint": weights.told,
            "retriever": retriever,
            "questions": len(system.asked),
            "sampled": sampled,
            "greedy": greedy,
            "data": system.inputs.data,
            "asked": fingerprint((system.id_of(each),) for each in system.asked),
            "weights": encoder_key(weights.params, {}),
            "rewards": {**system.provenance},
            "config": played,
        }
        parts.into(log, record, self.stop, restart=restart)


@contextlib.contextmanager
def open_player(given: ConfigDict, workdir: Path | None, folder: Path) -> Iterator[Player]:
    """Opens the model of a run, or that of a config, and the questions to ask.

    Args:
        given: the config; `questions.dev` and `eval.samples` say what is asked.
        workdir: the run's folder; None: the config's own model, untrained.
        folder: where a tiny model is, or is made.
    """
    config = RlvrConfig.of(given)
    mesh = mesh_of_run(config, workdir)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        if config.env.verifiers:
            environment = EnvironmentRlvr(
                config, mesh, load_environment(config, folder, mesh), folder
            )
            stack.callback(environment.close)
            yield Player(given, environment, workdir, stop, {PREDICTED_BY: None})
            return
        inputs = load_inputs(config, folder, mesh, trains=False)
        libraries: dict[str, Library | None] = {config.tools.retriever: inputs.library}
        yield Player(given, Rlvr(config, mesh, inputs, folder), workdir, stop, libraries)


def keys_of(seed: int, first: int, tasks: int, draws: int) -> np.ndarray:
    """Keys of the draws `[task, draw]` of the questions `first`, `first + 1`, …"""
    key = jax.random.fold_in(jax.random.key(seed), _PREDICTED)
    return np.asarray(draw_keys(key, np.arange(first, first + tasks, dtype=np.uint32), draws))


# ---------------------------------------------------------------- environments of verifiers

TRACES = "traces.jsonl"  # the file that verifiers writes


def environment_summary(
    player: Player, logs: Logs, main: str, options: ScoreOptions
) -> tuple[dict[str, Any], list[str]]:
    """See `_summary`; writes the file that verifiers itself would write beside each log."""
    system, scores, lines = player.system, dict[str, Any](), list[str]()
    for told, log in logs[PREDICTED_BY].items():
        facts = [row.trajectory["facts"] for row in PREDICTIONS.each(log)]
        traces = log.with_name(TRACES)
        write_whole(traces, "".join(f"{each[TRACE]}\n" for each in facts))
        rows = scored_episodes(log)
        scores[told] = _means([_measured(row) for row in rows if row.reward is not None], len(rows))
        lines.append(f"{told}: {scores[told]['failed_share']:.0%} without a reward ({traces})")
        for name, own in scores[told].items():
            if isinstance(own, dict):
                interval = f"[{own['low']:.3f}, {own['high']:.3f}]"
                lines.append(f"  {name:24} {own['mean']:.3f} {interval}, std {own['std']:.3f}")
        ends = collections.Counter(each["stop"] for each in facts if "stop" in each)
        shares = (f"{name} {count / ends.total():.0%}" for name, count in ends.most_common())
        lines.append(f"  ended by: {', '.join(shares)}")
    about = {
        "environment": system.config.env.verifiers,
        "verifiers": system.inputs.about.version,
        "main": main,
        "tasks": len(system.asked),
        "episodes_per_task": options.sampled or 1,
        "scores": scores,
    }
    return about, lines


def _measured(row: Prediction) -> dict[str, float]:
    """The parts of the reward of an episode, and its counts."""
    tally = row.trajectory["facts"]["tally"]
    return {
        **row.parts,
        "turns": float(tally["turns"]),
        "truncated": float(row.trajectory["status"] == TRUNCATED),
        "sampled_tokens": float(tally["sampled_tokens"]),
    }


def _means(rows: Sequence[Mapping[str, float]], episodes: int) -> dict[str, Any]:
    """The mean of each score with its interval, and the share of episodes without a reward."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        mean, low, high = mean_interval(values)
        found[name] = {"mean": mean, "low": low, "high": high, "std": float(np.std(values))}
    return found | {"failed_share": 1 - len(rows) / episodes if episodes else 0.0}
