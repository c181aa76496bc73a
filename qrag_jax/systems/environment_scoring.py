"""Scores a run on an environment of `verifiers`, and writes what verifiers itself would write.

Of the trained and of the untrained weights: `traces.jsonl`, as evaluations of verifiers write it,
and our `predictions.jsonl`, token by token.
"""

from __future__ import annotations

import collections
import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from qrag_jax.evaluators.eval_config import report_on
from qrag_jax.evaluators.tool_scores import REWARD
from qrag_jax.metrics import agent_log, answer_log, predictions
from qrag_jax.metrics.bootstrap import mean_interval
from qrag_jax.rollouts.draw_keys import draw_keys
from qrag_jax.rollouts.played_units import PlayedEpisode, Scored
from qrag_jax.runtime.embedding_files import encoder_key
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.locks import log_locks
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.environment_inputs import MODEL, load_environment
from qrag_jax.systems.rlvr import TurnTexts
from qrag_jax.systems.rlvr_config import RlvrConfig
from qrag_jax.systems.rlvr_environment import EnvironmentRlvr
from qrag_jax.systems.rlvr_predict import played_config
from qrag_jax.systems.rlvr_scoring import SUMMARY, PlayOptions
from qrag_jax.systems.saved_token_run import SavedWeights, Weights, mesh_of_run

_PLAYED = 2**31 - 4  # in place of a step's number: no step has it, and no evaluation
_PART = 16  # tasks that are played side by side, and written together
TRACES = "traces.jsonl"  # the file that verifiers writes


def score_environment(workdir: Path, given: ConfigDict, options: PlayOptions) -> dict[str, Any]:
    """Scores the run's checkpoint and the untrained weights; returns the summary.

    Raises:
        Stopped: a signal came; the same command goes on.
        FeedbackLost: too many episodes fail.
    """
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
    options: PlayOptions,
    out: Path,
    stop: StopSignal,
    *,
    chose: int,
) -> dict[str, Any]:
    saved, inputs = SavedWeights(system), system.inputs
    trained = saved.checkpoint(options.checkpoint)
    draws = options.sampled or 1
    scores: dict[str, Any] = {}
    for weights in (trained, saved.untrained()):
        folder = out / weights.name
        rows = _played(system, given, weights, folder, options, stop=stop)
        scores[weights.told] = _means(rows, len(inputs.shown) * draws)
        print("\n".join(_theirs(system, weights, folder, draws)))
    summary = {
        "environment": system.config.env.verifiers,
        "verifiers": inputs.about.version,
        "main": trained.told,
        "tasks": len(inputs.shown),
        "questions": inputs.drawn.summary(chose, others=False),
        "episodes_per_task": draws,
        "scores": scores,
        "config": given.to_dict(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_whole(out / SUMMARY, json.dumps(summary, indent=2) + "\n")
    print("\n".join([*_table(scores), summary["questions"]["line"]]))
    print(f"results, predictions and summary: {out}")
    return summary


def _played(
    system: EnvironmentRlvr,
    given: ConfigDict,
    weights: Weights,
    folder: Path,
    options: PlayOptions,
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
    folder.mkdir(parents=True, exist_ok=True)
    texts = TurnTexts(inputs.speech)
    with log_locks(log):
        agent_log.begin(log, record, restart=options.restart)
        if options.restart:
            results.unlink(missing_ok=True)
        done = _whole(log, results, draws)
        with tqdm(total=len(inputs.shown), initial=done, unit="task", desc=weights.name) as bar:
            while done < len(inputs.shown):
                places = inputs.shown[done : done + _PART]
                keys = _keys(config.seed, done, len(places), draws)
                played = system.play(weights.params, inputs.dev, places, keys, stop, greedy=greedy)
                rows = []
                for number, episode in enumerate(played):
                    place = places[number // draws]
                    trajectory = system.trajectory(episode, place, number % draws)
                    rows.append(system.prediction(inputs.dev, place, trajectory, texts))
                _append(results, played)
                answer_log.append(log, rows)
                done += len(places)
                bar.update(len(places))
    return _rows(log)


def _append(results: Path, played: Sequence[PlayedEpisode]) -> None:
    with results.open("a", encoding="utf-8") as file:
        for episode in played:
            ended = episode.ended
            record: Mapping[str, Any] = (
                ended.record
                if isinstance(ended, Scored)
                else {"error": {"error": ended.cause, "message": ended.message}, "reward": None}
            )
            file.write(json.dumps(record) + "\n")


def _whole(log: Path, results: Path, draws: int) -> int:
    """How many tasks both files have; what is behind these is dropped."""
    ends = [_line_ends(path) for path in (log, results)]
    tasks = min(len(each) - 1 for each in ends) // draws
    tasks -= tasks % _PART
    for path, each in zip((log, results), ends):
        if path.exists():
            os.truncate(path, each[tasks * draws])
    return tasks


def _line_ends(path: Path) -> list[int]:
    """The bytes up to the end of each whole line, from 0 on."""
    ends = [0]
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    ends.append(ends[-1] + len(line))
    return ends


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


def _keys(seed: int, first: int, tasks: int, draws: int) -> np.ndarray:
    key = jax.random.fold_in(jax.random.key(seed), _PLAYED)
    return np.asarray(draw_keys(key, np.arange(first, first + tasks, dtype=np.uint32), draws))


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
