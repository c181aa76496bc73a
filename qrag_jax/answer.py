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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_dict, config_flags
from tqdm import tqdm

from qrag_jax.data import records
from qrag_jax.data.sample import BadRecord, Sample
from qrag_jax.errors import InputError
from qrag_jax.evaluators.evaluation import kind_of
from qrag_jax.feedback import llm as asking
from qrag_jax.feedback.llm import AUTO, JUDGE, Question
from qrag_jax.llm.config import FAIL, SCORE, ClientConfig, Drawing
from qrag_jax.llm.outcomes import Answer, ChatRequest, Failure, Outcome
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.generation import Generation
from qrag_jax.metrics import row_log
from qrag_jax.metrics import rows as logs
from qrag_jax.metrics.answers import RULES, whole_answers
from qrag_jax.metrics.bootstrap import causes_text
from qrag_jax.metrics.facts import BY_FACTS, FILTERS, Filter, chunk_filter, fact_em, fact_f1
from qrag_jax.metrics.summaries import answer_scores, answer_table
from qrag_jax.runtime import commandline
from qrag_jax.runtime.config_fields import fields_of, section
from qrag_jax.runtime.whole_files import log_locks, write_json, writing

PREFIX = "--llm."  # of the flags that give the model's settings

# Asks a language model: one outcome per request, in their order; a failure raises no error.
Submit = Callable[[Sequence[ChatRequest]], "Future[list[Outcome]]"]
Gold = tuple[tuple[str, ...], str]  # right answers, and the question's type or ""


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
    with writing(out, "--out"), log_locks(*dict.fromkeys((out, verdicts))):
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
    sent = {field.name: options.llm[field.name] for field in fields_of(ClientConfig)}
    config = ClientConfig(**sent, prefix=PREFIX)
    verdicts, unjudged = None, list[logs.Miss]()
    if written := len(logs.ANSWERS.read_partial(out)):
        print(f"{written} questions are answered in {out} already")
    with Client(config, log=tqdm.write) as client:
        rows, misses = answer(client.submit, generation, asked, out, config.concurrency)
        by_id = {row.id: row for row in rows}  # the file may hold more rows, in another order
        rows = [by_id[question.id] for question in asked if question.id in by_id]
        if options.judge:
            how = client.submit, generation, rows, verdict_file, config.concurrency
            verdicts, unjudged = judge(*how)
        counters = client.counters().as_metrics()
    scores = answer_scores(rows, misses, verdicts)
    print("\n".join(answer_table(scores)))
    missed_file = out.with_name(f"{out.stem}.failures.jsonl")
    missed_file.unlink(missing_ok=True)
    if lacking := [*misses, *unjudged]:
        logs.MISSES.rewrite(missed_file, lacking)
    summary = {"provenance": meta, "scores": scores}
    write_json(out.with_name(f"{out.stem}.summary.json"), summary)
    for what, missed in (("answer", misses), ("verdict", unjudged)):
        if missed:
            print(
                f"no {what}: {len(missed)} ({causes_text(missed)}); see {missed_file}, and call "
                "again to ask again"
            )
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
    config = section(Drawing)
    del config.cut_off  # a flag of its own
    for field in fields_of(ClientConfig):
        default = "" if field.default is dataclasses.MISSING else field.default
        config[field.name] = config_dict.placeholder(float) if default is None else default
    return config


# ---------------------------------------------------------------- the questions of a log


def _questions(log: Path) -> list[Question]:
    options = flags.FLAGS
    keep = chunk_filter(options.filter, {"threshold": options.threshold, "steps": options.steps})
    if kind_of(log) == logs.HOPS.name:
        rows = pool_rows(log)
    else:
        rows = logs.read_retrievals(log, needs_facts=options.filter in BY_FACTS)
    golds = _golds(Path(options.data), {row.id for row in rows}) if options.data else None
    return questions(log, rows, keep, prompt=options.prompt, metric=options.metric, golds=golds)


def questions(
    log: Path,
    rows: Sequence[logs.Row],
    keep: Filter,
    *,
    prompt: str = AUTO,
    metric: str = AUTO,
    golds: Mapping[str, Gold] | None = None,
) -> list[Question]:
    """The questions of a log, with the chunks that a filter keeps, and `golds` or the log's own."""
    how = asking.Asking(prompt, metric)
    asked: dict[str, Question] = {}
    for row in rows:
        if row.id in asked:
            raise InputError(f"{log} holds sample {row.id} twice; give a log of one evaluation")
        right, type_ = (golds or {}).get(row.id, ((row.answer, *row.aliases), ""))
        kept, facts = keep(row), tuple({*row.sf_idx})
        sample = Sample(row.id, row.question, (), facts, tuple(right), row.source)
        chunks = [*zip(kept.pred_idx, kept.pred_texts, strict=True)]
        asked[row.id] = how.question(str(log), sample, chunks, type_)
    return list(asked.values())


def _golds(path: Path, ids: set[str]) -> dict[str, Gold]:
    """Answers and types of the questions `ids` from a data set's file."""
    found: dict[str, Gold] = {}
    for where, record in records.read_records(path):
        record_id = record.get("_id", record.get("id"))
        if record_id in ids:
            try:
                found[record_id] = records.answers(record), str(record.get("type") or "")
            except BadRecord as error:
                raise InputError(f"{where}: {error}; download the file again") from None
    if missing := sorted(ids - set(found)):
        raise InputError(
            f"{path} has no record of {len(missing)} of the log's questions, for example "
            f"{missing[0]}; give the file that the log's questions are from, or no --data"
        )
    return found


