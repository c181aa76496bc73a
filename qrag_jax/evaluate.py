"""Scores a trained retriever: python -m qrag_jax.evaluate --workdir=runs/hotpotqa

Any field of the run's config can be overridden, for example
`--config.data.path=FOLDER` to score other data. Priority: command line, then the file given by
`--eval_config`, then the run's saved config.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from tqdm import tqdm

from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.data.generators import book_record
from qrag_jax.data.lazy_samples import LazySamples
from qrag_jax.data.loading import load_split
from qrag_jax.data.sample import Sample, fingerprint
from qrag_jax.data.token_stores import tokenise_samples
from qrag_jax.evaluators import beam, episodes
from qrag_jax.evaluators.log_record import LATER, Retriever, log_record
from qrag_jax.metrics import retrieval_log
from qrag_jax.metrics.bootstrap import paired_interval
from qrag_jax.metrics.facts import summarise
from qrag_jax.metrics.retrieval_log import Row
from qrag_jax.metrics.score_table import columns_text, interval_text
from qrag_jax.metrics.until_found import FULL_BUDGET, UNTIL_FOUND, until_found
from qrag_jax.models.heads.embedding import Params
from qrag_jax.rollouts.block_shapes import choose_block_shapes
from qrag_jax.rollouts.limits import check_fit
from qrag_jax.runtime import commandline
from qrag_jax.runtime.locks import log_locks
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems import older_runs, run_flags
from qrag_jax.systems.saved_run import SavedRun

SAMPLES = flags.DEFINE_integer("samples", 0, "Questions to score, 0 for all.", lower_bound=0)
OUT = flags.DEFINE_string("out", None, "Folder of logs and summaries; default WORKDIR/eval.")
RESTART = flags.DEFINE_bool("restart", False, "Throw partial logs away instead of resuming them.")

TRAINED, UNTRAINED = "trained", "untrained"
# What each line of the table is called: (encoder, steps) → name.
NAMES = {
    (UNTRAINED, "multi"): "untrained",
    (UNTRAINED, "single"): "single_step",
    (TRAINED, "single"): "single_step_trained",
    (TRAINED, "multi"): "trained",
}
PLANNED = "planned"  # trained, by beam search or with a rule for stopping


@dataclasses.dataclass(frozen=True)
class Scene:
    """All that is shared by the encoders scored: the questions and the compiled program."""

    run: SavedRun
    evaluator: episodes.EpisodeEvaluator
    fingerprint: str


def evaluate(run: SavedRun, hold_out: bool) -> dict[str, Any]:
    """Scores the run's checkpoint and the encoder it started from; returns the summary.

    Args:
        hold_out: the data are those of the training run; of a single file only the part kept
            for evaluation is scored.

    Raises:
        InputError: the run, its data or its checkpoint cannot be used.
    """
    config, workdir = run.config, run.workdir
    hold_out = hold_out and not config.eval.path
    loaded_samples = load_split(config.dev_data, "dev", hold_out=hold_out)
    for line in loaded_samples.report:
        print(line)
    book_record.check_unseen(workdir, config.dev_data.backgrounds)
    scene = _scene(run, loaded_samples.all)
    out = Path(OUT.value) if OUT.value else workdir / "eval"
    trained, step = run.trained(run_flags.checkpoint())
    untrained = run.untrained()
    summary: dict[str, Any] = {"checkpoint": run_flags.checkpoint(), "step": step}
    summary["best_is_untrained"] = run_flags.checkpoint() == "best" and step == 0
    played: dict[str, list[Row]] = {}
    for name, params in ((UNTRAINED, untrained), (TRAINED, trained)):
        label = name if name == UNTRAINED else f"{run_flags.checkpoint()}-{step}"
        retriever = Retriever.of(label, params)
        scores, rate = _score(scene, params, out / label, retriever)
        played |= {NAMES[name, steps]: rows for steps, rows in scores.items()}
        summary["episodes_per_second"] = rate
    if config.eval.searches:
        played[PLANNED] = _search(scene, trained, out / label, retriever)
    # Both modes from one play; where play ended at the last fact there is no full budget.
    cut = {name: [until_found(row) for row in rows] for name, rows in played.items()}
    in_full = config.rollout.never_terminate
    summary["mode"] = FULL_BUDGET if in_full else UNTIL_FOUND
    summary |= _summaries(played)
    summary["until_found"] = _summaries(cut)
    summary["gains"] = _gains(played if in_full else cut)
    summary["samples"] = len(scene.evaluator.indices)
    summary["seconds"] = _training_seconds(workdir)
    path = out / (Path(retrieval_log.log_name(config.eval.seed)).stem + "_summary.json")
    # The run's own summary is that of its own data, whatever else it is scored on.
    for target in (path,) if OUT.value else (path, workdir / "summary.json"):
        write_whole(target, json.dumps(summary, indent=2) + "\n")
    print(table(summary))
    if not config.is_ground_truth:
        print(
            f"returns are those of the supporting facts: no language model was asked for "
            f"{config.reward.name}; qrag_jax.answer asks one about the retrieval log"
        )
    print(f"retrieval log: {out / label / retrieval_log.log_name(config.eval.seed)}")
    print(f"summary: {path}")
    return summary


def table(summary: dict[str, Any]) -> str:
    """The scores as text, one line a retriever in each mode: means, most with bootstrap 95 %
    intervals.

    Intervals of precision, recall and steps are in the summary file: in the table they would make
    it too wide to read.
    """
    cut = summary["until_found"]
    text = []
    if summary["mode"] == FULL_BUDGET:
        whole = {name: summary[name] for name in cut}
        recalls = {column for scores in whole.values() for column in scores["intervals"]}
        recalls = {column for column in recalls if column.startswith("recall@")}
        ranked = sorted(recalls, key=lambda column: int(column.removeprefix("recall@")))
        text += [*_lines(FULL_BUDGET, whole, ranked), ""]
    text += _lines(f"{UNTIL_FOUND} *", cut, [])
    text.append(
        "* uses the answer key: an episode ends once all supporting facts are found, and returns "
        "1, as in Q-RAG's own evaluation"
    )
    if PLANNED in cut and summary["mode"] == FULL_BUDGET:
        text.append("planned: the path that was best for all steps, cut at its last fact")
    if summary["mode"] == UNTIL_FOUND:
        text.append("no full budget: with config.env.never_terminate=False it is never played")
    for other, gains in summary["gains"].items():
        differences = [f"{name} {interval_text(gain, sign=True)}" for name, gain in gains.items()]
        text.append(f"trained - {other.replace('_', ' ')}: {', '.join(differences)}")
    speed = summary["episodes_per_second"]
    text.append(
        f"{summary['samples']} questions, {summary['checkpoint']} checkpoint of step "
        f"{summary['step']}" + (f", {speed:.1f} episodes/s" if speed else "")
    )
    if summary["best_is_untrained"]:
        text.append(
            "best = untrained: no evaluation during training scored above the weights it began "
            "with; --checkpoint=last scores the trained ones"
        )
    return "\n".join(text)


def _lines(title: str, summaries: dict[str, Any], ranked: Sequence[str]) -> list[str]:
    """The table of one mode; `ranked`: its columns of recall@k."""
    bare = {"fact_precision": "precision", "fact_recall": "recall", "steps": "steps"}
    lines = [[title, "fact_em", "fact_f1", *bare.values(), *ranked, "return"]]
    for name in (*NAMES.values(), PLANNED):
        if name not in summaries:
            continue
        intervals = summaries[name]["intervals"]
        # A retriever that stops early may never take k chunks: those it takes count.
        at_k = [intervals.get(column, intervals["fact_recall"]) for column in ranked]
        lines.append(
            [
                name.replace("_", " "),
                *(interval_text(intervals[column]) for column in ("fact_em", "fact_f1")),
                *(f"{intervals[column]['mean']:.3f}" for column in bare),
                *map(interval_text, at_k),
                interval_text(intervals["return"]),
            ]
        )
    return columns_text(lines)


def _scene(run: SavedRun, samples: Sequence[Sample]) -> Scene:
    config, loaded, player = run.config, run.loaded, run.player
    store = tokenise_samples(config.data, loaded.tokenizer, samples)
    shape = EpisodeShape.holding([store])
    check_fit(config.rollout, loaded.encoder, shape, {"evaluation": store})
    shapes = choose_block_shapes(config.encoder, config.rollout, loaded.encoder, shape, [store])
    play = episodes.make_play(player, shapes)
    order = np.random.default_rng(config.eval.seed).permutation(len(samples))
    indices = sorted(order[: SAMPLES.value or len(samples)].tolist())
    evaluator = episodes.EpisodeEvaluator(
        play, run.mesh, samples, store, shape, config.eval.batch_size, indices
    )
    return Scene(run, evaluator, fingerprint(evaluator.shown))


def _score(
    scene: Scene, params: Params, folder: Path, retriever: Retriever
) -> tuple[dict[str, list[Row]], float | None]:
    """Plays what the logs do not hold yet; returns the rows and episodes/s (None if all were)."""
    config, label = scene.run.config, retriever.label
    log = folder / retrieval_log.log_name(config.eval.seed)
    logs = {"multi": log, "single": log.with_name(f"single_step_{log.name}")}
    run = scene.run
    meta = log_record(run.fields, run.loaded, retriever, scene.fingerprint, searched=False)
    with log_locks(*logs.values()):
        return _score_missing(scene, params, logs, meta, label)


def _score_missing(
    scene: Scene, params: Params, logs: dict[str, Path], meta: dict[str, Any], label: str
) -> tuple[dict[str, list[Row]], float | None]:
    rows: dict[str, list[Row]] = {}
    for kind, path in logs.items():
        if RESTART.value:
            retrieval_log.discard(path)
        retrieval_log.check_meta(path, meta, LATER)
        rows[kind] = retrieval_log.read_partial(path)
        retrieval_log.check_count(path, len(rows[kind]), len(scene.evaluator.indices))
    # The two logs are written one after the other: go on where both are complete.
    done = min(map(len, rows.values()))
    if done:
        print(
            f"{label}: {done} of {len(scene.evaluator.indices)} questions are in the logs already"
        )
    todo = scene.evaluator.indices[done:]
    started = time.monotonic()
    with tqdm(total=len(todo), unit="episode", desc=label, disable=not todo) as bar:
        for multi, single in scene.evaluator.batches(params, done):
            for kind, new in (("multi", multi), ("single", single)):
                missing = new[len(rows[kind]) - done :] if len(rows[kind]) > done else new
                retrieval_log.append(logs[kind], missing)
                rows[kind] = rows[kind] + missing
            done += len(multi)
            bar.update(len(multi))
    seconds = time.monotonic() - started
    return rows, len(todo) / seconds if todo else None


def _search(scene: Scene, params: Params, folder: Path, retriever: Retriever) -> list[Row]:
    """Plays the questions by beam search, with the config's rule for stopping."""
    run, evaluator = scene.run, scene.evaluator
    searcher = beam.make_beam_search(run.player, run.search, params, [evaluator.store])
    log = folder / f"planned_{retrieval_log.log_name(run.config.eval.seed)}"
    meta = log_record(run.fields, run.loaded, retriever, scene.fingerprint, searched=True)
    samples, indices = evaluator.samples, evaluator.indices
    shown = LazySamples(len(indices), lambda i: samples[indices[i]])
    return beam.SearchLog(searcher, run.player, log, meta).play(shown, restart=RESTART.value)[0]


