"""Answers a retrieval log's questions: python -m qrag_jax.answer --log=LOG --out=ANSWERS.jsonl
--llm.url=http://127.0.0.1:8000/v1 --llm.model=NAME

A language model is asked each question with the chunks taken (`--filter` drops some before), and
its answers are scored. A file begun with the same settings is gone on with; questions that got no
answer are counted, never scored, and asked again by the next call. With `--judge` the model is
asked too whether each answer is right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_dict, config_flags
from tqdm import tqdm

from qrag_jax.data.files.records import read_records
from qrag_jax.data.sample import BadRecord
from qrag_jax.data.sources import fields
from qrag_jax.errors import InputError
from qrag_jax.evaluators import answers as answering
from qrag_jax.evaluators.answers import Gold
from qrag_jax.feedback.questions import AUTO, JUDGE, Question
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.generation import FAIL, SCORE, Generation
from qrag_jax.metrics import answer_log, answer_table, answers, retrieval_log
from qrag_jax.metrics.answer_log import AnswerRow, Miss
from qrag_jax.metrics.chunk_filters import FILTERS, chunk_filter
from qrag_jax.runtime import commandline
from qrag_jax.runtime.locks import log_locks
from qrag_jax.runtime.whole_files import reason, write_whole

NOTHING_ANSWERED = 1


def _settings() -> ml_collections.ConfigDict:
    """`--llm.field=value`: those of `ClientConfig`, and how texts are drawn."""
    config = config_dict.ConfigDict(
        {
            "temperature": 0.0,
            "max_tokens": 256,
            "top_p": config_dict.placeholder(float),
            "seed": config_dict.placeholder(int),
            "enable_thinking": config_dict.placeholder(bool),
            "max_prompt_tokens": 0,
            "tokenizer": "",
        }
    )
    for field in dataclasses.fields(ClientConfig):
        given = field.default is not dataclasses.MISSING
        default = field.default if given else ""
        config[field.name] = config_dict.placeholder(float) if default is None else default
    return config


LOG = flags.DEFINE_string("log", None, "Retrieval log with the questions and the chunks taken.")
OUT = flags.DEFINE_string("out", None, "File of answers to write or to go on with.")
DATA = flags.DEFINE_string("data", None, "File the questions are from: for aliases and types.")
SAMPLES = flags.DEFINE_integer("samples", 0, "Questions to answer, 0 for all.", lower_bound=0)
FILTER = flags.DEFINE_string("filter", "none", f"Chunk filter: one of {', '.join(FILTERS)}.")
THRESHOLD = flags.DEFINE_float("threshold", None, "For qvalue: stop at the first Q <= this.")
STEPS = flags.DEFINE_integer("steps", None, "For retrieval_step: how many chunks to keep.")
PROMPT = flags.DEFINE_string("prompt", AUTO, "Name of a prompt, or a .txt file; auto: by the id.")
METRIC = flags.DEFINE_enum("metric", AUTO, (AUTO, *answers.RULES), "How answers are scored.")
CUT_OFF = flags.DEFINE_enum("cut_off", FAIL, (FAIL, SCORE), "Answers cut by max_tokens.")
BATCH = flags.DEFINE_integer("batch", 0, "Answers written at once, 0: concurrency.", lower_bound=0)
WITH_JUDGE = flags.DEFINE_bool("judge", False, "Ask whether each answer is right, too.")
RESTART = flags.DEFINE_bool("restart", False, "Throw a partial file away instead of resuming it.")
LLM = config_flags.DEFINE_config_dict("llm", _settings(), "The server, and how texts are drawn.")


def main() -> int:
    """Asks, writes and prints the scores; 1 if no question has an answer."""
    if not (LOG.value and OUT.value):
        raise InputError("give --log=RETRIEVAL_LOG and --out=ANSWERS.jsonl.")
    if not (LLM.value.url and LLM.value.model):
        raise InputError("give --llm.url=http://127.0.0.1:8000/v1 and --llm.model=NAME.")
    log, out = Path(LOG.value), Path(OUT.value)
    asked, all_questions = _questions(log)
    drawn = LLM.value.to_dict() | {"cut_off": CUT_OFF.value}
    generation = Generation.of(drawn, prefix="--llm.")
    meta = _meta(log, all_questions, generation)
    client_config = ClientConfig(
        **{field.name: LLM.value[field.name] for field in dataclasses.fields(ClientConfig)}
    )
    try:
        # Files of two names that differ in their ending have one file of verdicts.
        with log_locks(*dict.fromkeys((out, _verdict_file(out)))):
            _begin(out, meta, len(all_questions))
            return _run(out, asked, generation, meta, client_config)
    except OSError as error:
        raise InputError(f"{out} cannot be written ({reason(error)}); give another --out") from None


def _verdict_file(out: Path) -> Path:
    return out.with_name(f"{out.stem}.judge.jsonl")


def _begin(out: Path, meta: dict[str, Any], questions: int) -> None:
    """Refuses files that were begun with other settings, or that two processes wrote to."""
    verdict_file = _verdict_file(out)
    judge_meta = {"answers": meta, "prompt": prompts.load(JUDGE).fingerprint}
    for path, provenance in ((out, meta), (verdict_file, judge_meta)):
        if RESTART.value:
            retrieval_log.discard(path)
        if path == out or WITH_JUDGE.value:
            retrieval_log.check_meta(path, provenance)
    retrieval_log.check_count(out, len(answer_log.read_partial(out, AnswerRow)), questions)


def _run(
    out: Path,
    asked: list[Question],
    generation: Generation,
    meta: dict[str, Any],
    client_config: ClientConfig,
) -> int:
    from qrag_jax.llm.client.client import (
        Client,  # imports openai, which bad flags need not wait for
    )

    batch = BATCH.value or client_config.concurrency
    verdicts: dict[str, bool] | None = None
    unjudged: list[Miss] = []
    with contextlib.closing(Client(client_config, log=tqdm.write)) as client:
        with tqdm(total=len(asked), unit="question") as bar:
            written = len(answer_log.read_partial(out, AnswerRow))
            if written:
                tqdm.write(f"{written} questions are answered in {out} already")
            bar.update(min(written, len(asked)))
            rows, misses = answering.answer(client, generation, asked, out, batch, bar.update)
        by_id = {row.id: row for row in rows}  # the file may hold more, and in another order
        rows = [by_id[question.id] for question in asked if question.id in by_id]
        if WITH_JUDGE.value:
            with tqdm(total=len(rows), unit="verdict") as bar:
                verdicts, unjudged = answering.judge(
                    client, generation, rows, _verdict_file(out), batch, bar.update
                )
        counters = client.counters().as_metrics()
    _report(out, meta, rows, misses, verdicts, unjudged)
    print(
        f"{counters['llm/calls']:.0f} calls, p50 {counters['llm/latency_p50']:.2f} s, "
        f"p99 {counters['llm/latency_p99']:.2f} s, {counters['llm/cache_hits']:.0f} from the cache"
    )
    return 0 if rows else NOTHING_ANSWERED


def _report(
    out: Path,
    meta: dict[str, Any],
    rows: list[AnswerRow],
    misses: list[Miss],
    verdicts: dict[str, bool] | None,
    unjudged: list[Miss],
) -> None:
    """Prints the table, and writes it and the misses beside the answers."""
    scores = answer_table.answer_scores(rows, misses, verdicts)
    print("\n".join(answer_table.table(scores)))
    missed_file, summary_file = (
        out.with_name(f"{out.stem}{ending}") for ending in (".failures.jsonl", ".summary.json")
    )
    answer_log.write_misses(missed_file, [*misses, *unjudged])
    summary: dict[str, Any] = {"made_with": meta, "scores": scores}
    for name, lacking in (("failures", misses), ("unjudged", unjudged)):
        summary[name] = [dataclasses.asdict(miss) for miss in lacking]
    write_whole(summary_file, json.dumps(summary, indent=2) + "\n")
    cut = [row for row in rows if row.cut_characters]
    if cut:
        chunks = sum(row.cut_chunks for row in cut)
        print(f"cut to fit: {len(cut)} prompts, by {chunks} whole chunks and parts of others")
    for what, lacking in (("answer", misses), ("verdict", unjudged)):
        if lacking:
            print(
                f"no {what}: {len(lacking)} ({answer_table.causes_text(lacking)}), not scored; "
                f"see {missed_file}, and call again to ask again"
            )
    print(f"{len(rows)} answers: {out}")


def _questions(log: Path) -> tuple[list[Question], list[Question]]:
    """The questions to ask now, and all of the log."""
    keep = chunk_filter(FILTER.value, {"threshold": THRESHOLD.value, "steps": STEPS.value})
    rows = retrieval_log.read(log)
    golds = _golds(Path(DATA.value), {row.id for row in rows}) if DATA.value else None
    everything = answering.questions(log, rows, keep, PROMPT.value, METRIC.value, golds)
    musique = any(question.rule == "musique" for question in everything)
    if musique and golds is None and not any(row.aliases for row in rows):
        print(f"note: {log} has no aliases, which MuSiQue's metric counts; give --data=FILE")
    return everything[: SAMPLES.value or len(everything)], everything


def _golds(path: Path, ids: set[str]) -> dict[str, Gold]:
    """Answers and types of the questions `ids` from a data set's file."""
    found: dict[str, Gold] = {}
    for where, record in read_records(path):
        record_id = record.get("_id", record.get("id"))
        if record_id in ids:
            try:
                found[record_id] = Gold(fields.answers(record), str(record.get("type") or ""))
            except BadRecord as error:
                raise InputError(f"{where}: {error}; download the file again") from None
    if missing := sorted(ids - set(found)):
        raise InputError(
            f"{path} has no record of {len(missing)} of the log's questions, for example "
            f"{missing[0]}; give the file that the log's questions are from, or no --data"
        )
    return found


def _meta(log: Path, everything: list[Question], generation: Generation) -> dict[str, Any]:
    """What the answers were made with; a file begun with other settings is not gone on with."""
    used = {question.prompt.name: question.prompt for question in everything}
    golds = [[question.id, question.rule, question.type, *question.gold] for question in everything]
    applied = {"name": FILTER.value, "threshold": THRESHOLD.value, "steps": STEPS.value}
    return {
        "model": LLM.value.model,
        "version": LLM.value.version,
        "log": hashlib.sha256(log.read_bytes()).hexdigest()[:16],
        "golds": hashlib.sha256(json.dumps(golds).encode()).hexdigest()[:16],
        "filter": {name: value for name, value in applied.items() if value is not None},
        "tokenizer": LLM.value.tokenizer if generation.count else "",
        **answering.settings(generation, list(used.values())),
    }


if __name__ == "__main__":
    commandline.run(main)