def answer(
    submit: Submit, generation: Generation, asked: Sequence[Question], out: Path, batch: int
) -> tuple[list[logs.AnswerRow], list[logs.Miss]]:
    """All answers, those of the file `out` first, the others asked for; and the misses."""
    rows = logs.ANSWERS.read_partial(out)
    known = {row.id for row in rows}
    todo = [question for question in asked if question.id not in known]
    fitted = {question.id: asking.fitted(question, generation) for question in todo}

    def request(question: Question) -> ChatRequest | Failure:
        if isinstance(fit := fitted[question.id], Failure):
            return fit
        return generation.request(fit.messages, generation.reads_answer)

    def read(question: Question, outcome: Outcome) -> logs.AnswerRow | Failure:
        answered, fit = asking.read_answer(question, outcome, generation), fitted[question.id]
        if isinstance(answered, Failure):
            return answered
        assert isinstance(outcome, Answer)
        assert isinstance(fit, prompts.Fitted)
        prediction, scores = answered
        return logs.AnswerRow(
            id=question.id,
            question=question.question,
            answers=list(question.gold),
            prediction=prediction,
            text=outcome.text,
            em=scores.em,
            f1=scores.f1,
            rule=question.rule,
            chunks=[index for index, _ in question.chunks],
            cut_chunks=fit.cut_chunks,
            cut_characters=fit.cut_characters,
            version=outcome.version,
            finish_reason=outcome.finish_reason,
            hops=question.hops,
            type=question.type,
        )

    new, misses = _ask(submit, todo, request, read, logs.ANSWERS, out=out, batch=batch)
    return rows + new, misses


def judge(
    submit: Submit, generation: Generation, rows: Sequence[logs.AnswerRow], out: Path, batch: int
) -> tuple[dict[str, bool], list[logs.Miss]]:
    """Whether predictions are right, by id, asked for if `out` does not say so; and the misses."""
    prompt = prompts.load(JUDGE)
    said = {(row.id, row.prediction): row.right for row in logs.VERDICTS.read_partial(out)}
    verdicts = {row.id: said[key] for row in rows if (key := (row.id, row.prediction)) in said}

    def request(row: logs.AnswerRow) -> ChatRequest:
        golds = whole_answers(row.rule, row.answers)
        return asking.judge_request(prompt, row.question, golds, row.prediction, generation)

    def read(row: logs.AnswerRow, outcome: Outcome) -> logs.VerdictRow | Failure:
        if isinstance(outcome, Failure):
            return outcome
        if isinstance(right := generation.verdict(outcome), Failure):
            return right
        return logs.VerdictRow(row.id, row.prediction, right, outcome.text, outcome.version)

    todo = [row for row in rows if row.id not in verdicts]
    new, misses = _ask(submit, todo, request, read, logs.VERDICTS, out=out, batch=batch)
    return verdicts | {each.id: each.right for each in new}, misses


def _ask(
    submit: Submit,
    items: Sequence[Any],
    request: Callable[[Any], ChatRequest | Failure],
    read: Callable[[Any, Outcome], Any],
    log: row_log.RowLog,
    *,
    out: Path,
    batch: int,
) -> tuple[list[Any], list[logs.Miss]]:
    """The rows of the items, each batch of which is written as it comes; and what has none.

    A request that is a `Failure` is not sent. The client limits how many are in flight.
    """
    rows, misses, batches = list[Any](), list[logs.Miss](), []
    try:
        for start in range(0, len(items), batch):
            part = [(item, request(item)) for item in items[start : start + batch]]
            sent = [asked for _, asked in part if not isinstance(asked, Failure)]
            batches.append((part, submit(sent)))
        with tqdm(total=len(items), unit=" questions") as bar:
            for part, future in batches:
                replies, new = iter(future.result()), list[Any]()
                for item, asked in part:
                    row = read(item, asked if isinstance(asked, Failure) else next(replies))
                    if isinstance(row, Failure):
                        why = row.cause, row.message, row.attempts
                        misses.append(logs.Miss(item.id, *why, item.hops, item.type))
                    else:
                        new.append(row)
                log.append(out, new)
                rows += new
                bar.update(len(part))
    finally:
        for _, future in batches:
            future.cancel()
    return rows, misses


# ---------------------------------------------------------------- logs of query writers


def pool_rows(log: Path) -> list[logs.Row]:
    """The rows of a query writer's log as those of a retrieval log, with the pool of the last hop.

    A passage's number is its place among the texts of the row. There are no Q-values and no return.
    Gold are pages, as in LeReT: a page counts once, by its passage that was found first, so that
    `em` is the log's `all_gold`.
    """
    pooled = []
    for row in logs.HOPS.each(log):
        pool, place = row.hops[-1].pool, {name: n for n, name in enumerate(row.texts)}
        facts, taken = ([place[name] for name in each] for each in (row.gold, pool))
        answer, *aliases = row.answers or ("",)
        pooled.append(
            logs.Row(
                id=row.id,
                question=row.question,
                answer=answer,
                sf_idx=facts,
                pred_idx=taken,
                q_values=[],
                sf_texts=[row.texts[name] for name in row.gold],
                pred_texts=[row.texts[name] for name in pool],
                text_len=sum(len(row.texts[name]) for name in pool),
                f1=fact_f1(facts, taken),
                em=fact_em(facts, taken),
                aliases=aliases,
                source=row.source,
            )
        )
    return pooled


if __name__ == "__main__":
    commandline.run(main, define=define_flags)
