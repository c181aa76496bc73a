"""Scores a run's checkpoint beside the encoder that it started from, with resumable logs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from qrag_jax.data import noise
from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.data.loading import load_split, tokenise_samples
from qrag_jax.data.redrawn import Documents
from qrag_jax.data.sample import LazySamples, Sample, fingerprint
from qrag_jax.environments import positions
from qrag_jax.evaluators import beam, episodes
from qrag_jax.evaluators.lengths import documents_of_lengths
from qrag_jax.evaluators.log_record import Retriever, log_record
from qrag_jax.metrics.bootstrap import columns_text
from qrag_jax.metrics.chunk_filters import until_found
from qrag_jax.metrics.comparison import NAMES, PLANNED, TRAINED, UNTRAINED, compared, table
from qrag_jax.metrics.facts import summarise
from qrag_jax.metrics.row_log import begin
from qrag_jax.metrics.rows import RETRIEVALS, Row, log_name
from qrag_jax.models.heads.embedding import Params
from qrag_jax.rollouts.beam_search import BeamSearch
from qrag_jax.rollouts.block_shapes import choose_block_shapes
from qrag_jax.rollouts.chunks import check_fit
from qrag_jax.runtime.aot import PeakMemory
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.plots import plot_lengths
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.runtime.whole_files import log_locks, write_whole
from qrag_jax.systems.q_rag_config import load_config
from qrag_jax.systems.saved_run import SavedRun
from qrag_jax.systems.scoring import SUMMARY, ScoreOptions, are_others

DATA = ("data.", "eval.path")  # fields that say what is evaluated on


def checkpoint_label(checkpoint: str, step: int) -> str:
    """What a checkpoint is called in logs; also its folder in `eval`."""
    return f"{checkpoint}-{step}"


@dataclasses.dataclass(frozen=True)
class Scene:
    """What all scored encoders share: the run, the questions and the compiled program."""

    run: SavedRun
    evaluator: episodes.EpisodeEvaluator
    fingerprint: str
    restart: bool


def score_run(workdir: Path, given: ConfigDict, options: ScoreOptions) -> dict[str, Any]:
    """Scores the run's checkpoint and the encoder it started from; returns the summary.

    If the data are those of the training run, and one file, only the part held out for evaluation
    is scored.
    """
    are_others(workdir, given, DATA, options.out)
    saved, run = load_config(workdir / CONFIG_NAME), SavedRun.open(workdir, given)
    config = run.config
    same = (given.data.path, given.eval.path) == (saved.data.path, saved.eval.path)
    hold_out = same and not config.eval.path
    loaded_samples = load_split(config.dev_data, "dev", hold_out=hold_out)
    for line in loaded_samples.report:
        print(line)
    noise.check_unseen(workdir, config.dev_data.backgrounds)
    scene = _scene(run, loaded_samples.all, options)
    out = options.out or workdir / "eval"
    trained, step = run.trained(options.checkpoint)
    untrained = run.untrained()
    own = checkpoint_label(options.checkpoint, step)
    summary: dict[str, Any] = {"checkpoint": options.checkpoint, "step": step}
    summary["best_is_untrained"] = options.checkpoint == "best" and step == 0
    played: dict[str, list[Row]] = {}
    for name, params in ((UNTRAINED, untrained), (TRAINED, trained)):
        label = name if name == UNTRAINED else own
        retriever = Retriever.of(label, params)
        scores, rate = _score(scene, params, out / label, retriever)
        played |= {NAMES[name, steps]: rows for steps, rows in scores.items()}
        summary["episodes_per_second"] = rate
    if config.eval.searches:
        played[PLANNED] = _search(scene, trained, out / label, retriever)
    summary |= compared(played, in_full=config.rollout.never_terminate)
    summary["samples"] = len(scene.evaluator.indices)
    summary["seconds"] = training_seconds(workdir)
    path = out / (Path(log_name(config.eval.seed)).stem + "_summary.json")
    # With --out, the summary in the run's folder stays as it is.
    for target in (path,) if options.out else (path, workdir / SUMMARY):
        write_whole(target, json.dumps(summary, indent=2) + "\n")
    print(table(summary))
    if not config.is_ground_truth and "return" in summary["trained"]:
        why = f"not of {config.reward.name}, by which it was trained"
        if not config.is_on_device:
            why = (
                f"no language model was asked for {config.reward.name}; qrag_jax.answer asks one "
                "about the retrieval log"
            )
        print(f"returns are those of the supporting facts: {why}")
    print(f"retrieval log: {out / label / log_name(config.eval.seed)}")
    print(f"summary: {path}")
    return summary


def _scene(run: SavedRun, samples: Sequence[Sample], options: ScoreOptions) -> Scene:
    config, loaded, player = run.config, run.loaded, run.player
    store = tokenise_samples(config.data, loaded.tokenizer, samples)
    shape = EpisodeShape.holding([store])
    check_fit(config.rollout, loaded.encoder, shape, {"evaluation": store})
    platform = Platform.of(run.mesh)
    shapes = choose_block_shapes(
        config.encoder, config.rollout, loaded.encoder, shape, [store], platform=platform
    )
    play = episodes.make_play(player, shapes)
    order = np.random.default_rng(config.eval.seed).permutation(len(samples))
    indices = sorted(order[: options.samples or len(samples)].tolist())
    evaluator = episodes.EpisodeEvaluator(
        play=play,
        mesh=run.mesh,
        samples=samples,
        store=store,
        shape=shape,
        batch_size=config.eval.batch_size,
        indices=indices,
    )
    return Scene(run, evaluator, fingerprint(evaluator.shown), options.restart)


def _score(
    scene: Scene, params: Params, folder: Path, retriever: Retriever
) -> tuple[dict[str, list[Row]], float | None]:
    """Plays the questions that the logs lack.

    Returns:
        the rows of both logs, and episodes per second (None if nothing was played).
    """
    run, evaluator, label = scene.run, scene.evaluator, retriever.label
    log = folder / log_name(run.config.eval.seed)
    logs = {"multi": log, "single": log.with_name(f"single_step_{log.name}")}
    meta = log_record(run.fields, run.loaded, retriever, scene.fingerprint, searched=False)
    rows: dict[str, list[Row]] = {}
    with log_locks(*logs.values()):
        for kind, path in logs.items():
            begin(path, meta, restart=scene.restart)
            rows[kind] = RETRIEVALS.read_partial(path, len(evaluator.indices))
        # The two logs are written one after the other: go on after the last question in both.
        done = min(map(len, rows.values()))
        if done:
            print(f"{label}: {done} of {len(evaluator.indices)} questions are in the logs already")
        todo, started = evaluator.indices[done:], time.monotonic()
        with tqdm(total=len(todo), unit="episode", desc=label, disable=not todo) as bar:
            for multi, single in evaluator.batches(params, done):
                for kind, new in (("multi", multi), ("single", single)):
                    missing = new[len(rows[kind]) - done :] if len(rows[kind]) > done else new
                    RETRIEVALS.append(logs[kind], missing)
                    rows[kind] = rows[kind] + missing
                done += len(multi)
                bar.update(len(multi))
    return rows, len(todo) / (time.monotonic() - started) if todo else None


def _search(scene: Scene, params: Params, folder: Path, retriever: Retriever) -> list[Row]:
    """Plays the questions by beam search, with the config's rule for stopping."""
    run, evaluator = scene.run, scene.evaluator
    searcher = beam.make_beam_search(run.player, run.search, params, [evaluator.store])
    log = folder / f"planned_{log_name(run.config.eval.seed)}"
    meta = log_record(run.fields, run.loaded, retriever, scene.fingerprint, searched=True)
    samples, indices = evaluator.samples, evaluator.indices
    shown = LazySamples(len(indices), lambda i: samples[indices[i]])
    return beam.SearchLog(searcher, run.player, log, meta).play(shown, restart=scene.restart)[0]


