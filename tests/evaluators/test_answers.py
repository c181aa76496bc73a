"""From a retrieval log, or from pools of passages, to answers by a small scripted model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.evaluators import answers
from qrag_jax.feedback.llm import Question
from qrag_jax.llm.outcomes import Answer, ChatRequest, Failure, Outcome
from qrag_jax.llm.text.generation import Generation
from qrag_jax.metrics.facts import chunk_filter, fact_recall
from qrag_jax.metrics.row_log import ANSWERS, HOPS, Hop, Miss, Row, Searched

NONE = chunk_filter("none")
LOG = Path("log.jsonl")


def row(number: int, answer: str = "Oslo", **changes: object) -> Row:
    made = Row(
        id=f"q{number}",
        question=f"Which town is number {number}?",
        answer=answer,
        sf_idx=[4, 1],
        pred_idx=[4, 2, 1],
        q_values=[0.5, 0.25, 0.75],
        sf_texts=["four", "one"],
        pred_texts=[f"The town is {answer}{number}.", "It rains.", "Towns have numbers."],
        ret=1.0,
        text_len=99,
        f1=0.8,
        em=1.0,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


class Reader:
    """Answers from the prompt alone, as `says` reads it; keeps what it was asked."""

    def __init__(self, says: Callable[[str], Outcome]) -> None:
        self.says = says
        self.prompts: list[str] = []

    def __call__(self, requests: Sequence[ChatRequest]) -> Future[list[Outcome]]:
        prompts = [request.messages[-1][1] for request in requests]
        self.prompts += prompts
        future: Future[list[Outcome]] = Future()
        future.set_result([self.says(prompt) for prompt in prompts])
        return future


def reads_town(prompt: str) -> Outcome:
    found = re.search(r"The town is (\w+)", prompt)
    return Answer(f"I see.\n**Final answer:** {found[1] if found else 'unknown'}.", version="v1")


def asked_of(rows: Sequence[Row], **options: object) -> list[Question]:
    return answers.questions(LOG, rows, NONE, **options)  # type: ignore[arg-type]


def test_failures_are_counted_and_asked_again(tmp_path: Path) -> None:
    out, batch = tmp_path / "answers.jsonl", 2
    questions = asked_of([row(n) for n in range(9)])
    down = {2: Failure("timeout", "no reply in 5 s.", 3), 5: Failure("server", "503.")}
    texts = {3: "<think>Oslo3", 7: "", 8: "Final answer: Osl"}

    def number_of(prompt: str) -> int:
        return int(re.search(r"number (\d)\?", prompt)[1])  # type: ignore[index]

    def says(prompt: str) -> Outcome:
        number = number_of(prompt)
        if number in texts:
            return Answer(texts[number], finish_reason="length")
        return down.get(number) or reads_town(prompt)

    answered, misses = answers.answer(Reader(says), Generation(), questions, out, batch)
    assert [each.id for each in answered] == ["q0", "q1", "q4", "q6"]
    causes = {2: "timeout", 3: "unfinished_thinking", 5: "server", 7: "no_text", 8: "cut_off"}
    assert {int(miss.id[1]): miss.cause for miss in misses} == causes
    assert misses[0] == Miss("q2", "timeout", "no reply in 5 s.", 3, hops=2, type="")
    again = Reader(reads_town)
    rows, misses = answers.answer(again, Generation(), questions, out, batch)
    assert misses == []
    assert [*map(number_of, again.prompts)] == [*causes]
    assert [each.id for each in rows] == [f"q{n}" for n in (0, 1, 4, 6, *causes)]
    assert ANSWERS.read(out) == rows
    # An answer that is cut off may be scored.
    cut = Reader(lambda prompt: Answer("Final answer: Osl", finish_reason="length"))
    generation = Generation(cut_off="score")
    (scored,), misses = answers.answer(cut, generation, questions[:1], tmp_path / "b.jsonl", 4)
    assert (scored.prediction, scored.finish_reason, misses) == ("Osl", "length", [])


def test_questions_of_each_data_set() -> None:
    rows = [
        row(0, "kitchen", id="qa2-valid-3", question="Where is the milk?", source="babilong"),
        row(1, id="3hop1__1_2_3", source="musique"),
        row(2, id="5addda1b5542992200553b55", source="hotpotqa"),
        row(3, sf_idx=[1], sf_texts=["one"], source="two_wiki"),
        row(4, "17", aliases=["23"], source="niah"),
        row(5, id="3hop1__4_5_6", source="own"),  # ids of one's own data say nothing
    ]
    found = asked_of(rows, golds={"5addda1b5542992200553b55": (("Bergen", "Oslo"), "bridge")})
    assert [(q.rule, q.prompt.name, q.hops, q.type) for q in found] == [
        ("babilong", "babilong_qa2", 2, "qa2"),
        ("musique", "open_qa", 3, "3hop1"),
        ("hotpotqa", "open_qa", 2, "bridge"),
        ("hotpotqa", "open_qa", 1, ""),
        ("ruler", "open_qa", 2, ""),
        ("squad", "open_qa", 2, ""),
    ]
    assert (found[2].gold, found[4].gold) == (("Bergen", "Oslo"), ("17", "23"))
    # A story is told in the order of the document, passages stay in the order taken.
    assert [index for index, _ in found[0].chunks] == [1, 2, 4]
    assert [index for index, _ in found[1].chunks] == [4, 2, 1]
    named = asked_of(rows[:1], prompt="open_qa", metric="squad")[0]
    assert (named.prompt.name, named.rule) == ("open_qa", "squad")


def test_refusals() -> None:
    for rows, options, word in (
        ([row(0), row(0)], {}, r"log\.jsonl"),
        ([row(0, id="qa1-dev-0", source="babilong")], {}, "'Oslo'"),
        ([row(0)], {"prompt": "better"}, r"better\.txt"),
    ):
        with pytest.raises(InputError, match=word):
            asked_of(rows, **options)


def test_the_judge_is_asked_once_for_each_prediction(tmp_path: Path) -> None:
    """Another prediction needs another verdict; those without one are asked again."""
    out, verdict_file = tmp_path / "answers.jsonl", tmp_path / "judge.jsonl"
    questions = asked_of([row(n) for n in range(4)])
    rows, _ = answers.answer(Reader(reads_town), Generation(), questions, out, 8)

    def judges(prompt: str) -> Outcome:
        if "number 2?" in prompt:
            return Failure("rate_limit", "429.", 2)
        if "number 3?" in prompt:
            return Answer("Hard to say.")
        right = "<prediction>Oslo1</prediction>" in prompt
        return Answer(f"Final answer: {'yes' if right else 'no'}")

    verdicts, misses = answers.judge(Reader(judges), Generation(), rows, verdict_file, 2)
    assert verdicts == {"q0": False, "q1": True}
    assert [(miss.id, miss.cause) for miss in misses] == [
        ("q2", "rate_limit"),
        ("q3", "unclear_verdict"),
    ]
    rows[0] = dataclasses.replace(rows[0], prediction="Bergen")
    again = Reader(lambda prompt: Answer("yes"))
    verdicts, misses = answers.judge(again, Generation(), rows, verdict_file, 2)
    assert (verdicts, misses) == (dict.fromkeys(("q0", "q1", "q2", "q3"), True), [])
    assert len(again.prompts) == 3


# ---------------------------------------------------------------- pools of a query writer


def test_the_pool_of_the_last_hop_is_answered_from(tmp_path: Path) -> None:
    scores = {"recall": 0.5, "ap": 0.25, "all_gold": 0.0}
    hops = tuple(Hop("mill", "searched", pool, scores) for pool in (("a",), ("a", "c")))
    texts = {"a": "# Mill\nBy Ada.", "c": "# Oak\nA tree.", "b": "# Ada\nOf Oslo."}
    asked = ("q1", "Where?", ("Oslo", "Kristiania"), ("mill", "ada"))
    log = tmp_path / "log.jsonl"
    HOPS.write(log, [Searched(*asked, hops, gold=("a", "b"), texts=texts)], {})
    (row,) = answers.pool_rows(log)
    assert (row.answer, row.aliases, row.em) == ("Oslo", ["Kristiania"], 0.0)
    assert fact_recall(row.sf_idx, row.pred_idx) == 0.5
    assert row.pred_texts == [texts["a"], texts["c"]]
    assert row.sf_texts == [texts["a"], texts["b"]]
