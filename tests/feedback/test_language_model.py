"""Rewards of a model that reads its prompt: scored, judged, failed, asked again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from qrag_jax.errors import InputError
from qrag_jax.feedback.language_model import LanguageModelFeedback, Unscored
from qrag_jax.feedback.questions import Asking, Question
from qrag_jax.llm.outcomes import Answer, ChatRequest, Failure, Outcome
from qrag_jax.llm.text.generation import Generation

GOLD = ("Ada Lovelace", "Countess of Lovelace")


class Reader:
    """Answers from the prompt alone."""

    def __init__(self, says: Callable[[str], Outcome]) -> None:
        self.says, self.asked = says, list[str]()

    def ask_blocking(self, requests: Sequence[ChatRequest]) -> list[Outcome]:
        prompts = [request.messages[-1][1] for request in requests]
        self.asked += prompts
        return [self.says(prompt) for prompt in prompts]


def reads(prompt: str) -> Outcome:
    """What stands behind "says:" in the passages; a word in capitals is a failure."""
    if "Given answer:" in prompt:
        given = prompt.rpartition("Given answer:")[2]
        if "Babbage" in given:
            return Answer("I cannot tell.")
        return Answer(f"Final answer: {'yes' if 'Countess' in given or 'Ada' in given else 'no'}")
    said = prompt.partition("says:")[2].split("\n")[0].strip()
    if said.isupper():
        return Failure(said.lower(), "as told")
    return Answer(f"Hm.\nFinal answer: {said}" if said else "...")


def questions(*says: str) -> list[Question]:
    asking = Asking(metric="squad")
    return [
        asking.question("test", f"q{i}", "Who wrote it?", [(4, f"says: {each}")], GOLD, hops=1)
        for i, each in enumerate(says)
    ]


def rewards(metric: str, asked: list[Question], known=None, **options) -> tuple[list, Reader]:
    reader = Reader(reads)
    feedback = LanguageModelFeedback(reader, Generation(), metric, **options)
    found = feedback.begin(asked, known).result(10)
    feedback.close()
    return found, reader


def test_the_metric_of_the_answer_times_the_scale() -> None:
    asked = questions("Ada Lovelace", "the countess of Lovelace!", "Ada King", "Babbage")
    assert rewards("answer_em", asked)[0] == [1.0, 1.0, 0.0, 0.0]
    assert rewards("answer_f1", asked, scale=2.0)[0] == [2.0, 2.0, 1.0, 0.0]


def test_what_has_no_answer_has_no_reward() -> None:
    asked = questions("Ada Lovelace", "TIMEOUT", "", "Ada King")
    found, _ = rewards("answer_f1", asked)
    assert (found[0], found[3]) == (1.0, 0.5)
    assert [each.cause for each in found[1:3]] == ["timeout", "no_text"]
    assert found[1] == Unscored("timeout", "as told")


def test_the_judge_says() -> None:
    asked = questions("Countess Lovelace", "somebody", "Babbage", "SERVER")
    found, reader = rewards("judge", asked, scale=0.5)
    assert found[:2] == [0.5, 0.0]
    assert [each.cause for each in found[2:]] == ["unclear_verdict", "server"]
    # What failed is not judged; the judge sees question, right answers and the given one.
    judged = [prompt for prompt in reader.asked if "Given answer:" in prompt]
    assert len(judged) == 3
    assert judged[0].count("Ada Lovelace; Countess of Lovelace") == 1


def test_asked_again_are_only_those_without_a_reward() -> None:
    asked = questions("Ada Lovelace", "Ada King", "Babbage")
    known = [0.25, Unscored("timeout", ""), Unscored("server", "")]
    found, reader = rewards("answer_f1", asked, known)
    assert found == [0.25, 0.5, 0.0]
    assert len(reader.asked) == 2


def test_prompts_that_do_not_fit_are_not_sent() -> None:
    generation = Generation(max_prompt_tokens=3, count=lambda messages: 9)
    reader = Reader(reads)
    feedback = LanguageModelFeedback(reader, generation, "answer_em")
    (found,) = feedback.begin(questions("Ada Lovelace")).result(10)
    feedback.close()
    assert found.cause == "too_long"
    assert reader.asked == []


def test_refusals() -> None:
    with pytest.raises(InputError, match="'bleu'"):
        LanguageModelFeedback(Reader(reads), Generation(), "bleu")
    with pytest.raises(InputError, match="sample q9"):
        Asking().question("test", "q9", "Who?", [], ("  ",), hops=1)


@pytest.mark.parametrize(
    ("cause", "again"),
    [("filtered", False), ("tool_call", False), ("broken_off", True), ("unknown_end", True)],
)
def test_ends_that_are_worth_asking_again(cause: str, again: bool) -> None:
    found, _ = rewards("answer_f1", questions(cause.upper()))
    assert found[0].cause == cause
    assert found[0].permanent is not again
