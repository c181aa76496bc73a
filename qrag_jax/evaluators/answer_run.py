"""Answers the questions of a retrieval log with a language model; scores and writes the answers.

The log of a query writer is read as one, with the passages found in the end.

A file that was begun with the same settings is resumed. Questions without an answer are counted and
asked again by the next call; those of which a server failed are not scored, others score 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
from ml_collections import config_dict
from tqdm import tqdm

from qrag_jax.data import records
from qrag_jax.data.records import read_records
from qrag_jax.data.sample import BadRecord
from qrag_jax.environments.queries import BY_PASSAGE, KEYS, normalised_title
from qrag_jax.environments.tasks import document_text
from qrag_jax.errors import InputError
from qrag_jax.evaluators import answers as answering
from qrag_jax.evaluators.answers import Gold
from qrag_jax.evaluators.run_page import kind_of
from qrag_jax.feedback.questions import AUTO, JUDGE, Question
from qrag_jax.llm.config import ClientConfig
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.generation import FAIL, Generation
from qrag_jax.metrics import row_log
from qrag_jax.metrics.facts import BY_FACTS, chunk_filter, fact_em, fact_f1
from qrag_jax.metrics.row_log import read_record, record_path
from qrag_jax.metrics.rows import ANSWERS, HOPS, MISSES, Miss, Row, Searched, read_retrievals
from qrag_jax.metrics.summaries import answer_scores, answer_table, causes_text
from qrag_jax.retrieval import corpus as stored
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.opening import CORPUS
from qrag_jax.retrieval.protocol import NONE
from qrag_jax.runtime.config_fields import fields_of
from qrag_jax.runtime.whole_files import log_locks, reason, write_whole

NOTHING_ANSWERED = 1  # exit status
PREFIX = "--llm."  # of the flags that give the model's settings


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """What is answered, by which model, and where the answers go; see the flags of the command."""

    log: Path  # the retrieval log, or the log of a query writer
    out: Path  # file of answers to write or to resume
    llm: Mapping[str, Any]  # fields of `ClientConfig` and of `Generation`
    data: Path | None = None  # file that the questions are from, for aliases and types
    corpus: Path | None = None  # folder of what a query writer searched, for its log
    samples: int = 0
    filter: str = "none"
    threshold: float | None = None
    steps: int | None = None
    prompt: str = AUTO
    metric: str = AUTO
    cut_off: str = FAIL
    batch: int = 0
    judge: bool = False
    restart: bool = False


def answer_log_questions(options: AnswerOptions) -> int:
    """Asks the questions, writes the answers and prints their scores.

    Returns:
        the exit status, 1 if no question has an answer.
    """
    out, verdicts = options.out, options.out.with_name(f"{options.out.stem}.judge.jsonl")
    asked, all_questions = _questions(options)
    drawn = dict(options.llm) | {"cut_off": options.cut_off}
    generation = Generation.of(drawn, prefix=PREFIX)
    meta = _meta(options, all_questions, generation)
    try:
        # Answer files whose names differ only in the ending share a file of verdicts: lock both.
        with log_locks(*dict.fromkeys((out, verdicts))):
            row_log.begin(out, meta, restart=options.restart)
            if options.judge:
                of_judge = {"answers": meta, "prompt": prompts.load(JUDGE).fingerprint}
                row_log.begin(verdicts, of_judge, restart=options.restart)
            elif options.restart:
                verdicts.unlink(missing_ok=True)
            return _run(options, asked, generation, meta, verdicts)
    except OSError as error:
        raise InputError(f"{out} cannot be written ({reason(error)}); give another --out") from None


def _run(
    options: AnswerOptions,
    asked: list[Question],
    generation: Generation,
    meta: dict[str, Any],
    verdict_file: Path,
) -> int:
    from qrag_jax.llm.client import Client

    sent = {field.name: options.llm[field.name] for field in fields_of(ClientConfig)}
    config = ClientConfig(**sent, prefix=PREFIX)
    out, batch = options.out, options.batch or config.concurrency
    verdicts: dict[str, bool] | None = None
    unjudged: list[Miss] = []
    with contextlib.closing(Client(config, log=tqdm.write)) as client:
        submit = client.submit
        with tqdm(total=len(asked), unit="question") as bar:
            if written := len(ANSWERS.read_partial(out)):
                tqdm.write(f"{written} questions are answered in {out} already")
            bar.update(min(written, len(asked)))
            rows, misses = answering.answer(submit, generation, asked, out, batch, told=bar.update)
        by_id = {row.id: row for row in rows}  # the file may hold more rows, in another order
        rows = [by_id[question.id] for question in asked if question.id in by_id]
        if options.judge:
            with tqdm(total=len(rows), unit="verdict") as bar:
                verdicts, unjudged = answering.judge(
                    submit, generation, rows, verdict_file, batch, told=bar.update
                )
        counters = client.counters().as_metrics()
    scores = answer_scores(rows, misses, verdicts)
    print("\n".join(answer_table(scores)))
    missed_file = out.with_name(f"{out.stem}.failures.jsonl")
    missed_file.unlink(missing_ok=True)
    if lacking := [*misses, *unjudged]:
        MISSES.rewrite(missed_file, lacking)
    summary: dict[str, Any] = {"provenance": meta, "scores": scores}
    summary["failures"] = [*map(dataclasses.asdict, misses)]
    summary["unjudged"] = [*map(dataclasses.asdict, unjudged)]
    summary_file = out.with_name(f"{out.stem}.summary.json")
    write_whole(summary_file, json.dumps(summary, indent=2) + "\n")
    for what, missed in (("answer", misses), ("verdict", unjudged)):
        if missed:
            print(
                f"no {what}: {len(missed)} ({causes_text(missed)}); see {missed_file}, and call "
                "again to ask again"
            )
    if cut := [row for row in rows if row.cut_characters]:
        chunks = sum(row.cut_chunks for row in cut)
        print(f"cut to fit: {len(cut)} prompts, by {chunks} whole chunks and parts of others")
    print(f"{len(rows)} answers: {out}")
    print(
        f"{counters['llm/calls']:.0f} calls, p50 {counters['llm/latency_p50']:.2f} s, "
        f"p99 {counters['llm/latency_p99']:.2f} s, {counters['llm/cache_hits']:.0f} from the cache"
    )
    return 0 if rows else NOTHING_ANSWERED


def _questions(options: AnswerOptions) -> tuple[list[Question], list[Question]]:
    """The questions to ask now, and all questions of the log."""
    log = options.log
    keep = chunk_filter(options.filter, {"threshold": options.threshold, "steps": options.steps})
    rows = _rows(options)
    golds = _golds(options.data, {row.id for row in rows}) if options.data else None
    everything = answering.questions(
        log, rows, keep, prompt=options.prompt, metric=options.metric, golds=golds
    )
    musique = any(question.rule == "musique" for question in everything)
    if musique and golds is None and not any(row.aliases for row in rows):
        print(f"note: {log} has no aliases, which MuSiQue's metric counts; give --data=FILE")
    return everything[: options.samples or len(everything)], everything


def _rows(options: AnswerOptions) -> list[Row]:
    """The rows of the log."""
    log, corpus = options.log, options.corpus
    of_queries = kind_of(log) == HOPS.name
    if of_queries and corpus is None:
        raise InputError(
            f"{log} is the log of a query writer, which has the ids of passages alone; give the "
            "folder of what was searched, --corpus=RUN/search or the index."
        )
    if not of_queries and corpus is not None:
        raise InputError(f"--corpus is for logs of query writers, and {log} is none; leave it out.")
    if corpus is not None:
        return pool_rows(log, corpus_of(corpus))
    return read_retrievals(log, needs_facts=options.filter in BY_FACTS)


def _golds(path: Path, ids: set[str]) -> dict[str, Gold]:
    """Answers and types of the questions `ids` from a data set's file."""
    found: dict[str, Gold] = {}
    for where, record in read_records(path):
        record_id = record.get("_id", record.get("id"))
        if record_id in ids:
            try:
                found[record_id] = Gold(records.answers(record), str(record.get("type") or ""))
            except BadRecord as error:
                raise InputError(f"{where}: {error}; download the file again") from None
    if missing := sorted(ids - set(found)):
        raise InputError(
            f"{path} has no record of {len(missing)} of the log's questions, for example "
            f"{missing[0]}; give the file that the log's questions are from, or no --data"
        )
    return found


