"""Answers and verdicts out of messy texts."""

from __future__ import annotations

from typing import Any

import pytest

from qrag_jax.llm.text.extraction import NoAnswer, final_answer, last_object, thinking, verdict

ANSWERS = [
    # plain
    ("Final answer: Paris", "Paris"),
    ("Final answer: Paris.", "Paris"),
    ("final answer:Paris", "Paris"),
    ("FINAL ANSWER : Paris!", "Paris"),
    ("The passages say so.\nFinal answer: Paris\n\n", "Paris"),
    ("Final answer: Paris, France", "Paris, France"),
    ("Final answer: 3.5", "3.5"),
    ("Final answer: Mary is in the kitchen.", "Mary is in the kitchen"),
    ("Final answer: 12:30", "12:30"),
    ("Final answer: yes", "yes"),
    # in the middle of a line
    ("It is the capital, so the final answer: Paris", "Paris"),
    ("Thus, the final answer is: Paris.", "Paris"),
    ("My final answer is Paris.", "Paris"),
    ("The final answer is **Paris**.", "Paris"),
    ("Final answer - Paris", "Paris"),
    ("Final answer — Paris", "Paris"),
    ("Final answer = Paris", "Paris"),
    # colons
    ("Final answer：巴黎。", "巴黎"),
    ("Final answer :: Paris", ": Paris"),
    ("Final_answer: Paris", "Paris"),
    ("final-answer: Paris", "Paris"),
    # markdown
    ("**Final answer:** Paris", "Paris"),
    ("**Final answer**: Paris", "Paris"),
    ("**Final answer: Paris**", "Paris"),
    ("***Final Answer: Paris***", "Paris"),
    ("__Final answer:__ Paris", "Paris"),
    ("`Final answer: Paris`", "Paris"),
    ("*Final answer:* *Paris*", "Paris"),
    ("Final answer: **Paris** (France)", "Paris (France)"),
    ("### Final Answer\n\nParis", "Paris"),
    ("## Final answer:\n- Paris", "Paris"),
    ("> Final answer: Paris", "Paris"),
    ("**Final Answer**\n\n**Paris**\n", "Paris"),
    ("- Final answer: Paris", "Paris"),
    ("Final answer:\n\n\n   Paris  ", "Paris"),
    ("Final answer:\r\nParis\r\n", "Paris"),
    # quotes, brackets, code
    ('Final answer: "Paris".', "Paris"),
    ("Final answer: “Paris.”", "Paris"),
    ("Final answer: 'Paris'", "Paris"),
    ("Final answer: «Paris»", "Paris"),
    ("Final answer: [Paris]", "Paris"),
    ("Final answer: <Paris>", "Paris"),
    ('Final answer: ("Paris")', "Paris"),
    ("Final answer: (a) and (b)", "(a) and (b)"),
    ('Final answer: "Yes" and "No"', '"Yes" and "No"'),
    ("Final answer: rock 'n' roll", "rock 'n' roll"),
    ("Final answer: `Paris`", "Paris"),
    ("Final answer:\n```\nParis\n```", "Paris"),
    ("Final answer:\n```text\nParis\n```\nDone.", "Paris"),
    ("```\nFinal answer: Paris\n```", "Paris"),
    ("~~~\nParis\n~~~", "Paris"),
    ("Final answer: $\\boxed{Paris}$", "Paris"),
    ("Final answer: \\boxed{\\text{New York}}", "New York"),
    ("Final answer: $35 million", "$35 million"),
    ("Final answer: C#", "C#"),
    # several: the last that has something
    ("Final answer: Rome\nWait.\nFinal answer: Paris", "Paris"),
    ("I must end with Final answer: ANSWER. Final answer: Paris", "Paris"),
    ("Final answer: Paris\nFinal answer:", "Paris"),
    ("Final answer: Paris. Final answer:", "Paris"),
    ("Final answer: Paris\n\nI am sure that this final answer is correct.", "Paris"),
    ("Final answer: Paris\n\nNote: it lies on the Seine.", "Paris"),
    ("The final answer depends on the passages.\nFinal answer: Paris", "Paris"),
    # no mark: the last line
    ("Paris", "Paris"),
    ("  Paris.  \n", "Paris"),
    ("Both lie in France.\n\nParis\n\n---\n", "Paris"),
    ("Both lie in France.\nAnswer: Paris", "Paris"),
    ("**Answer:** Paris\n\nIt lies in France.", "Paris"),
    ("The answer: it lies in France.\nParis", "Paris"),
    ("The final answers differ.\nParis", "Paris"),
    # thinking
    ("<think>Rome? No.</think>Final answer: Paris", "Paris"),
    ("<think>\nFinal answer: Rome\n</think>\n\nFinal answer: Paris", "Paris"),
    ("Final answer: Rome</think>Paris", "Paris"),
    ("<think></think>\n\nParis", "Paris"),
    ("<think>a</think><think>b</think>Paris", "Paris"),
]


@pytest.mark.parametrize(("text", "expected"), ANSWERS, ids=[repr(text) for text, _ in ANSWERS])
def test_final_answer(text: str, expected: str) -> None:
    assert final_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "no_text"),
        (" \n\t\n", "no_text"),
        ("```\n```", "no_text"),
        ("**.**", "no_text"),
        ("---\n🙂", "no_text"),
        ("<think>Hm.</think>", "no_text"),
        ("<think>Hm.</think>\n\n", "no_text"),
        ("<think>Rome or Paris", "unfinished_thinking"),
        ("<think>Final answer: Paris\nor", "unfinished_thinking"),
        ("<think>a</think>Rome<think>no, Final answer: Paris", "unfinished_thinking"),
    ],
)
def test_no_answer_is_typed(text: str, cause: str) -> None:
    found = final_answer(text)
    assert isinstance(found, NoAnswer)
    assert found.cause == cause
    assert found.message.endswith(".")


