"""From retrieved chunks to scored answers: what is asked of a language model, and what came back.

Nothing here knows a server: whoever asks is an `Asks`. A question without an answer (the call
failed, the prompt is too long, the text cannot be read) is a `Miss`, never an answer that is wrong.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar

from qrag_jax.errors import InputError
from qrag_jax.llm import extraction, prompts
from qrag_jax.llm.extraction import NoAnswer
from qrag_jax.llm.outcomes import Answer, ChatRequest, Failure, Outcome
from qrag_jax.llm.prompts import Cut, Messages, Prompt
from qrag_jax.metrics import answer_log, answers
from qrag_jax.metrics.answer_log import AnswerRow, Miss, VerdictRow
from qrag_jax.metrics.chunk_filters import Filter
from qrag_jax.metrics.retrieval_log import Row

AUTO = "auto"
JUDGE = "judge"
_AHEAD = 2  # batches asked while one is waited for, so that a slow answer does not stop the rest


class Asks(Protocol):
    """Asks a language model: one outcome a request, in their order; never raises for a failure."""

    def submit(self, requests: Sequence[ChatRequest]) -> Future[list[Outcome]]:
        """Begins to ask."""
        ...


@dataclasses.dataclass(frozen=True)
class Generation:
    """How texts are drawn and read.

    Attributes:
        temperature, max_tokens, top_p, seed: as in `ChatRequest`.
        enable_thinking: switches a thinking model's thinking; None leaves it to the model.
        max_prompt_tokens: longest prompt, 0 for no limit. count: tokens of messages.
        score_cut_off: read an answer that max_tokens cut off as if it were whole.
    """

    temperature: float = 0.0
    max_tokens: int = 256
    top_p: float | None = None
    seed: int | None = None
    enable_thinking: bool | None = None
    max_prompt_tokens: int = 0
    count: Callable[[Messages], int] | None = None
    score_cut_off: bool = False

    def request(self, messages: Messages) -> ChatRequest:
        """The request for one answer."""
        return ChatRequest(
            messages,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            top_p=self.top_p,
            seed=self.seed,
            extra=extraction.thinking(self.enable_thinking),
        )

    def read(self, answer: Answer) -> tuple[str, str, bool]:
        """What `extraction` reads: text, finish reason, whether the prompt opened the thinking."""
        reason = "stop" if self.score_cut_off else answer.finish_reason
        return answer.text, reason, self.enable_thinking is True


@dataclasses.dataclass(frozen=True)
class Question:
    """One question with the chunks that the model is shown.

    Attributes:
        chunks: (index in the document, text), the oldest first: in the order taken, or in that of
            the document for prompts that tell a story.
        gold: the right answers. rule, prompt: how it is scored and asked.
        hops, type: as in `AnswerRow`.
    """

    id: str
    question: str
    chunks: tuple[tuple[int, str], ...]
    gold: tuple[str, ...]
    rule: str
    prompt: Prompt
    hops: int
    type: str


@dataclasses.dataclass(frozen=True)
class Gold:
    """What a data set's record says of a question beyond the log: its answers and its type."""

    answers: tuple[str, ...]
    type: str = ""


def questions(
    log: Path,
    rows: Sequence[Row],
    keep: Filter,
    prompt: str = AUTO,
    metric: str = AUTO,
    golds: Mapping[str, Gold] | None = None,
) -> list[Question]:
    """The questions of a retrieval log, with the chunks that a filter keeps.

    Args:
        log: where the rows come from, for errors.
        prompt: name of a prompt or a file; "auto": of BABILong documents that of their task, else
            "open_qa". metric: a rule of `answers`; "auto": that of the data set, told by the id.
        golds: by id; what is not in it has the log's own answers.

    Raises:
        InputError: an id is there twice, a question has no right answer, or the prompt or the rule
            cannot be used.
    """
    loaded: dict[str, Prompt] = {}
    asked: dict[str, Question] = {}
    for row in rows:
        if row.id in asked:
            raise InputError(f"{log} holds sample {row.id} twice; give a log of one evaluation")
        gold = (golds or {}).get(row.id, Gold((row.answer, *row.aliases)))
        right = tuple(dict.fromkeys(text.strip() for text in gold.answers if text.strip()))
        if not right:
            raise InputError(
                f"{log}: sample {row.id} has no right answer to score against (field 'answer' is "
                "empty); give the log of a data set with answers, or its file as --data"
            )
        rule = answers.rule_of(row.id) if metric == AUTO else metric
        answers.score(rule, row.id, row.question, "", right)  # that it can be scored
        task = answers.babilong_task(row.id)
        name = prompt if prompt != AUTO else f"babilong_{task}" if task else "open_qa"
        if name not in loaded:
            loaded[name] = prompts.load(name)
            loaded[name].with_chunks("", [])  # that it can be filled
        kept = keep(row)
        chunks = list(zip(kept.pred_idx, kept.pred_texts, strict=True))
        if loaded[name].chunk_slot == "facts":
            chunks.sort()
        asked[row.id] = Question(
            id=row.id,
            question=row.question,
            chunks=tuple(chunks),
            gold=right,
            rule=rule,
            prompt=loaded[name],
            hops=answers.musique_hops(row.id) or len(set(row.sf_idx)),
            type=gold.type or answers.musique_type(row.id) or task,
        )
    return list(asked.values())