def _meta(
    options: AnswerOptions, everything: list[Question], generation: Generation
) -> dict[str, Any]:
    """What the answers depend on; a file that was begun with other settings is not resumed."""
    used = {question.prompt.name: question.prompt for question in everything}
    golds = [[question.id, question.rule, question.type, *question.gold] for question in everything]
    applied = {"name": options.filter, "threshold": options.threshold, "steps": options.steps}
    return {
        "model": options.llm["model"],
        "version": options.llm["version"],
        "log": hashlib.sha256(options.log.read_bytes()).hexdigest()[:16],
        "golds": hashlib.sha256(json.dumps(golds).encode()).hexdigest()[:16],
        "filter": {name: value for name, value in applied.items() if value is not None},
        "tokenizer": options.llm["tokenizer"] if generation.count else "",
        **({"corpus": corpus_of(options.corpus).digest} if options.corpus else {}),
        **answering.settings(generation, list(used.values())),
    }


def answer_settings() -> ml_collections.ConfigDict:
    """The fields of `--llm.FIELD=VALUE`: those of `ClientConfig`, and how texts are drawn."""
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
    for field in fields_of(ClientConfig):
        given = field.default is not dataclasses.MISSING
        default = field.default if given else ""
        config[field.name] = config_dict.placeholder(float) if default is None else default
    return config


