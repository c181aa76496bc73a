"""Scores a run on an environment of `verifiers`, and writes what verifiers itself would write.

Of the trained and of the untrained weights: `traces.jsonl`, as evaluations of verifiers write it,
and our `predictions.jsonl`, token by token.
"""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from qrag_jax.evaluators.eval_config import report_on
from qrag_jax.evaluators.tool_scores import REWARD
from qrag_jax.metrics import predictions
from qrag_jax.metrics.bootstrap import mean_interval
from qrag_jax.metrics.predictions import Prediction
from qrag_jax.metrics.row_log import append_lines
from qrag_jax.rollouts.environment_play import PlayedEpisode, Scored
from qrag_jax.runtime.embedding_files import encoder_key
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.rlvr import TurnTexts
from qrag_jax.systems.rlvr_config import RlvrConfig
from qrag_jax.systems.rlvr_environment import MODEL, EnvironmentRlvr, load_environment
from qrag_jax.systems.rlvr_scoring import PREDICTIONS, keys_of, played_config
from qrag_jax.systems.saved_token_run import SavedWeights, Weights, mesh_of_run
from qrag_jax.systems.scoring import PlayedParts, ScoreOptions, write_summary

_PART = 16  # tasks that are played side by side, and written together
TRACES = "traces.jsonl"  # the file that verifiers writes


def score_environment(workdir: Path, given: ConfigDict, options: ScoreOptions) -> dict[str, Any]:
    """Scores the run's checkpoint and the untrained weights; returns the summary."""
    given = given.copy_and_resolve_references()
    chose = report_on(given, options.samples, others=False)
    config = RlvrConfig.of(given)
    out = options.out or workdir / "eval"
    mesh = mesh_of_run(config, workdir)
    with StopSignal() as stop:
        system = EnvironmentRlvr(config, mesh, load_environment(config, workdir, mesh), workdir)
        try:
            return _scored(system, given, options, out, stop, chose=chose)
        finally:
            system.close()


def _scored(
    system: EnvironmentRlvr,
    given: ConfigDict,
    options: ScoreOptions,
    out: Path,
    stop: StopSignal,
    *,
    chose: int,
) -> dict[str, Any]:
    saved, inputs = SavedWeights(system), system.inputs
    trained = saved.checkpoint(options.checkpoint)
    draws = options.sampled or 1
    halves = inputs.drawn.summary(chose, others=False)
    scores: dict[str, Any] = {}
    for weights in (trained, saved.untrained()):
        folder = out / weights.name
        rows = _played(system, given, weights, folder, options, stop=stop)
        scores[weights.told] = _means(rows, len(inputs.shown) * draws)
        print("\n".join(_theirs(system, weights, folder, draws)))
    about = {
        "environment": system.config.env.verifiers,
        "verifiers": inputs.about.version,
        "main": trained.told,
        "tasks": len(inputs.shown),
        "questions": halves,
        "episodes_per_task": draws,
        "scores": scores,
    }
    summary = write_summary(out, given, about)
    print("\n".join([*_table(scores), halves["line"]]))
    print(f"results, predictions and summary: {out}")
    return summary


