"""Answers the questions of a retrieval log with a language model, and scores the answers.

    qrag answer --log=LOG --out=ANSWERS.jsonl --llm.url=URL --llm.model=NAME

URL is for example http://127.0.0.1:8000/v1. The model sees each question with the chunks that the
retriever took; `--filter` drops some of them first. LOG may be one of a query writer (LeReT); then
the model sees the passages found in the end.

A file that was begun with the same settings is resumed. A question without an answer (the call
failed, the prompt is too long, the text cannot be read) is counted, and asked again by the next
call. One of which a server failed is not scored, others score 0.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_dict, config_flags
from tqdm import tqdm

from qrag_jax.errors import InputError
from qrag_jax.evaluators import answers, evaluation
from qrag_jax.feedback.llm import AUTO, JUDGE, Question
from qrag_jax.llm.config import FAIL, SCORE, ClientConfig, Drawing
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.generation import Generation
from qrag_jax.metrics import bootstrap, row_log, summaries
from qrag_jax.metrics import row_log as logs
from qrag_jax.metrics.answers import RULES
from qrag_jax.metrics.facts import BY_FACTS, FILTERS, chunk_filter
from qrag_jax.runtime import commandline, config_fields, whole_files

PREFIX = "--llm."  # of the flags that give the model's settings


def define_flags(argv: Sequence[str]) -> None:
    flags.DEFINE_string("log", None, "Retrieval log with the questions and the chunks taken.")
    flags.DEFINE_string("out", None, "File of answers to write or to go on with.")
    flags.DEFINE_string("data", None, "File the questions are from: for aliases and types.")
    flags.DEFINE_integer("samples", 0, "Questions to answer, 0 for all.", lower_bound=0)
    flags.DEFINE_string("filter", "none", f"Chunk filter: one of {', '.join(FILTERS)}.")
    flags.DEFINE_float("threshold", None, "For qvalue: stop at the first Q <= this.")
    flags.DEFINE_integer("steps", None, "For retrieval_step: how many chunks to keep.")
    flags.DEFINE_string("prompt", AUTO, "Name of a prompt, or a .txt file; auto: by the data.")
    rules = (AUTO, *RULES)
    flags.DEFINE_enum("metric", AUTO, rules, "How answers are scored; auto: by the data set.")
    flags.DEFINE_enum("cut_off", FAIL, (FAIL, SCORE), "Answers cut by max_tokens.")
    flags.DEFINE_bool("judge", False, "Ask whether each answer is right, too.")
    flags.DEFINE_bool("restart", False, "Throw a partial file away instead of resuming it.")
    server = "The server, and how texts are drawn."
    config_flags.DEFINE_config_dict("llm", answer_settings(), server)


def main() -> int:
    """Asks the questions, writes the answers, prints scores; 1 if no question has an answer."""
    options = flags.FLAGS
    if not (options.log and options.out):
        raise InputError("give --log=RETRIEVAL_LOG and --out=ANSWERS.jsonl.")
    if not (options.llm.url and options.llm.model):
        raise InputError("give --llm.url=http://127.0.0.1:8000/v1 and --llm.model=NAME.")
    log, out = Path(options.log), Path(options.out)
    verdicts = out.with_name(f"{out.stem}.judge.jsonl")
    asked = _questions(log)
    drawn = dict(options.llm) | {"cut_off": options.cut_off}
    generation = Generation.of(drawn, prefix=PREFIX)
    golds = [[question.id, question.rule, question.type, *question.gold] for question in asked]
    applied = {"name": options.filter, "threshold": options.threshold, "steps": options.steps}
    # What the answers depend on; a file that was begun with other settings is not resumed.
    meta = {
        "model": options.llm["model"],
        "version": options.llm["version"],
        "log": hashlib.sha256(log.read_bytes()).hexdigest()[:16],
        "golds": hashlib.sha256(json.dumps(golds).encode()).hexdigest()[:16],
        "filter": {name: value for name, value in applied.items() if value is not None},
        "prompts": {question.prompt.name: question.prompt.fingerprint for question in asked},
        **{name: value for name, value in vars(generation).items() if name != "count"},
    }
    asked = asked[: options.samples or len(asked)]
    # Answer files whose names differ only in the ending share a file of verdicts: lock both.
    with whole_files.writing(out, "--out"), whole_files.log_locks(*dict.fromkeys((out, verdicts))):
        row_log.begin(out, meta, restart=options.restart)
        if options.judge:
            of_judge = {"answers": meta, "prompt": prompts.load(JUDGE).fingerprint}
            row_log.begin(verdicts, of_judge, restart=options.restart)
        elif options.restart:
            verdicts.unlink(missing_ok=True)
        return _run(asked, generation, meta, verdicts)


def _run(asked: list[Question], generation: Generation, meta: Any, verdict_file: Path) -> int:
    from qrag_jax.llm.client import Client

    options, out = flags.FLAGS, Path(flags.FLAGS.out)
    sent = {field.name: options.llm[field.name] for field in config_fields.fields_of(ClientConfig)}
    config = ClientConfig(**sent, prefix=PREFIX)
    verdicts, unjudged = None, list[logs.Miss]()
    if written := len(logs.ANSWERS.read_partial(out)):
        print(f"{written} questions are answered in {out} already")
    with Client(config, log=tqdm.write) as client:
        rows, misses = answers.answer(client.submit, generation, asked, out, config.concurrency)
        by_id = {row.id: row for row in rows}  # the file may hold more rows, in another order
        rows = [by_id[question.id] for question in asked if question.id in by_id]
        if options.judge:
            how = client.submit, generation, rows, verdict_file, config.concurrency
            verdicts, unjudged = answers.judge(*how)
        counters = client.counters().as_metrics()
    scores = summaries.answer_scores(rows, misses, verdicts)
    print("\n".join(summaries.answer_table(scores)))
    missed_file = out.with_name(f"{out.stem}.failures.jsonl")
    missed_file.unlink(missing_ok=True)
    if lacking := [*misses, *unjudged]:
        logs.MISSES.rewrite(missed_file, lacking)
    summary = {"provenance": meta, "scores": scores}
    whole_files.write_json(out.with_name(f"{out.stem}.summary.json"), summary)
    for what, missed in (("answer", misses), ("verdict", unjudged)):
        if missed:
            why = bootstrap.causes_text(missed)
            print(f"no {what}: {len(missed)} ({why}); see {missed_file}, call again to ask again")
    if cut := [row for row in rows if row.cut_characters]:
        chunks = sum(row.cut_chunks for row in cut)
        print(f"cut to fit: {len(cut)} prompts, by {chunks} whole chunks and parts of others")
    print(
        f"{len(rows)} answers: {out}\n"
        f"{counters['llm/calls']:.0f} calls, p50 {counters['llm/latency_p50']:.2f} s, "
        f"p99 {counters['llm/latency_p99']:.2f} s, {counters['llm/cache_hits']:.0f} from the cache"
    )
    return 0 if rows else 1


def answer_settings() -> ml_collections.ConfigDict:
    """The fields of `--llm.FIELD=VALUE`: those of `ClientConfig`, and how texts are drawn."""
    config = config_fields.section(Drawing)
    del config.cut_off  # a flag of its own
    for field in config_fields.fields_of(ClientConfig):
        default = "" if field.default is dataclasses.MISSING else field.default
        config[field.name] = config_dict.placeholder(float) if default is None else default
    return config


# ---------------------------------------------------------------- the questions of a log


def _questions(log: Path) -> list[Question]:
    options = flags.FLAGS
    keep = chunk_filter(options.filter, {"threshold": options.threshold, "steps": options.steps})
    if evaluation.kind_of(log) == logs.HOPS.name:
        rows = answers.pool_rows(log)
    else:
        rows = logs.read_retrievals(log, needs_facts=options.filter in BY_FACTS)
    golds = answers.golds_of(Path(options.data), {row.id for row in rows}) if options.data else None
    return answers.questions(
        log, rows, keep, prompt=options.prompt, metric=options.metric, golds=golds
    )


if __name__ == "__main__":
    commandline.run(main, define=define_flags)