# ---------------------------------------------------------------- logs of query writers


def corpus_of(folder: Path) -> StoredCorpus:
    """The corpus of an index, of what a run has pooled, or the folder's own."""
    own = (folder / stored.NAME).exists()
    return StoredCorpus(folder if own else folder / CORPUS)


def pool_rows(log: Path, corpus: StoredCorpus) -> list[Row]:
    """The rows of a query writer's log as those of a retrieval log, with the pool of the last hop.

    A passage's number is its index, and its text is what the query writer has read of it. There are
    no Q-values and no return. Gold are pages, as in LeReT: a page counts once, by its passage that
    was found first, so that `em` is the log's `all_gold`.
    """
    rows, search = HOPS.read(log), read_record(log).get("search", {})
    by = search.get("gold_by")
    if by not in KEYS:
        raise InputError(
            f"{record_path(log)}, which says what gold pages are known by, is missing or has no "
            "search.gold_by; bring it back."
        )
    gold = _gold_of(rows, corpus, by)
    names = sorted({name for row in rows for name in (*row.hops[-1].pool, *gold[row.id])})
    numbers = corpus.numbers(names)
    _refuse_lacking(corpus, "passages", [n for n, at in zip(names, numbers) if at == NONE])
    place, clean = dict(zip(names, map(int, numbers))), bool(search.get("clean"))
    texts = {
        name: document_text(passage.title, passage.text, clean)
        for name, passage in zip(names, corpus.passages(numbers), strict=True)
    }

    def pooled(row: Searched) -> Row:
        pool, own = row.hops[-1].pool, gold[row.id]
        facts, taken = ([place[name] for name in each] for each in (own, pool))
        answer, *aliases = row.answers or ("",)
        return Row(
            id=row.id,
            question=row.question,
            answer=answer,
            sf_idx=facts,
            pred_idx=taken,
            q_values=[],
            sf_texts=[texts[name] for name in own],
            pred_texts=[texts[name] for name in pool],
            text_len=sum(len(texts[name]) for name in pool),
            f1=fact_f1(facts, taken),
            em=fact_em(facts, taken),
            aliases=aliases,
            source=row.source,
        )

    return [*map(pooled, rows)]


def _gold_of(rows: Sequence[Searched], corpus: StoredCorpus, by: str) -> dict[str, tuple[str, ...]]:
    """A passage of each gold page of each question: that found first, or the corpus' first."""
    if by == BY_PASSAGE:
        return {row.id: row.pages for row in rows}
    names: dict[str, list[str]] = {page: [] for row in rows for page in row.pages}
    for passage in corpus:
        if (own := names.get(normalised_title(passage.title))) is not None:
            own.append(passage.name)
    _refuse_lacking(corpus, "gold pages", [page for page, own in names.items() if not own])

    def first_of(page: str, pool: Sequence[str]) -> str:
        own = set(names[page])
        return next((name for name in pool if name in own), names[page][0])

    return {row.id: tuple(first_of(page, row.hops[-1].pool) for page in row.pages) for row in rows}


def _refuse_lacking(corpus: StoredCorpus, what: str, lacking: Sequence[str]) -> None:
    if lacking:
        raise InputError(
            f"the corpus in {corpus.folder} lacks {len(lacking)} {what} of the log, for example "
            f"{lacking[0]!r}; give the one that was searched."
        )
