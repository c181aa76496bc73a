"""Asks a language model for answers from retrieved chunks, and scores the answers.

This module knows no server: a `Submit` sends the requests. A question without an answer (the call
failed, the prompt is too long, the text cannot be read) is a `Miss`: it is asked again, and scores
0 unless a server failed.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from qrag_jax.errors import InputError
from qrag_jax.feedback.questions import (
    AUTO,
    JUDGE,
    Asking,
    Question,
    fitted,
    judge_request,
    read_answer,
)
from qrag_jax.llm.outcomes import Answer, ChatRequest, Failure, Outcome
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.extraction import NoAnswer
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import Cut, Prompt
from qrag_jax.metrics.answers import whole_answers
from qrag_jax.metrics.facts import Filter
from qrag_jax.metrics.row_log import RowLog
from qrag_jax.metrics.rows import ANSWERS, VERDICTS, AnswerRow, Miss, Row, VerdictRow

_AHEAD = 2  # batches in flight besides the oldest one, so that a slow answer does not stop the rest


# Asks a language model: one outcome per request, in their order; a failure raises no error.
Submit = Callable[[Sequence[ChatRequest]], "Future[list[Outcome]]"]
Why = Failure | NoAnswer  # there is no row


@dataclasses.dataclass(frozen=True)
class Gold:
    """What a data set's record adds to the log's question: its answers and its type."""

    answers: tuple[str, ...]
    type: str = ""


def questions(
    log: Path,
    rows: Sequence[Row],
    keep: Filter,
    *,
    prompt: str = AUTO,
    metric: str = AUTO,
    golds: Mapping[str, Gold] | None = None,
) -> list[Question]:
    """The questions of a retrieval log, with the chunks that a filter keeps.

    Args:
        log: the log's path, for error messages.
        rows: the log's rows.
        keep: the filter of chunks.
        prompt: name of a prompt, or a file; "auto": the task's prompt for BABILong documents, else
            "open_qa".
        metric: a rule of `metrics.answers`; "auto": that of the data set, which the rows name.
        golds: answers and types by id; other questions have the log's answers.
    """
    asking = Asking(prompt, metric)
    asked: dict[str, Question] = {}
    for row in rows:
        if row.id in asked:
            raise InputError(f"{log} holds sample {row.id} twice; give a log of one evaluation")
        gold = (golds or {}).get(row.id, Gold((row.answer, *row.aliases)))
        kept = keep(row)
        asked[row.id] = asking.question(
            str(log),
            row.id,
            row.question,
            list(zip(kept.pred_idx, kept.pred_texts, strict=True)),
            gold.answers,
            hops=len(set(row.sf_idx)),
            type_=gold.type,
            source=row.source,
        )
    return list(asked.values())


def answer(
    submit: Submit,
    generation: Generation,
    asked: Sequence[Question],
    out: Path,
    batch: int,
    *,
    told: Callable[[int], object] = lambda number: None,
) -> tuple[list[AnswerRow], list[Miss]]:
    """Asks the questions that the file `out` has no answer to, and appends the answers by batch.

    Args:
        batch: number of questions asked together; at most three batches are in flight.
        told: called after each batch with its number of questions.

    Returns:
        the answers, those of the file first, and the questions without an answer.
    """
    rows = ANSWERS.read_partial(out)
    known = {row.id for row in rows}
    todo = [question for question in asked if question.id not in known]

    def request(question: Question) -> tuple[ChatRequest | Failure, Cut]:
        made = fitted(question, generation)
        if isinstance(made, Failure):
            return made, Cut()
        return generation.request(made.messages, generation.reads_answer), made.cut

    def row(question: Question, cut: Cut, outcome: Outcome) -> AnswerRow | Why:
        return _answer_row(question, cut, outcome, generation)

    how: Any = {"log": ANSWERS, "out": out, "batch": batch, "told": told}
    new, misses = _asked(submit, todo, request, row, **how)
    return rows + new, misses


def judge(
    submit: Submit,
    generation: Generation,
    rows: Sequence[AnswerRow],
    out: Path,
    batch: int,
    *,
    told: Callable[[int], object] = lambda number: None,
) -> tuple[dict[str, bool], list[Miss]]:
    """Asks whether each prediction is right, unless the file `out` has a verdict on it already.

    Returns:
        the verdicts by id, and the predictions without a verdict.
    """
    prompt = prompts.load(JUDGE)
    said = {(row.id, row.prediction): row.right for row in VERDICTS.read_partial(out)}
    verdicts = {row.id: said[key] for row in rows if (key := (row.id, row.prediction)) in said}
    todo = [row for row in rows if row.id not in verdicts]

    def request(row: AnswerRow) -> tuple[ChatRequest | Failure, Cut]:
        golds = whole_answers(row.rule, row.answers)
        return judge_request(prompt, row.question, golds, row.prediction, generation), Cut()

    def verdict(row: AnswerRow, cut: Cut, outcome: Outcome) -> VerdictRow | Why:
        if isinstance(outcome, Failure):
            return outcome
        right = generation.verdict(outcome)
        if isinstance(right, NoAnswer):
            return right
        return VerdictRow(row.id, row.prediction, right, outcome.text, outcome.version)

    how: Any = {"log": VERDICTS, "out": out, "batch": batch, "told": told}
    new, misses = _asked(submit, todo, request, verdict, **how)
    return verdicts | {each.id: each.right for each in new}, misses


def settings(generation: Generation, used: Sequence[Prompt]) -> dict[str, Any]:
    """The settings that a file of answers depends on besides model and log, for its record."""
    made = {prompt.name: prompt.fingerprint for prompt in used}
    drawn = {
        field.name: getattr(generation, field.name)
        for field in dataclasses.fields(generation)
        if field.name != "count"
    }
    return {"prompts": made} | drawn


Item = TypeVar("Item", Question, AnswerRow)


def _asked(
    submit: Submit,
    items: Sequence[Item],
    request: Callable[[Item], tuple[ChatRequest | Failure, Cut]],
    row: Callable[[Item, Cut, Outcome], Any],
    *,
    log: RowLog,
    out: Path,
    batch: int,
    told: Callable[[int], object],
) -> tuple[list[Any], list[Miss]]:
    """The rows of the items, each batch of which is written as it comes; and what has none.

    A request that is a `Failure` is not sent.
    """
    rows, misses = list[Any](), list[Miss]()
    waiting: deque[tuple[list[Any], Future[list[Outcome]]]] = deque()

    def settle() -> None:
        asked, future = waiting.popleft()
        came, new = iter(future.result()), []
        for item, (wanted, cut) in asked:
            made = row(item, cut, wanted if isinstance(wanted, Failure) else next(came))
            if isinstance(made, Why):
                misses.append(_miss(item, made))
            else:
                new.append(made)
        log.append(out, new)
        rows.extend(new)
        told(len(asked))

    try:
        for start in range(0, len(items), batch):
            asked = [(item, request(item)) for item in items[start : start + batch]]
            sent = [wanted for _, (wanted, _) in asked if not isinstance(wanted, Failure)]
            waiting.append((asked, submit(sent)))
            if len(waiting) > _AHEAD:
                settle()
        while waiting:
            settle()
    finally:
        for _, future in waiting:
            future.cancel()
    return rows, misses


def _miss(item: Question | AnswerRow, why: Why) -> Miss:
    attempts = why.attempts if isinstance(why, Failure) else 1
    return Miss(item.id, why.cause, why.message, attempts, hops=item.hops, type=item.type)


def _answer_row(
    question: Question, cut: Cut, outcome: Outcome, generation: Generation
) -> AnswerRow | Why:
    read = read_answer(question, outcome, generation)
    if isinstance(read, Why):
        return read
    assert isinstance(outcome, Answer)
    found, scores = read
    return AnswerRow(
        id=question.id,
        question=question.question,
        answers=list(question.gold),
        prediction=found,
        text=outcome.text,
        em=scores.em,
        f1=scores.f1,
        rule=question.rule,
        chunks=[index for index, _ in question.chunks],
        cut_chunks=cut.chunks,
        cut_characters=cut.characters,
        version=outcome.version,
        finish_reason=outcome.finish_reason,
        hops=question.hops,
        type=question.type,
    )