def test_an_answer_that_is_cut_off_counts_only_whole() -> None:
    def cause(text: str, thinks: bool = False) -> str:
        found = final_answer(text, "length", thinks)
        assert isinstance(found, NoAnswer), found
        return found.cause

    assert cause("Final answer: The Eiff") == "cut_off"
    assert cause("The passages say that") == "cut_off"
    assert cause("Reasoning.\nFinal answer:") == "cut_off"
    assert final_answer("Final answer: Paris\nBecause the", "length") == "Paris"
    assert final_answer("Final answer: Paris\n", "length") == "Paris"
    # The template opened the thinking, so the text has no <think>.
    rehearsed = "I will write Final answer: Rome\nbut perhaps"
    assert cause(rehearsed, thinks=True) == "unfinished_thinking"
    assert final_answer(rehearsed, "stop", thinks=True) == "Rome"
    assert final_answer(rehearsed + "</think>Final answer: Paris\nAs", "length", True) == "Paris"


def test_degenerate_texts_are_read_in_no_time() -> None:
    for unit in ("\n", " ", "*", "#", "(", "<think></think>"):
        found = final_answer(unit * 20_000)
        assert isinstance(found, NoAnswer)
        assert found.cause == "no_text"
    for unit in ("final answer ", "final answer:"):  # marks with nothing behind: the line itself
        assert final_answer(unit * 20_000) == (unit * 20_000).rstrip(" :")


YES = [
    "Final answer: yes",
    "Final answer: YES.",
    "**Final answer:** Yes",
    "Final answer: [yes]",
    "Final answer: Yes, both name Paris.",
    "Final answer: yes - they agree",
    "They agree.\nFinal answer: correct",
    "Final answer: True",
    "Yes",
    "yes, it is the same city",
    "Yes.\n\nBoth texts name the same city.",
    "Verdict: yes",
    "<think>no, no</think>Final answer: yes",
    "Final answer: no\nWait, that is wrong.\nFinal answer: yes",
]
NO = [
    "Final answer: no",
    "Final answer:\n\n**NO**",
    "Final answer: No, it names Rome.",
    "Final answer: incorrect",
    "final answer is no.",
    "No.",
    "NO (Rome is another city)",
]
UNCLEAR = [
    "Final answer: maybe",
    "Final answer: yes or no",
    "Final answer: yes/no",
    "Final answer: No idea",
    "Final answer: not sure",
    "Final answer: nothing",
    "Final answer: yesterday",
    "Final answer: No, yes would be wrong",
    "Yes\nNo",
    "The answers seem to agree.",
    "Final answer: The given answer is right",
]


@pytest.mark.parametrize(("texts", "expected"), [(YES, True), (NO, False)])
def test_verdicts(texts: list[str], expected: bool) -> None:
    for text in texts:
        assert verdict(text) is expected, text


@pytest.mark.parametrize("text", UNCLEAR)
def test_what_is_neither_yes_nor_no_is_no_verdict(text: str) -> None:
    found = verdict(text)
    assert isinstance(found, NoAnswer)
    assert found.cause == "unclear_verdict"


def test_a_verdict_that_cannot_be_read_is_typed() -> None:
    for text, reason, cause in (
        ("", "stop", "no_text"),
        ("<think>yes", "stop", "unfinished_thinking"),
        ("Final answer: no", "length", "cut_off"),  # perhaps "not wrong"
        ("Yes, they", "length", "cut_off"),
    ):
        found = verdict(text, reason)
        assert isinstance(found, NoAnswer)
        assert found.cause == cause, text
    assert verdict("Final answer: no\nBecause", "length") is False


def test_thinking_is_switched_as_vllm_takes_it() -> None:
    assert thinking(False) == {"chat_template_kwargs": {"enable_thinking": False}}
    assert thinking(True) == {"chat_template_kwargs": {"enable_thinking": True}}
    assert thinking(None) == {}


FOUND: list[tuple[str, dict[str, Any]]] = [
    ('{"a": 1}', {"a": 1}),
    ('So:\n```json\n{"a": 1, "b": "x}"}\n```\nDone.', {"a": 1, "b": "x}"}),
    ('{"a": 1} or rather {"a": 2}', {"a": 2}),
    ('{"a": 1} and {"b": 2}', {"a": 1}),
    ('{STATUS} {"a": {"a": 2}}', {"a": {"a": 2}}),
    ('{{"a": 1}}', {"a": 1}),
    ('"{" {"a": "ü"}', {"a": "ü"}),
    ('[{"a": 1}]', {"a": 1}),
]


@pytest.mark.parametrize(("text", "found"), FOUND)
def test_the_last_object_with_the_name(text: str, found: dict[str, Any]) -> None:
    assert last_object(text, ("a",)) == found


@pytest.mark.parametrize(
    "text", ["", "a", "{'a': 1}", '{"a": 1', '{"b": 1}', "{", "{" * 5000, '{"a":' * 5000]
)
def test_no_object(text: str) -> None:
    assert last_object(text, ("a",)) is None


def test_all_names_are_needed() -> None:
    assert last_object('{"a": 1}', ("a", "b")) is None
    assert last_object('{"a": 1, "b": 2, "c": 3}', ("a", "b")) == {"a": 1, "b": 2, "c": 3}