def _gains(played: dict[str, list[Row]]) -> dict[str, Any]:
    """Trained minus each other retriever, over the same questions: paired bootstrap intervals."""
    trained = played["trained"]
    gains: dict[str, Any] = {}
    for name in ("untrained", "single_step", "single_step_trained"):
        em = paired_interval([row.em for row in trained], [row.em for row in played[name]])
        f1 = paired_interval([row.f1 for row in trained], [row.f1 for row in played[name]])
        gains[name] = {
            score: dict(zip(("mean", "low", "high"), interval, strict=True))
            for score, interval in (("fact_em", em), ("fact_f1", f1))
        }
    return gains


def _summaries(played: dict[str, list[Row]]) -> dict[str, Any]:
    return {name: _with_flat_scores(summarise(rows)) for name, rows in played.items()}


def _with_flat_scores(scores: dict[str, Any]) -> dict[str, Any]:
    """Means under their own names, and all intervals below `intervals`."""
    intervals = {name: value for name, value in scores.items() if isinstance(value, dict)}
    return {**{name: value["mean"] for name, value in intervals.items()}, "intervals": intervals}


def _training_seconds(workdir: Path) -> float | None:
    path = workdir / "training.json"
    return json.loads(path.read_text())["seconds"] if path.exists() else None


def main() -> int:
    """Reads the flags and scores."""
    workdir = run_flags.workdir()
    config = flags.FLAGS.config
    saved = older_runs.load_config(workdir / CONFIG_NAME)
    same_data = (config.data.path, config.eval.path) == (saved.data.path, saved.eval.path)
    with commandline.writing(OUT.value or workdir / "eval", "--out"):
        evaluate(SavedRun.open(workdir, config), hold_out=same_data)
    return 0


if __name__ == "__main__":
    commandline.run(main, define=run_flags.define)
