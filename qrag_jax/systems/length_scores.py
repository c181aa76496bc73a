"""Scores a run on documents of several lengths; writes one table and one plot."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qrag_jax.data.generators import noise
from qrag_jax.data.lazy_samples import Documents, LazySamples
from qrag_jax.data.loading import tokenise_samples
from qrag_jax.data.sample import Sample, fingerprint
from qrag_jax.environments import positions
from qrag_jax.evaluators import beam
from qrag_jax.evaluators.lengths import documents_of_lengths
from qrag_jax.evaluators.log_record import Retriever, log_record
from qrag_jax.metrics import retrieval_log
from qrag_jax.metrics.chunk_filters import until_found
from qrag_jax.metrics.facts import summarise
from qrag_jax.metrics.retrieval_log import Row
from qrag_jax.rollouts.beam_search import BeamSearch
from qrag_jax.runtime.process import PeakMemory
from qrag_jax.runtime.threshold_plot import plot_lengths
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.saved_run import SavedRun

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


@dataclasses.dataclass(frozen=True)
class LengthOptions:
    """What is scored, and where the scores are written.

    Attributes:
        checkpoint: "best" or "last".
        chunks: lengths of the documents, in chunks, shortest first.
        samples: number of documents of each length.
        every_story: each length uses all stories that fit it, not those that fit the shortest.
        embeddings: folder that keeps embeddings of chunks.
        out: folder of logs, table and plot; None: `lengths` in the run's folder.
        restart: throw partial logs away.
    """

    checkpoint: str
    chunks: Sequence[int]
    samples: Sequence[int]
    every_story: bool = False
    embeddings: Path | None = None
    out: Path | None = None
    restart: bool = False


def score_lengths(run: SavedRun, options: LengthOptions) -> list[dict]:
    """Plays documents of each length, shortest first.

    Returns:
        one result for each length. `stories` is the number of stories in the split, `fits` the
        number of those that are short enough. `em_shortest` is the fact EM of the same questions at
        the shortest length; None if some of them were not asked there.
    """
    config, chunks, samples = run.config, options.chunks, options.samples
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
    sets = documents_of_lengths(config.dev_data, chunks, samples, every_story=options.every_story)
    shortest = sets[chunks[0]]
    for length, documents in sets.items():
        if documents.fit != shortest.fit or length == chunks[0]:
            print(documents.line)
            print(f"{length} chunks: {documents.fit} stories")
    store = tokenise_samples(config.data, run.loaded.tokenizer, list(shortest.samples[:64]))
    searcher = beam.make_beam_search(run.player, run.search, params, [store], options.embeddings)
    tokens_per_chunk = float(store.chunk_lengths.mean())
    results: list[dict] = []
    at_shortest: dict[str, float] = {}
    for length, documents in sets.items():
        log = out / label / retrieval_log.log_name(config.eval.seed, length)
        result, rows = _play(searcher, run, documents, log, retriever, restart=options.restart)
        at_shortest = at_shortest or {row.id: row.em or 0.0 for row in rows}
        about = {
            "chunks": length,
            "tokens": round(length * tokens_per_chunk),
            "fits": documents.fit.fits,
            "stories": documents.fit.stories,
            "em_shortest": _mean([at_shortest.get(row.id) for row in rows]),
        }
        means, scores = _scores(rows)
        # These scores use the answer key: an episode ends once all facts are found.
        cut_means, cut_scores = _scores([until_found(row) for row in rows])
        means["f1_until_found"] = cut_means["fact_f1"]
        means["precision_until_found"] = cut_means["fact_precision"]
        cut = {"until_found": cut_means | {"intervals": cut_scores}}
        results.append(
            about | {"samples": len(rows)} | means | result | {"intervals": scores} | cut
        )
        print(table(results[-1:]) if len(results) == 1 else table(results[-1:]).split("\n")[1])
    _write(out, label, results, config)
    return results


def _scores(rows: Sequence[Row]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Means by name, and the same with their intervals."""
    scores = {name: score for name, score in summarise(rows).items() if name != "samples"}
    return {name: score["mean"] for name, score in scores.items()}, scores


def _play(
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
    told = f"{_fingerprint(samples)} of {documents.fit}"
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


def _fingerprint(documents: Sequence[Sample]) -> str:
    """A digest of the first and the last document, and of all texts that documents are made of.

    Making all documents would take as long as playing them.
    """
    content = documents.content if isinstance(documents, LazySamples) else ""
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return f"{len(documents)} {fingerprint([documents[0], documents[-1]])} {digest}"


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as text: a heading and one line for each length."""
    lines = [" ".join(name.rjust(_width(name)) for name in COLUMNS)]
    for result in results:
        cells = (
            ("" if result[name] is None else format(result[name], form)).rjust(_width(name))
            for name, form in COLUMNS.items()
        )
        lines.append(" ".join(cells))
    return "\n".join(lines)


def _width(name: str) -> int:
    return max(len(name), 9)


def _write(out: Path, label: str, results: Sequence[dict], config: Any) -> None:
    path = out / label / f"{Path(retrieval_log.log_name(config.eval.seed)).stem}_lengths"
    write_whole(path.with_suffix(".json"), json.dumps(results, indent=2) + "\n")
    plot_lengths(results, path.with_suffix(".png"), f"{out.parent.name}, {label}")
    print(
        "f1_until_found and precision_until_found use the answer key: an episode ends once all "
        "supporting facts are found"
    )
    print(f"table: {path.with_suffix('.json')}\nplot: {path.with_suffix('.png')}")
