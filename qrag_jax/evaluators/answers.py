"""Asks a language model the questions of a log, with the chunks that were taken; and a judge.

Answers, verdicts and misses are logs, each batch of which is written as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qrag_jax.data import records
from qrag_jax.data.sample import BadRecord, Sample
from qrag_jax.errors import InputError
from qrag_jax.feedback import llm as asking
from qrag_jax.feedback.llm import AUTO, JUDGE, Question
from qrag_jax.llm.outcomes import Answer, ChatRequest, Failure, Outcome
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.generation import Generation
from qrag_jax.metrics import row_log
from qrag_jax.metrics import row_log as logs
from qrag_jax.metrics.answers import whole_answers
from qrag_jax.metrics.facts import Filter, scored

# Asks a language model: one outcome per request, in their order; a failure raises no error.
Submit = Callable[[Sequence[ChatRequest]], "Future[list[Outcome]]"]
Gold = tuple[tuple[str, ...], str]  # right answers, and the question's type or ""


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


def golds_of(path: Path, ids: set[str]) -> dict[str, Gold]:
    """Answers and types of the questions `ids` from a data set's file."""
    golds: dict[str, Gold] = {}
    for where, record in records.read_records(path):
        record_id = record.get("_id", record.get("id"))
        if record_id in ids:
            try:
                golds[record_id] = records.answers(record), str(record.get("type") or "")
            except BadRecord as error:
                raise InputError(f"{where}: {error}; download the file again") from None
    if missing := sorted(ids - set(golds)):
        raise InputError(
            f"{path} lacks {len(missing)} of the log's questions, as {missing[0]}; give their file"
        )
    return golds


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
    return verdicts | {row.id: row.right for row in new}, misses


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
        facts, taken = ([place[name] for name in names] for names in (row.gold, pool))
        answer, *aliases = row.answers or ("",)
        gold, read = ([row.texts[name] for name in names] for names in (row.gold, pool))
        about: Any = {"text_len": sum(map(len, read)), "aliases": aliases, "source": row.source}
        played = logs.Row(row.id, row.question, answer, facts, taken, [], gold, read, **about)
        pooled.append(scored(played))
    return pooled