def answer(
    asks: Asks,
    generation: Generation,
    asked: Sequence[Question],
    out: Path,
    batch: int,
    told: Callable[[int], object] = lambda number: None,
) -> tuple[list[AnswerRow], list[Miss]]:
    """Asks what the file `out` has no answer to yet, and adds the answers to it, batch by batch.

    Args:
        batch: questions asked together; at most three batches are under way.
        told: called with the number of questions that a batch settled.

    Returns:
        the answers, those of the file first, and the questions without one.

    Raises:
        InputError: the file is broken.
        OSError: it cannot be written.
    """
    rows = answer_log.read_partial(out, AnswerRow)
    known = {row.id for row in rows}
    todo = [question for question in asked if question.id not in known]
    misses: list[Miss] = []

    def request(question: Question) -> tuple[ChatRequest | Failure, Cut]:
        fitted = _fitted(question, generation)
        if isinstance(fitted, Failure):
            return fitted, Cut()
        return generation.request(fitted.messages), fitted.cut

    for settled in _outcomes(asks, todo, request, batch):
        new = []
        for question, cut, outcome in settled:
            row = _answer_row(question, cut, outcome, generation)
            if isinstance(row, AnswerRow):
                new.append(row)
            else:
                misses.append(_miss(question, row))
        answer_log.append(out, new)
        rows += new
        told(len(settled))
    return rows, misses


def judge(
    asks: Asks,
    generation: Generation,
    rows: Sequence[AnswerRow],
    out: Path,
    batch: int,
    told: Callable[[int], object] = lambda number: None,
) -> tuple[dict[str, bool], list[Miss]]:
    """Asks whether each prediction is right, unless the file `out` has a verdict on it already.

    Returns:
        the verdicts by id, and the predictions without one.

    Raises:
        InputError, OSError: as for `answer`.
    """
    prompt = prompts.load(JUDGE)
    said = {(row.id, row.prediction): row.right for row in answer_log.read_partial(out, VerdictRow)}
    verdicts = {row.id: said[key] for row in rows if (key := (row.id, row.prediction)) in said}
    misses: list[Miss] = []

    def request(row: AnswerRow) -> tuple[ChatRequest | Failure, Cut]:
        texts = {"question": row.question, "golds": "; ".join(row.answers)}
        return generation.request(prompt.fill(texts | {"prediction": row.prediction})), Cut()

    todo = [row for row in rows if row.id not in verdicts]
    for settled in _outcomes(asks, todo, request, batch):
        new = []
        for row, _, outcome in settled:
            if isinstance(outcome, Failure):
                misses.append(_miss(row, outcome))
                continue
            found = extraction.verdict(*generation.read(outcome))
            if isinstance(found, NoAnswer):
                misses.append(_miss(row, found))
                continue
            new.append(VerdictRow(row.id, row.prediction, found, outcome.text, outcome.version))
            verdicts[row.id] = found
        answer_log.append(out, new)
        told(len(settled))
    return verdicts, misses


def settings(generation: Generation, used: Sequence[Prompt]) -> dict[str, Any]:
    """What a file of answers depends on besides model and log, for its record."""
    made = {prompt.name: prompt.fingerprint for prompt in used}
    drawn = {
        field.name: getattr(generation, field.name)
        for field in dataclasses.fields(generation)
        if field.name != "count"
    }
    return {"prompts": made} | drawn


Item = TypeVar("Item", Question, AnswerRow)
_Made = list[tuple[Any, ChatRequest | Failure, Cut]]  # item, its request or why there is none, …


def _outcomes(
    asks: Asks,
    items: Sequence[Item],
    request: Callable[[Item], tuple[ChatRequest | Failure, Cut]],
    batch: int,
) -> Iterator[list[tuple[Item, Cut, Outcome]]]:
    """What became of each item, batch by batch, in their order; a `Failure` is not asked."""
    waiting: deque[tuple[_Made, Future[list[Outcome]]]] = deque()

    def settle() -> list[tuple[Item, Cut, Outcome]]:
        asked, future = waiting.popleft()
        came = iter(future.result())
        return [
            (item, cut, each if isinstance(each, Failure) else next(came))
            for item, each, cut in asked
        ]

    try:
        for start in range(0, len(items), batch):
            made: _Made = []
            for item in items[start : start + batch]:
                wanted, cut = request(item)
                made.append((item, wanted, cut))
            sent = [each for _, each, _ in made if not isinstance(each, Failure)]
            waiting.append((made, asks.submit(sent)))
            if len(waiting) > _AHEAD:
                yield settle()
        while waiting:
            yield settle()
    finally:
        for _, future in waiting:
            future.cancel()


def _fitted(question: Question, generation: Generation) -> prompts.Fitted | Failure:
    texts = [text for _, text in question.chunks]
    budget = generation.max_prompt_tokens if generation.count else 0
    count = generation.count or (lambda messages: 0)
    return prompts.fit(question.prompt, question.question, texts, budget, count)


def _miss(item: Question | AnswerRow, why: Failure | NoAnswer) -> Miss:
    attempts = why.attempts if isinstance(why, Failure) else 1
    return Miss(item.id, why.cause, why.message, attempts, item.hops, item.type)


def _answer_row(
    question: Question, cut: Cut, outcome: Outcome, generation: Generation
) -> AnswerRow | Failure | NoAnswer:
    if isinstance(outcome, Failure):
        return outcome
    found = extraction.final_answer(*generation.read(outcome))
    if isinstance(found, NoAnswer):
        return found
    scores = answers.score(question.rule, question.id, question.question, found, question.gold)
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
