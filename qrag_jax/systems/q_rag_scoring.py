"""Scores a run's checkpoint beside the encoder that it started from, with resumable logs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from qrag_jax.algorithms.advantages import discounted_return
from qrag_jax.data import noise
from qrag_jax.data.config import DataConfig
from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.data.loading import load_split, tokenise_samples
from qrag_jax.data.long_docs import Documents, babilong_documents, niah_documents
from qrag_jax.data.sample import LazySamples, Sample, fingerprint
from qrag_jax.data.sources import BABILONG, NIAH
from qrag_jax.data.tokens import TokenStore
from qrag_jax.environments import positions
from qrag_jax.environments.chunks import state_width
from qrag_jax.errors import InputError
from qrag_jax.evaluators import episodes
from qrag_jax.metrics.bootstrap import columns_text
from qrag_jax.metrics.facts import (
    NAMES,
    PLANNED,
    TRAINED,
    UNTRAINED,
    compared,
    summarise,
    table,
    until_found,
)
from qrag_jax.metrics.row_log import begin
from qrag_jax.metrics.rows import RETRIEVALS, Row, log_name
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.heads.embedding import Params
from qrag_jax.rollouts.beam_search import BeamSearch
from qrag_jax.rollouts.block_shapes import choose_block_shapes
from qrag_jax.rollouts.chunks import CHUNK, Actor, check_fit
from qrag_jax.runtime.aot import PeakMemory
from qrag_jax.runtime.embedding_files import EmbeddingFiles, encoder_key
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.plots import plot_lengths
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.runtime.whole_files import log_locks, write_whole
from qrag_jax.systems.config import load_config
from qrag_jax.systems.saved_run import SavedRun
from qrag_jax.systems.scoring import FREE_FIELDS, SUMMARY, ScoreOptions, are_others, is_free

DATA = ("data.", "eval.path")  # fields that say what is evaluated on
# Settings of the beam search: greedy play to the end does not depend on them.
BEAM_FIELDS = ("eval.beam", "eval.beam_score", "eval.stop_threshold")


def score_run(workdir: Path, given: ConfigDict, options: ScoreOptions) -> dict[str, Any]:
    """Scores the run's checkpoint and the encoder it started from; returns the summary.

    If the data are those of the training run, and one file, only the part held out for evaluation
    is scored.
    """
    are_others(workdir, given, DATA, options.out)
    saved, run = load_config(workdir / CONFIG_NAME), SavedRun.open(workdir, given)
    config = run.config
    same = (given.data.path, given.eval.path) == (saved.data.path, saved.eval.path)
    loaded_samples = load_split(config.dev_data, "dev", hold_out=same and not config.eval.path)
    for line in loaded_samples.report:
        print(line)
    noise.check_unseen(workdir, config.dev_data.backgrounds)
    evaluator = _evaluator(run, loaded_samples.all, options)
    asked, count = fingerprint(evaluator.shown), len(evaluator.indices)
    out, file = options.out or workdir / "eval", log_name(config.eval.seed)
    trained, step = run.trained(options.checkpoint)
    own = checkpoint_label(options.checkpoint, step)
    summary: dict[str, Any] = {"checkpoint": options.checkpoint, "step": step}
    summary["best_is_untrained"] = options.checkpoint == "best" and step == 0
    played: dict[str, list[Row]] = {}
    for name, label, params in ((UNTRAINED,) * 2 + (run.untrained(),), (TRAINED, own, trained)):
        weights, started = weights_digest(params), time.monotonic()
        record = log_record(run, label, weights, asked, searched=False)
        logs = [out / label / file, out / label / f"single_step_{file}"]
        rows, new = _logged(
            logs,
            record,
            count,
            lambda done: evaluator.batches(params, done),  # noqa: B023
            restart=options.restart,
        )
        played |= {NAMES[name, steps]: own for steps, own in zip(("multi", "single"), rows)}
        speed = new / (time.monotonic() - started) if new else None
        summary["episodes_per_second"] = speed
    if config.eval.searches:
        searcher = beam_search(run, trained, [evaluator.store])
        record = log_record(run, own, weights, asked, searched=True)
        shown = LazySamples(count, lambda i: evaluator.samples[evaluator.indices[i]])
        log = out / own / f"planned_{file}"
        played[PLANNED], _ = _searched(searcher, run, log, record, shown, restart=options.restart)
    summary |= compared(played, in_full=config.rollout.never_terminate)
    summary["samples"] = count
    summary["seconds"] = training_seconds(workdir)
    path = out / (Path(file).stem + "_summary.json")
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
    print(f"retrieval log: {out / own / file}")
    print(f"summary: {path}")
    return summary


def _evaluator(
    run: SavedRun, samples: Sequence[Sample], options: ScoreOptions
) -> episodes.EpisodeEvaluator:
    config, encoder = run.config, run.loaded.encoder
    store = tokenise_samples(config.data, run.loaded.tokenizer, samples)
    shape = EpisodeShape.holding([store])
    check_fit(config.rollout, encoder, shape, {"evaluation": store})
    shapes = choose_block_shapes(
        config.encoder, config.rollout, encoder, shape, [store], platform=Platform.of(run.mesh)
    )
    order = np.random.default_rng(config.eval.seed).permutation(len(samples))
    return episodes.EpisodeEvaluator(
        play=episodes.make_play(run.player, shapes),
        mesh=run.mesh,
        samples=samples,
        store=store,
        shape=shape,
        batch_size=config.eval.batch_size,
        indices=sorted(order[: options.samples or len(samples)].tolist()),
    )


def checkpoint_label(checkpoint: str, step: int) -> str:
    """What a checkpoint is called in logs; also its folder in `eval`."""
    return f"{checkpoint}-{step}"


def training_seconds(workdir: Path) -> float | None:
    """How long the run was trained; None: nobody knows."""
    path = workdir / "training.json"
    return json.loads(path.read_text(encoding="utf-8"))["seconds"] if path.exists() else None


# ---------------------------------------------------------------- logs


def weights_digest(params: Params | Adapted) -> str:
    """A digest of all parameters."""
    return encoder_key(params, {})[:16]


def log_record(
    run: SavedRun, label: str, weights: str, samples: str, *, searched: bool
) -> dict[str, Any]:
    """What a retrieval log depends on: all settings that can change one of its rows.

    It has the run's config without the fields that change no row, by the names that they have on
    the command line. So a new field of the config is in it without being listed here.

    Args:
        label: the checkpoint's, such as "best-160" or "untrained".
        weights: their digest.
        samples: fingerprint of the questions.
        searched: True for beam search or a rule for stopping, False for greedy play to the end.
    """
    free = FREE_FIELDS if searched else (*FREE_FIELDS, *BEAM_FIELDS)
    return {
        "encoder": label,
        "weights": weights,
        "samples": samples,
        "tokenizer": run.loaded.tokenizer.fingerprint(),
        # What config.encoder.dtype "auto" means on this machine.
        "precision": list(map(str, run.loaded.encoder.module.precision)),
        **{
            # JSON has no infinities.
            f"config.{name}": str(value) if value in (math.inf, -math.inf) else value
            for name, value in run.fields.items()
            if not is_free(name, free)
        },
    }


def _logged(
    logs: Sequence[Path],
    record: Mapping[str, Any],
    count: int,
    play: Callable[[int], Iterable[Sequence[Sequence[Row]]]],
    *,
    restart: bool,
) -> tuple[list[list[Row]], int]:
    """Plays what logs that are written together lack.

    Args:
        play: number of the first question → parts, each with rows for each log.

    Returns:
        the rows of each log, and how many questions were played.
    """
    with log_locks(*logs):
        for log in logs:
            begin(log, record, restart=restart)
        rows = [RETRIEVALS.read_partial(log, count) for log in logs]
        # They are written one after the other: go on after the last question in all of them.
        first = done = min(map(len, rows))
        if done:
            print(f"{logs[0]}: {done} of {count} questions are in the log already")
        with tqdm(
            total=count, initial=done, unit="episode", desc=logs[0].stem, disable=done == count
        ) as bar:
            for part in play(done):
                for log, own, new in zip(logs, rows, part, strict=True):
                    missing = new[max(len(own) - done, 0) :]
                    RETRIEVALS.append(log, missing)
                    own += missing
                done += len(part[0])
                bar.update(len(part[0]))
    return rows, count - first


def _searched(
    searcher: BeamSearch,
    run: SavedRun,
    log: Path,
    record: Mapping[str, Any],
    samples: Sequence[Sample],
    *,
    restart: bool,
) -> tuple[list[Row], int]:
    """As `_logged`, by beam search."""

    def play(done: int) -> Iterable[list[list[Row]]]:
        for sample, path in searcher.play(samples[done:]):
            # Without facts there is no return.
            ret = _return(run.player, sample, path.taken) if sample.support else None
            yield [[episodes.make_row(sample, list(path.taken), list(path.q), ret)]]

    (rows,), new = _logged([log], record, len(samples), play, restart=restart)
    return rows, new


def _return(player: episodes.Player, sample: Sample, taken: Sequence[int]) -> float:
    """The discounted return of one episode, from its taken and its supporting chunks alone."""
    if not taken:
        return 0.0
    chunks = sorted({*taken, *sample.support})
    support = np.isin([*chunks, -1], sample.support)[None]  # the last column is STOP's
    actions = np.searchsorted(chunks, taken)[None]
    played = types.SimpleNamespace(actions=actions, valid=np.ones(actions.shape, bool))
    batch = types.SimpleNamespace(support=support)
    rewards = player.feedback(batch, played)  # type: ignore[arg-type]
    return float(discounted_return(rewards[0], player.gamma))


def beam_search(
    run: SavedRun,
    params: Params | Adapted,
    stores: Sequence[TokenStore],
    embeddings: Path | None = None,
) -> BeamSearch:
    """The beam search of a run, over documents of any length.

    Args:
        stores: tokens of samples of typical lengths, for which the block shapes are chosen.
        embeddings: folder where embeddings of chunks are kept for later commands.
    """
    config, player, tokenizer = run.config, run.player, run.loaded.tokenizer
    encoder, rollout = player.encoder, player.config
    # The longest possible rows, not the longest of these samples: other documents follow.
    in_state = rollout.max_chunk_tokens_in_state
    longest = max(rollout.max_chunk_tokens - 2, in_state)
    others = state_width(len(encoder.state_opening), 0, in_state, rollout.max_steps - 1)
    room = encoder.max_positions - others
    found = max(int(store.question_lengths.max()) for store in stores)
    questions = max(found, min(config.data.max_question_tokens, room))
    shape = EpisodeShape(questions, longest, max(int(s.chunk_counts.max()) for s in stores))
    check_fit(rollout, encoder, shape, {"evaluation": stores[0]})
    store = None
    if embeddings is not None:
        made_by = {
            "row_tokens": rollout.max_chunk_tokens,
            "tokenizer": tokenizer.fingerprint(),
            "scale": encoder.scale,
            "pooling": [encoder.pooling, encoder.normalise],
            "opening": list(encoder.chunk_opening),
            "precision": list(map(str, encoder.module.precision)),
        }
        folder = embeddings / encoder_key(encoder.tower(params, CHUNK), made_by)
        store = EmbeddingFiles(folder, encoder.width)
    shapes = choose_block_shapes(
        config.encoder, rollout, encoder, shape, stores, platform=Platform.of(player.mesh)
    )
    return BeamSearch(
        player.mesh,
        player.shardings,
        Actor(encoder, shapes, rollout),
        params,
        tokenizer=tokenizer,
        config=config.beam,
        max_question_tokens=questions,
        store=store,
    )


# ---------------------------------------------------------------- documents of several lengths

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
    label, weights = checkpoint_label(options.checkpoint, step), weights_digest(params)
    if label == "best-0":
        print("best = untrained: the best checkpoint is that of step 0")
    out = options.out or run.workdir / "lengths"
    # All lengths are checked before anything is computed.
    noise.check_unseen(run.workdir, config.dev_data.backgrounds)
    for length in chunks:
        positions.check_chunks(config.env.positions, length)
    sets = documents_of_lengths(config.dev_data, samples, every_story=every_story)
    shortest = sets[chunks[0]]
    for length, documents in sets.items():
        if documents.fit != shortest.fit or length == chunks[0]:
            print(documents.line)
            print(f"{length} chunks: {documents.fit} stories")
    store = tokenise_samples(config.data, run.loaded.tokenizer, list(shortest.samples[:64]))
    searcher = beam_search(run, params, [store], embeddings)
    tokens_per_chunk = float(store.chunk_lengths.mean())
    results: list[dict] = []
    at_shortest: dict[str, float] = {}
    for length, documents in sets.items():
        log = out / label / log_name(config.eval.seed, length)
        about = f"{_documents_digest(documents.samples)} of {documents.fit}"
        record = log_record(run, label, weights, about, searched=True)
        before, memory = dataclasses.replace(searcher.table.counts), PeakMemory()
        started = time.perf_counter()
        rows, new = _searched(
            searcher, run, log, record, documents.samples, restart=options.restart
        )
        seconds, counts = time.perf_counter() - started, searcher.table.counts
        at_shortest = at_shortest or {row.id: row.em or 0.0 for row in rows}
        known = [at_shortest[row.id] for row in rows if row.id in at_shortest]
        means, scores = _means_of(rows)
        # These scores use the answer key: an episode ends once all facts are found.
        cut_means, cut_scores = _means_of([until_found(row) for row in rows])
        results.append(
            {
                "chunks": length,
                "tokens": round(length * tokens_per_chunk),
                "fits": documents.fit.fits,
                "stories": documents.fit.stories,
                "em_shortest": sum(known) / len(known) if len(known) == len(rows) else None,
                "samples": len(rows),
                **means,
                "f1_until_found": cut_means["fact_f1"],
                "precision_until_found": cut_means["fact_precision"],
                "embedded": counts.embedded - before.embedded,
                "embed_seconds": counts.seconds - before.seconds,
                "seconds_per_episode": seconds / new if new else None,
                "peak_memory_mib": memory.mebibytes() if new else None,
                "mapped_mib": searcher.table.mapped_bytes / 2**20,
                "intervals": scores,
                "until_found": cut_means | {"intervals": cut_scores},
            }
        )
        print(_table(results[-1:]))  # one may take minutes
    print(_table(results))
    path = out / label / f"{Path(log_name(config.eval.seed)).stem}_lengths"
    write_whole(path.with_suffix(".json"), json.dumps(results, indent=2) + "\n")
    plot_lengths(results, path.with_suffix(".png"), f"{out.parent.name}, {label}")
    print(
        "f1_until_found and precision_until_found use the answer key: an episode ends once all "
        "supporting facts are found"
    )
    print(f"table: {path.with_suffix('.json')}\nplot: {path.with_suffix('.png')}")
    return results


def documents_of_lengths(
    config: DataConfig, counts: Mapping[int, int], *, every_story: bool = False
) -> dict[int, Documents]:
    """Makes the first documents of each length, from the stories that fit the shortest length.

    Short documents have room only for short stories, which are the easy ones. If each length used
    all stories that fit it, a retriever would look worse on longer documents for that reason alone.

    Args:
        config: the data that are evaluated on.
        counts: length in chunks → number of documents.
        every_story: each length uses all stories that fit it, so the questions differ.
    """
    names = [name for name, weight in config.sources.items() if weight]
    if names == [BABILONG]:
        limits = (config.babilong.most_facts, 0 if every_story else min(counts))
        most = min(filter(None, limits), default=0)
        made = dataclasses.replace(config.babilong, stories=config.path, most_facts=most)
        return {n: babilong_documents(made, "dev", n, count) for n, count in counts.items()}
    if names == [NIAH] and not config.path:
        return {n: niah_documents(config.niah, "dev", n, count) for n, count in counts.items()}
    raise InputError(
        f"documents of {', '.join(names)} cannot be made longer or shorter; score runs of "
        "babilong, or of niah without data files, at several lengths."
    )


def _means_of(rows: Sequence[Row]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Means by name, and the same with their intervals."""
    scores = {name: score for name, score in summarise(rows).items() if name != "samples"}
    return {name: score["mean"] for name, score in scores.items()}, scores


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
