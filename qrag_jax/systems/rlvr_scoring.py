"""Scores an RLVR run: its model answers the evaluation questions by several weights and retrievers.

The weights are a trained checkpoint, those at the end of imitation if they are kept, and the
untrained ones. What is scored are the files of predictions that this writes: every episode, token
by token, whose draws depend on the numbers of its question and of its draw alone.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.evaluators.token_scores import episode_columns
from qrag_jax.metrics.bootstrap import interval_text, with_intervals
from qrag_jax.metrics.rows import PREDICTIONS, TOOL_EPISODES, Prediction, scored_episodes
from qrag_jax.metrics.summaries import episode_gains, episode_summary, episode_table
from qrag_jax.rollouts.schedule import draw_keys
from qrag_jax.rollouts.token_episodes import Library
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.rlvr import Rlvr, load_inputs, open_library
from qrag_jax.systems.rlvr_config import RlvrConfig
from qrag_jax.systems.rlvr_environment import TRACE, EnvironmentRlvr, load_environment
from qrag_jax.systems.scoring import (
    Predictor,
    Questions,
    ScoreOptions,
    begin_scoring,
    beside,
    end_scoring,
    mesh_of_run,
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


def score_language_model(workdir: Path, raw: ConfigDict, options: ScoreOptions) -> dict[str, Any]:
    """Scores the run's checkpoint; returns the summary."""
    if raw.env.verifiers and options.retrievers:
        raise InputError(
            f"--retrievers={','.join(options.retrievers)} is for questions of our own, and the "
            f"run's environment is {raw.env.verifiers!r}; leave it out."
        )
    if len(set(options.retrievers)) < len(options.retrievers):
        raise InputError(f"--retrievers={','.join(options.retrievers)}: give each once.")
    raw, out, halves = begin_scoring(workdir, raw, options, _OF_QUESTIONS)
    with open_players(raw, workdir, workdir, options.retrievers, options.sampled) as players:
        player = next(iter(players.values()))
        ways = (
            each.way(weights, f"{weights.name}/{name}")
            for weights in player.ways(options.checkpoint)
            for name, each in players.items()
        )
        found, notes = player.questions.played(out, ways, {}, player.stop, restart=options.restart)
        questions = halves(player.system.inputs.drawn)
    logs: dict[str, dict[str, Path]] = {name: {} for name in players}
    for way, log in found:
        logs[log.stem][way.label] = log
    summarise = environment_summary if raw.env.verifiers else _summary
    summary, lines = summarise(player.system, logs, found[0][0].label, options)
    summary |= {"questions": questions, "notes": [*dict.fromkeys(notes)]}
    return end_scoring(out, raw, summary, [*lines, questions["line"]])


Logs = Mapping[str, Mapping[str, Path]]  # by retriever, then by what the weights are


def _summary(
    system: Any, logs: Logs, main: str, options: ScoreOptions
) -> tuple[dict[str, Any], list[str]]:
    """The summary, and the lines of its table."""
    scores, gains, files = (dict[str, dict[str, Any]]() for _ in range(3))
    for name, own in logs.items():
        rows = {label: scored_episodes(log) for label, log in own.items()}
        found = beside(rows, main, episode_summary, episode_gains)
        scores[name], gains[name] = found["scores"], found["gains"]
        # Each log is in the folder of its weights, in that of all.
        files[name] = {label: f"{log.parent.name}/{log.name}" for label, log in own.items()}
    shown, differences = (
        {f"{name}, {of}{label}": each for name in logs for label, each in tree[name].items()}
        for of, tree in (("", scores), ("gain over ", gains))
    )
    lines = episode_table(shown, differences)
    about = {"retriever": next(iter(logs)), "weights": main}
    return {"main": about, "scores": scores, "gains": gains, "files": files}, lines