def training_seconds(workdir: Path) -> float | None:
    """How long the run was trained; None: nobody knows."""
    path = workdir / "training.json"
    return json.loads(path.read_text(encoding="utf-8"))["seconds"] if path.exists() else None


COLUMNS = {
    "chunks": "d",
    "tokens": "d",
    "fits": "d",
    "stories": "d",
    "samples": "d",
    "fact_em": ".3f",
    "em_shortest": ".3f",
    "fact_f1": ".3f",
    "fact_precision": ".3f",
    "fact_recall": ".3f",
    "f1_until_found": ".3f",
    "precision_until_found": ".3f",
    "steps": ".2f",
    "embedded": "d",
    "embed_seconds": ".1f",
    "seconds_per_episode": ".3f",
    "peak_memory_mib": ".0f",
}


def score_lengths(
    run: SavedRun,
    options: ScoreOptions,
    samples: Mapping[int, int],
    *,
    every_story: bool = False,
    embeddings: Path | None = None,
) -> list[dict]:
    """Plays documents of several lengths, shortest first; writes one table and one plot.

    Args:
        options: what is scored; `out` is `lengths` in the run's folder if it is not given.
        samples: length in chunks, ascending → number of documents.
        every_story: each length uses all stories that fit it, not those that fit the shortest.
        embeddings: folder that keeps embeddings of chunks.

    Returns:
        one result for each length. `stories` is the number of stories in the split, `fits` the
        number of those that are short enough. `em_shortest` is the fact EM of the same questions at
        the shortest length; None if some of them were not asked there.
    """
    config, chunks = run.config, [*samples]
    params, step = run.trained(options.checkpoint)
    label = f"{options.checkpoint}-{step}"
    retriever = Retriever.of(label, params)
    if label == "best-0":
        print("best = untrained: the best checkpoint is that of step 0")
    out = options.out or run.workdir / "lengths"
    # All lengths are checked before anything is computed.
    noise.check_unseen(run.workdir, config.dev_data.backgrounds)
    for length in chunks:
        positions.check_chunks(config.env.positions, length)
    sets = documents_of_lengths(
        config.dev_data, chunks, [*samples.values()], every_story=every_story
    )
    shortest = sets[chunks[0]]
    for length, documents in sets.items():
        if documents.fit != shortest.fit or length == chunks[0]:
            print(documents.line)
            print(f"{length} chunks: {documents.fit} stories")
    store = tokenise_samples(config.data, run.loaded.tokenizer, list(shortest.samples[:64]))
    searcher = beam.make_beam_search(run.player, run.search, params, [store], embeddings)
    tokens_per_chunk = float(store.chunk_lengths.mean())
    results: list[dict] = []
    at_shortest: dict[str, float] = {}
    for length, documents in sets.items():
        log = out / label / log_name(config.eval.seed, length)
        result, rows = _played_length(
            searcher, run, documents, log, retriever, restart=options.restart
        )
        at_shortest = at_shortest or {row.id: row.em or 0.0 for row in rows}
        about = {
            "chunks": length,
            "tokens": round(length * tokens_per_chunk),
            "fits": documents.fit.fits,
            "stories": documents.fit.stories,
            "em_shortest": _mean([at_shortest.get(row.id) for row in rows]),
        }
        means, scores = _means_of(rows)
        # These scores use the answer key: an episode ends once all facts are found.
        cut_means, cut_scores = _means_of([until_found(row) for row in rows])
        means["f1_until_found"] = cut_means["fact_f1"]
        means["precision_until_found"] = cut_means["fact_precision"]
        cut = {"until_found": cut_means | {"intervals": cut_scores}}
        results.append(
            about | {"samples": len(rows)} | means | result | {"intervals": scores} | cut
        )
        print(_table(results[-1:]))  # one may take minutes
    print(_table(results))
    _write_lengths(out, label, results, config)
    return results


