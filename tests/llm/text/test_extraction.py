"""Answers and verdicts out of messy texts."""

from __future__ import annotations

from typing import Any

import pytest

from qrag_jax.llm.text.extraction import NoAnswer, final_answer, last_object, verdict

ANSWERS = [
    ("Final answer: Paris.", "Paris"),
    ("The passages say so.\nFinal answer: Paris\n\n", "Paris"),
    ("It is the capital, so the final answer: Paris", "Paris"),
    ("Thus, the final answer is: Paris.", "Paris"),
    ("The final answer is **Paris**.", "Paris"),
    ("Final answer - Paris", "Paris"),
    ("Final answer：巴黎。", "巴黎"),
    ("Final_answer: Paris", "Paris"),
    ("**Final answer:** Paris", "Paris"),
    ("*Final answer:* *Paris*", "Paris"),
    ("### Final Answer\n\nParis", "Paris"),
    ("## Final answer:\n- Paris", "Paris"),
    ("**Final Answer**\n\n**Paris**\n", "Paris"),
    ('Final answer: "Paris".', "Paris"),
    ("Final answer: “Paris.”", "Paris"),
    ('Final answer: ("Paris")', "Paris"),
    ("Final answer: (a) and (b)", "(a) and (b)"),
    ('Final answer: "Yes" and "No"', '"Yes" and "No"'),
    ("Final answer: rock 'n' roll", "rock 'n' roll"),
    ("Final answer:\n```text\nParis\n```\nDone.", "Paris"),
    ("Final answer: \\boxed{\\text{New York}}", "New York"),
    ("Final answer: $35 million", "$35 million"),
    # several: the last that has something
    ("Final answer: Rome\nWait.\nFinal answer: Paris", "Paris"),
    ("I must end with Final answer: ANSWER. Final answer: Paris", "Paris"),
    ("Final answer: Paris\nFinal answer:", "Paris"),
    ("Final answer: Paris\n\nI am sure that this final answer is correct.", "Paris"),
    ("The final answer depends on the passages.\nFinal answer: Paris", "Paris"),
    # no mark: the last line
    ("Paris", "Paris"),
    ("Both lie in France.\n\nParis\n\n---\n", "Paris"),
    ("**Answer:** Paris\n\nIt lies in France.", "Paris"),
    ("The answer: it lies in France.\nParis", "Paris"),
    # thinking
    ("<think>\nFinal answer: Rome\n</think>\n\nFinal answer: Paris", "Paris"),
    ("Final answer: Rome</think>Paris", "Paris"),
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
        ("**.**", "no_text"),
        ("---\n🙂", "no_text"),
        ("<think>Hm.</think>", "no_text"),
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
    "**Final answer:** Yes",
    "Final answer: Yes, both name Paris.",
    "Final answer: yes - they agree",
    "They agree.\nFinal answer: correct",
    "Yes",
    "Verdict: yes",
    "<think>no, no</think>Final answer: yes",
    "Final answer: no\nWait, that is wrong.\nFinal answer: yes",
]
NO = [
    "Final answer:\n\n**NO**",
    "Final answer: No, it names Rome.",
    "Final answer: incorrect",
    "NO (Rome is another city)",
]
UNCLEAR = [
    "Final answer: maybe",
    "Final answer: yes or no",
    "Final answer: yes/no",
    "Final answer: No idea",
    "Final answer: No, yes would be wrong",
    "Yes\nNo",
    "The answers seem to agree.",
    "Final answer: The given answer is right",
]


@pytest.mark.parametrize("text", [*YES, *NO, *UNCLEAR])
def test_verdicts(text: str) -> None:
    found = verdict(text)
    if text in UNCLEAR:
        assert isinstance(found, NoAnswer)
        assert found.cause == "unclear_verdict"
    else:
        assert found is (text in YES)


def test_a_verdict_that_cannot_be_read_is_typed() -> None:
    for text, reason, cause in (
        ("<think>yes", "stop", "unfinished_thinking"),
        ("Final answer: no", "length", "cut_off"),  # perhaps "not wrong"
        ("Yes, they", "length", "cut_off"),
    ):
        found = verdict(text, reason)
        assert isinstance(found, NoAnswer)
        assert found.cause == cause, text
    assert verdict("Final answer: no\nBecause", "length") is False


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('So:\n```json\n{"a": 1, "b": "x}"}\n```\nDone.', {"a": 1, "b": "x}"}),
        ('{"a": 1} or rather {"a": 2}', {"a": 2}),
        ('{"a": 1} and {"b": 2}', {"a": 1}),
        ('{STATUS} {"a": {"a": 2}}', {"a": {"a": 2}}),
        ('{{"a": 1}}', {"a": 1}),
        ('[{"a": 1}]', {"a": 1}),
        ("{'a': 1}", None),
        ('{"a": 1', None),
        ('{"b": 1}', None),
        ("{" * 5000, None),
        ('{"a":' * 5000, None),
    ],
)
def test_the_last_object_with_the_name(text: str, found: dict[str, Any] | None) -> None:
    assert last_object(text, ("a",)) == found
    assert last_object(text, ("a", "c")) is None  # all names are needed
