"""Scores a run on documents of several lengths, without training it again.

    python -m qrag_jax.evaluate_lengths --workdir=RUN --chunks=50,160,1200,4600,40000

The same questions are asked at every length: those of stories that fit the shortest, unless
`--every_story` is given. One table and one plot show accuracy, seconds and peak memory against
length. Fields of the run's config can be overridden, for example `--config.eval.beam=4`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from qrag_jax.data.generators import book_record
from qrag_jax.data.lazy_samples import LazySamples
from qrag_jax.data.sample import Sample, fingerprint
from qrag_jax.data.token_stores import tokenise_samples
from qrag_jax.environments import positions
from qrag_jax.errors import InputError
from qrag_jax.evaluators import beam
from qrag_jax.evaluators.lengths import Documents, documents_of_lengths
from qrag_jax.evaluators.log_record import Retriever, log_record
from qrag_jax.metrics import retrieval_log
from qrag_jax.metrics.facts import summarise
from qrag_jax.metrics.retrieval_log import Row
from qrag_jax.metrics.until_found import until_found
from qrag_jax.rollouts.beam_search import BeamSearch
from qrag_jax.runtime import commandline
from qrag_jax.runtime.length_plot import plot_lengths
from qrag_jax.runtime.process import PeakMemory
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems import run_flags
from qrag_jax.systems.saved_run import SavedRun

CHUNKS = flags.DEFINE_list(
    "chunks", ["50", "160", "1200", "4600"], "Lengths of documents, in chunks."
)
SAMPLES = flags.DEFINE_list("samples", ["100"], "Documents of each length; the last goes on.")
EMBEDDINGS = flags.DEFINE_string(
    "embeddings",
    None,
    "Folder that keeps embeddings of chunks; on a CPU their table is mapped from its disk.",
)
EVERY_STORY = flags.DEFINE_bool(
    "every_story", False, "At each length all stories that fit it, not those that fit the shortest."
)
OUT = flags.DEFINE_string("out", None, "Folder of logs, table and plot; default WORKDIR/lengths.")
RESTART = flags.DEFINE_bool("restart", False, "Throw partial logs away instead of resuming them.")

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


def evaluate_lengths(run: SavedRun, chunks: Sequence[int], samples: Sequence[int]) -> list[dict]:
    """Plays documents of each length, shortest first; returns one result a length.

    `fits` and `stories` say how many of the split's stories were asked from; `em_shortest` is fact
    EM of the same questions at the shortest length, None if not all of them were asked there.

    Raises:
        InputError: the run's documents cannot be made that long, or a log is of other settings.
    """
    config = run.config
    params, step = run.trained(run_flags.checkpoint())
    label = f"{run_flags.checkpoint()}-{step}"
    retriever = Retriever.of(label, params)
    if label == "best-0":
        print("best = untrained: no evaluation during training scored above the first weights")
    out = Path(OUT.value) if OUT.value else run.workdir / "lengths"
    # Refused before anything is computed, whichever length it is.
    book_record.check_unseen(run.workdir, config.dev_data.backgrounds)
    for length in chunks:
        positions.check_chunks(config.env.positions, length)
    sets = documents_of_lengths(config.dev_data, chunks, samples, every_story=EVERY_STORY.value)
    shortest = sets[chunks[0]]
    for length, documents in sets.items():
        if documents.fit != shortest.fit or length == chunks[0]:
            print(documents.line)
            print(f"{length} chunks: {documents.fit} stories")
    store = tokenise_samples(config.data, run.loaded.tokenizer, list(shortest.samples[:64]))
    kept = Path(EMBEDDINGS.value).expanduser() if EMBEDDINGS.value else None
    searcher = beam.make_beam_search(run.player, run.search, params, [store], kept)
    tokens_per_chunk = float(store.chunk_lengths.mean())
    results: list[dict] = []
    at_shortest: dict[str, float] = {}
    for length, documents in sets.items():
        log = out / label / retrieval_log.log_name(config.eval.seed, length)
        result, rows = _play(searcher, run, documents, log, retriever)
        at_shortest = at_shortest or {row.id: row.em for row in rows}
        about = {
            "chunks": length,
            "tokens": round(length * tokens_per_chunk),
            "fits": documents.fit.fits,
            "stories": documents.fit.stories,
            "em_shortest": _mean([at_shortest.get(row.id) for row in rows]),
        }
        means, scores = _scores(rows)
        # With the answer key: an episode ends once all facts are found.
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
) -> tuple[dict[str, Any], list[Row]]:
    samples = documents.samples
    before = dataclasses.replace(searcher.table.counts)
    told = f"{_fingerprint(samples)} of {documents.fit}"
    meta = log_record(run.fields, run.loaded, retriever, told, searched=True)
    search_log = beam.SearchLog(searcher, run.player, log, meta)
    memory = PeakMemory()
    started = time.perf_counter()
    rows, new = search_log.play(samples, restart=RESTART.value)
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
    """Their mean, None where one is missing."""
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if len(known) == len(scores) else None


def _fingerprint(documents: Sequence[Sample]) -> str:
    """Of the first and the last one, and of all texts that documents are made of: making them all
    would take as long as playing them."""
    content = documents.content if isinstance(documents, LazySamples) else ""
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return f"{len(documents)} {fingerprint([documents[0], documents[-1]])} {digest}"


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as text, one line a length under a heading."""
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


def _counts(name: str, words: Sequence[str]) -> list[int]:
    try:
        counts = [int(word.replace("_", "")) for word in words]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise InputError(f"--{name}={','.join(words)}: give counts from 1 up, with commas between.")
    return counts


def main() -> int:
    """Reads the flags and scores."""
    chunks, samples = _counts("chunks", CHUNKS.value), _counts("samples", SAMPLES.value)
    if len(samples) > len(chunks):
        raise InputError(
            f"--samples={','.join(SAMPLES.value)} has more counts than --chunks has lengths; give "
            "one for each length, or one for all."
        )
    samples += samples[-1:] * (len(chunks) - len(samples))
    chunks, samples = map(list, zip(*sorted(zip(chunks, samples, strict=True)), strict=True))
    run = SavedRun.open(run_flags.workdir(), flags.FLAGS.config)
    with commandline.writing(OUT.value or run.workdir / "lengths", "--out"):
        evaluate_lengths(run, chunks, samples)
    return 0


if __name__ == "__main__":
    commandline.run(main, define=run_flags.define)