def _means_of(rows: Sequence[Row]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Means by name, and the same with their intervals."""
    scores = {name: score for name, score in summarise(rows).items() if name != "samples"}
    return {name: score["mean"] for name, score in scores.items()}, scores


def _played_length(
    searcher: BeamSearch,
    run: SavedRun,
    documents: Documents,
    log: Path,
    retriever: Retriever,
    *,
    restart: bool,
) -> tuple[dict[str, Any], list[Row]]:
    samples = documents.samples
    before = dataclasses.replace(searcher.table.counts)
    told = f"{_documents_digest(samples)} of {documents.fit}"
    meta = log_record(run.fields, run.loaded, retriever, told, searched=True)
    search_log = beam.SearchLog(searcher, run.player, log, meta)
    memory = PeakMemory()
    started = time.perf_counter()
    rows, new = search_log.play(samples, restart=restart)
    seconds = time.perf_counter() - started
    counts = searcher.table.counts
    return {
        "embedded": counts.embedded - before.embedded,
        "embed_seconds": counts.seconds - before.seconds,
        "seconds_per_episode": seconds / new if new else None,
        "peak_memory_mib": memory.mebibytes() if new else None,
        "mapped_mib": searcher.table.mapped_bytes / 2**20,
    }, rows


def _mean(scores: Sequence[float | None]) -> float | None:
    """The mean of the scores; None if one of them is None."""
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if len(known) == len(scores) else None


def _documents_digest(documents: Sequence[Sample]) -> str:
    """A digest of the first and the last document, and of all texts that documents are made of.

    Making all documents would take as long as playing them.
    """
    content = documents.content if isinstance(documents, LazySamples) else ""
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return f"{len(documents)} {fingerprint([documents[0], documents[-1]])} {digest}"


def _table(results: Sequence[dict[str, Any]]) -> str:
    """A heading and one line for each length."""
    lines = [[*COLUMNS]]
    for result in results:
        cells = ((result[name], form) for name, form in COLUMNS.items())
        lines.append(["" if value is None else format(value, form) for value, form in cells])
    return "\n".join(columns_text(lines))


def _write_lengths(out: Path, label: str, results: Sequence[dict], config: Any) -> None:
    path = out / label / f"{Path(log_name(config.eval.seed)).stem}_lengths"
    write_whole(path.with_suffix(".json"), json.dumps(results, indent=2) + "\n")
    plot_lengths(results, path.with_suffix(".png"), f"{out.parent.name}, {label}")
    print(
        "f1_until_found and precision_until_found use the answer key: an episode ends once all "
        "supporting facts are found"
    )
    print(f"table: {path.with_suffix('.json')}\nplot: {path.with_suffix('.png')}")