@contextlib.contextmanager
def open_players(
    raw: ConfigDict,
    workdir: Path | None,
    folder: Path,
    retrievers: Sequence[str] = (),
    sampled: int = 0,
) -> Iterator[dict[str, Predictor]]:
    """Opens the model of a run, or that of a config, and the questions to ask.

    Args:
        raw: the config; `questions.dev` and `eval.samples` say what is asked.
        workdir: the run's folder; None: the config's own model, untrained.
        folder: where a tiny model is, or is made.
        retrievers: what the tool that searches uses; (): the config's own.
        sampled: episodes drawn for each question; 0: one, as `config.eval.greedy` says.

    Returns:
        What plays, by the name of the retriever.
    """
    config = RlvrConfig.of(raw)
    mesh, own = mesh_of_run(config, workdir), config.tools.retriever
    system: Any
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        if config.env.verifiers:
            loaded = load_environment(config, folder, mesh)
            system = EnvironmentRlvr(config, mesh, loaded, folder)
            stack.callback(system.close)
            libraries: dict[str, Library | None] = {PREDICTED_BY: None}
        else:
            inputs = load_inputs(config, folder, mesh, trains=False)
            system, libraries = Rlvr(config, mesh, inputs, folder), {}
            for name in retrievers or (own,):  # refused before anything is played
                known = name == own
                libraries[name] = inputs.library if known else open_library(config, mesh, name)
        dev, draws = system.inputs.dev, sampled or 1
        greedy = not sampled and config.eval.greedy
        # As many episodes side by side as in training, whose memory is known to suffice.
        size = max(1, config.train.batch_size * config.grpo.members // draws)
        questions: Questions[Any, Prediction] = Questions(
            PREDICTIONS, dev, lambda row, each: row.id == system.id_of(each), size, draws
        )

        def by(name: str, library: Library | None) -> Predictor:
            def play(params: Any, asked: Sequence[Any], first: int) -> list[Prediction]:
                # The draws depend on the numbers of the question and of the draw alone.
                key = jax.random.fold_in(jax.random.key(config.seed), _PREDICTED)
                numbers = np.arange(first, first + len(asked), dtype=np.uint32)
                keys = np.asarray(draw_keys(key, numbers, draws))
                how: Any = {"greedy": greedy, "library": library}
                return system.predict(params, asked, keys, stop, first=first, **how)

            played = {n: v for n, v in raw.to_dict().items() if n not in _OF_TRAINING}
            played["tools"] = played["tools"] | {"retriever": name}
            record = settings | {"retriever": name, "config": played}
            return Predictor(system, stop, questions, play, record)

        settings = {
            "kind": TOOL_EPISODES,
            "questions": len(dev),
            "sampled": sampled,
            "greedy": greedy,
            "data": system.inputs.data,
            "asked": fingerprint((system.id_of(each),) for each in dev),
            "rewards": {**system.provenance},
        }
        yield {name: by(name, library) for name, library in libraries.items()}


# ---------------------------------------------------------------- environments of verifiers

TRACES = "traces.jsonl"  # the file that verifiers writes


def environment_summary(
    system: Any, logs: Logs, main: str, options: ScoreOptions
) -> tuple[dict[str, Any], list[str]]:
    """See `_summary`; writes the file that verifiers itself would write beside each log."""
    scores, lines = dict[str, Any](), list[str]()
    for label, log in logs[PREDICTED_BY].items():
        facts = [row.trajectory["facts"] for row in PREDICTIONS.each(log)]
        traces = log.with_name(TRACES)
        write_whole(traces, "".join(f"{each[TRACE]}\n" for each in facts))
        rows = scored_episodes(log)
        scored = [
            episode_columns(row.parts, row.trajectory["facts"]["tally"], row.trajectory["status"])
            for row in rows
            if row.reward is not None
        ]
        names = dict.fromkeys(name for row in scored for name in row)
        columns = {name: [row[name] for row in scored if name in row] for name in names}
        means: dict[str, Any] = with_intervals(columns)
        for name, values in columns.items():
            means[name]["std"] = float(np.std(values))
        scores[label] = means | {"failed_share": 1 - len(scored) / max(len(rows), 1)}
        lines.append(f"{label}: {scores[label]['failed_share']:.0%} without a reward ({traces})")
        for name, own in scores[label].items():
            if isinstance(own, dict):
                lines.append(f"  {name:24} {interval_text(own)}, std {own['std']:.3f}")
        ends = collections.Counter(each["stop"] for each in facts if "stop" in each)
        shares = (f"{name} {count / ends.total():.0%}" for name, count in ends.most_common())
        lines.append(f"  ended by: {', '.join(shares)}")
    about = {
        "environment": system.config.env.verifiers,
        "verifiers": system.inputs.about.version,
        "main": main,
        "tasks": len(system.inputs.dev),
        "episodes_per_task": options.sampled or 1,
        "scores": scores,
    }
    return about, lines