def _played(
    system: EnvironmentRlvr,
    given: ConfigDict,
    weights: Weights,
    folder: Path,
    options: ScoreOptions,
    *,
    stop: StopSignal,
) -> list[dict[str, float]]:
    """Plays what the files lack; returns the scores of all episodes that have a reward."""
    inputs, config, draws = system.inputs, system.config, options.sampled or 1
    greedy = not options.sampled and config.eval.greedy
    log, results = folder / "predictions.jsonl", folder / TRACES
    record = {
        "kind": predictions.KIND,
        "checkpoint": weights.told,
        "environment": inputs.about.version,
        "rewards": {**system.provenance},
        "tasks": inputs.about.digest,
        "shown": [*inputs.shown],
        "sampled": options.sampled,
        "greedy": greedy,
        "weights": encoder_key(weights.params, {}),
        "config": played_config(given),
    }
    texts = TurnTexts(inputs.speech)

    def play(places: Sequence[int], first: int) -> list[Prediction]:
        keys = keys_of(config.seed, first, len(places), draws)
        played = system.play(weights.params, inputs.dev, places, keys, stop, greedy=greedy)
        rows = []
        for number, episode in enumerate(played):
            place = places[number // draws]
            trajectory = system.trajectory(episode, place, number % draws)
            rows.append(system.prediction(inputs.dev, place, trajectory, texts))
        append_lines(results, "".join(map(_trace, played)).encode())  # never behind the log
        return rows

    parts = PlayedParts(
        rows=PREDICTIONS,
        asked=inputs.shown,
        size=_PART,
        play=play,
        is_of=lambda row, place: row.id == inputs.dev.name(place),
        names=("task", "tasks"),
        draws=draws,
        resumed=lambda done: _cut(results, done * draws),
    )
    parts.into(log, record, stop, restart=options.restart)
    return _rows(log)


def _trace(episode: PlayedEpisode) -> str:
    ended = episode.ended
    record: Mapping[str, Any] = (
        ended.record
        if isinstance(ended, Scored)
        else {"error": {"error": ended.cause, "message": ended.message}, "reward": None}
    )
    return json.dumps(record) + "\n"


def _cut(results: Path, lines: int) -> None:
    """Drops what is behind these lines."""
    if results.exists():
        with results.open("rb+") as file:
            file.truncate(sum(map(len, itertools.islice(file, lines))))


def _rows(log: Path) -> list[dict[str, float]]:
    """The parts of rewards, and counts, of the episodes of a file."""
    found = []
    for line in log.read_text(encoding="utf-8").splitlines():
        trajectory = json.loads(line)["trajectory"]
        if REWARD in trajectory["parts"]:
            turns = [turn for segment in trajectory["segments"] for turn in segment]
            found.append(
                {
                    **trajectory["parts"],
                    "turns": float(len(turns)),
                    "truncated": float(trajectory["status"] == "truncated"),
                    "sampled_tokens": float(sum(len(turn["sampled"]) for turn in turns)),
                }
            )
    return found


def _means(rows: Sequence[Mapping[str, float]], episodes: int) -> dict[str, Any]:
    """The mean of each score with its interval, and the share of episodes without a reward."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        mean, low, high = mean_interval([row[name] for row in rows if name in row])
        found[name] = {"mean": mean, "low": low, "high": high}
    return found | {"failed_share": 1 - len(rows) / episodes if episodes else 0.0}


def _theirs(system: EnvironmentRlvr, weights: Weights, folder: Path, draws: int) -> list[str]:
    """The lines that an evaluation of verifiers prints."""
    file = folder / TRACES
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    known = [_plain(record) for record in records]
    known = [record for record in known if record["reward"] is not None]
    lines = [
        "--- Evaluation ---",
        f"Environment: {system.config.env.verifiers}",
        f"Model: {MODEL} ({weights.told})",
        f"Examples: {len(records) // draws}",
        f"Rollouts per example: {draws}",
        "--- All ---",
        "Rewards:",
    ]
    columns: dict[str, list[float]] = {"reward": [record["reward"] for record in known]}
    for record in known:
        for name, value in record["metrics"].items():
            columns.setdefault(name, []).append(value)
    for name, values in columns.items():
        if values:
            lines.append(f"{name}: avg - {np.mean(values):.3f}, std - {np.std(values):.3f}")
    stops = collections.Counter(record["stop"] for record in known)
    cut = [float(record["truncated"]) for record in known]
    if known:
        lines += ["Info:", f"is_truncated: avg - {np.mean(cut):.3f}, std - {np.std(cut):.3f}"]
        shares = (f"{name}: {count / len(known):.3f}" for name, count in stops.items())
        lines.append(f"stop_conditions: {', '.join(shares)}")
    if len(known) < len(records):
        lines.append(f"errors: {1 - len(known) / len(records):.3f}")
    return [*lines, f"({file})", ""]


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """Reward, metrics and end of a line."""
    if "traces" not in record:  # an episode without a reward
        return {"reward": None}
    trace = record["traces"][0]
    rewards = {name: each["score"] for name, each in trace.get("rewards", {}).items()}
    weights = {name: each.get("weight", 1.0) for name, each in trace.get("rewards", {}).items()}
    stop = trace.get("stop_condition")
    calls = [each for each in trace.get("calls", ()) if not each.get("error")]
    last = calls[-1] if calls else {}
    return {
        "reward": sum(rewards[name] * weights[name] for name in rewards),
        "metrics": {**rewards, **trace.get("metrics", {})},
        "stop": stop,
        "truncated": bool(stop and stop.startswith("max_"))
        or last.get("finish_reason") == "length",
    }


def _table(scores: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Our lines: each mean with its 95 % interval, for each weights."""
    lines = []
    for told, found in scores.items():
        lines.append(f"{told}: {found['failed_share']:.0%} without a reward")
        for name, value in found.items():
            if isinstance(value, dict):
                interval = f"[{value['low']:.3f}, {value['high']:.3f}]"
                lines.append(f"  {name:24} {value['mean']:.3f} {interval}")
    return lines
