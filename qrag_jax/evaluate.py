"""Scores a trained retriever: qrag evaluate --workdir=runs/hotpotqa

Runs of all systems are scored by the same command, and with --system=FILE.py those of a system of
your own, by its own `evaluate`. Any field of the run's config can be overridden, for example
`--config.data.path=FOLDER --out=OTHER` to score other data. Priority: command line, then the file
given by `--eval_config`, then the run's saved config.

    qrag evaluate --workdir=RUN --chunks=50,160,1200,4600,40000

scores Q-RAG on documents of several lengths, each with the same questions: those of the stories
that fit the shortest length (`--every_story`: all that fit it).

    qrag evaluate --log=HELD_OUT_LOG --test=OTHER_LOG

tunes the Q-value at which Q-RAG stops on one retrieval log, and reports its scores on the other
against every fixed budget and the oracle `early_stop`. Without `--test` a hash of the ids splits
the log into two halves. Writes `stopping.json` and `stopping.png`.

    qrag evaluate --log=LOG --filter=NAME --out=NEW.jsonl

writes a copy of a log in which a filter has chosen the chunks of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from qrag_jax import systems
from qrag_jax.errors import InputError
from qrag_jax.metrics import bootstrap, facts, row_log, stopping
from qrag_jax.runtime import commandline, interrupt
from qrag_jax.runtime.whole_files import log_locks, writing
from qrag_jax.systems import run_flags
from qrag_jax.systems.scoring import ScoreOptions, resumable, score_run

SAMPLES = flags.DEFINE_list(
    "samples", [], "Questions to score, 0 or none for all; of --chunks: documents of each length."
)
OUT = flags.DEFINE_string("out", None, "Folder of logs and summaries; default WORKDIR/eval.")
SAMPLED = flags.DEFINE_integer(
    "sampled", 0, "Of agents: episodes drawn per question, for pass@k; of RLVR for vote@k, too.", 0
)
RETRIEVERS = flags.DEFINE_list("retrievers", [], "Of RLVR: bm25,golden,…; default the run's own.")
RESTART = flags.DEFINE_bool("restart", False, "Throw partial logs away instead of resuming them.")
CHUNKS = flags.DEFINE_list("chunks", [], "Of Q-RAG: lengths of documents, in chunks.")
EMBEDDINGS = flags.DEFINE_string(
    "embeddings",
    None,
    "With --chunks: folder that keeps embeddings; on a CPU their table is mapped from its disk.",
)
EVERY_STORY = flags.DEFINE_bool(
    "every_story", False, "With --chunks: all stories that fit, not those that fit the shortest."
)
LOG = flags.DEFINE_string("log", None, "Retrieval log to tune stopping on, or to filter.")
TEST = flags.DEFINE_string("test", None, "With --log: log to report on; default: half of it.")
BUDGETS = flags.DEFINE_list("budgets", [], "Fixed budgets to compare with; default 1,2,…,all.")
OBJECTIVE = flags.DEFINE_enum(
    "objective", "fact_f1", stopping.OBJECTIVES, "What the threshold and budget maximise."
)
FILTER = flags.DEFINE_string("filter", None, f"With --log: one of {', '.join(facts.FILTERS)}.")
THRESHOLD = flags.DEFINE_float("threshold", None, "For qvalue: stop at the first Q <= this.")
STEPS = flags.DEFINE_integer("steps", None, "For retrieval_step: how many chunks to keep.")


def main() -> int:
    if LOG.value:
        return _of_log(Path(LOG.value))
    workdir, config = Path(flags.FLAGS.workdir), flags.FLAGS.config
    run_flags.refuse_flags(("retrievers", "sampled", "chunks"), config.system)
    counts = _counts("samples", SAMPLES.value, least=0)
    options = ScoreOptions(
        checkpoint=flags.FLAGS.checkpoint,
        samples=counts[0] if counts else 0,
        sampled=SAMPLED.value,
        retrievers=tuple(RETRIEVERS.value),
        out=Path(OUT.value) if OUT.value else None,
        restart=RESTART.value,
    )
    if CHUNKS.value:
        return _lengths(workdir, config, options, counts or [100])
    if len(counts) > 1:
        raise InputError("--samples has several numbers, which are for --chunks; give one.")
    with writing(OUT.value or workdir / "eval", "--out"):
        return resumable(lambda: score_run(workdir, config, options), "what is scored")


def _lengths(workdir: Path, config: ConfigDict, options: ScoreOptions, counts: list[int]) -> int:
    chunks = _counts("chunks", CHUNKS.value)
    if len(counts) > len(chunks) or not min(counts):
        raise InputError("--samples: give one count for each of --chunks, or one for all, above 0.")
    counts += counts[-1:] * (len(chunks) - len(counts))
    samples = dict(sorted(zip(chunks, counts, strict=True)))
    embeddings = Path(EMBEDDINGS.value).expanduser() if EMBEDDINGS.value else None
    how: Any = {"every_story": EVERY_STORY.value, "embeddings": embeddings}
    with writing(OUT.value or workdir / "lengths", "--out"), interrupt.StopSignal() as stop:
        kind, what = systems.kind(config), (workdir, config, options, samples, stop)
        return resumable(lambda: kind.score_lengths(*what, **how), "what is played")


def _counts(name: str, words: Sequence[str], least: int = 1) -> list[int]:
    digits = [word.replace("_", "") for word in words]
    counts = [int(word) if word.isdecimal() else -1 for word in digits]
    if min(counts, default=least) < least:
        raise InputError(f"--{name}={','.join(words)}: give counts from {least} up.")
    return counts


def _of_log(log: Path) -> int:
    """Tunes a threshold on a log, or writes a filtered copy of it."""
    out = Path(OUT.value) if OUT.value else None
    if not FILTER.value:
        test = Path(TEST.value) if TEST.value else None
        budgets = _counts("budgets", BUDGETS.value)
        lines = stopping.tune(
            log, test_log=test, out=out, budgets=budgets, objective=OBJECTIVE.value
        )
        print("\n".join(lines))
        return 0
    if out is None:
        raise InputError("give the log to write, for example --out=NEW.jsonl.")
    parameters = {"threshold": THRESHOLD.value, "steps": STEPS.value}
    parameters = {name: value for name, value in parameters.items() if value is not None}
    rows, meta = row_log.read_retrievals(log), row_log.read_record(log)
    kept = [*map(facts.chunk_filter(FILTER.value, parameters), rows)]
    applied = {"name": FILTER.value, **parameters}
    meta |= {"filtered_from": str(log), "filters": [*meta.get("filters", []), applied]}
    with writing(out, "--out"), log_locks(out):
        for path in (out, row_log.record_path(out)):
            if path.exists():
                raise InputError(f"{path} exists already; delete it or give another --out")
        row_log.RETRIEVALS.write(out, kept, meta)
    both = (("before", rows), ("after", kept))
    scores = ((name, bootstrap.with_intervals(facts.fact_columns(part))) for name, part in both)
    print("\n".join([*bootstrap.score_table(scores, stopping.COLUMNS), f"{len(kept)} rows: {out}"]))
    return 0


def define_flags(argv: Sequence[str]) -> None:
    if run_flags.argument(argv, "log") is None:  # a log alone needs no run
        run_flags.define(argv, outside=True)


if __name__ == "__main__":
    commandline.run(main, define=define_flags)
