"""Answers and verdicts out of messy texts."""

from __future__ import annotations

from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.extraction import final_answer, last_object, verdict

PARIS = [
    *("Final answer: Paris.", "The passages say so.\nFinal answer: Paris\n\n"),
    *("Thus, the final answer is: Paris.", "Final answer - Paris", "Final_answer: Paris"),
    *("**Final answer:** Paris", "### Final Answer\n\nParis", "## Final answer:\n- Paris"),
    *("Final answer: “Paris.”", 'Final answer: ("Paris")'),
    "Final answer:\n```text\nParis\n```\nDone.",
    # several: the last that has something
    "Final answer: Rome\nWait.\nFinal answer: Paris",
    "Final answer: Paris\nFinal answer:",
    "Final answer: Paris\n\nI am sure that this final answer is correct.",
    # no mark: the last line
    *("Both lie in France.\n\nParis\n\n---\n", "**Answer:** Paris\n\nIt lies in France."),
    # thinking
    "<think>\nFinal answer: Rome\n</think>\n\nFinal answer: Paris",
    *("Final answer: Rome</think>Paris", "<think>a</think><think>b</think>Paris"),
]
OTHERS = {
    "Final answer：巴黎。": "巴黎",
    "Final answer: (a) and (b)": "(a) and (b)",
    "Final answer: rock 'n' roll": "rock 'n' roll",
    "Final answer: \\boxed{\\text{New York}}": "New York",
    "Final answer: $35 million": "$35 million",
}


def test_final_answer() -> None:
    for text, expected in (dict.fromkeys(PARIS, "Paris") | OTHERS).items():
        assert final_answer(text) == expected, text


def cause(found: str | bool | Failure) -> str:
    assert isinstance(found, Failure), found
    return found.cause


def test_texts_without_an_answer() -> None:
    for text in ("", "**.**", "<think>Hm.</think>"):
        assert cause(final_answer(text)) == "no_text"
    for text in ("<think>Final answer: Paris\nor", "<think>a</think>Rome<think>Final answer: Oslo"):
        assert cause(final_answer(text)) == "unfinished_thinking"
    # Degenerate texts are read in no time.
    for unit in ("\n", "*", "(", "<think></think>"):
        assert cause(final_answer(unit * 20_000)) == "no_text"
    marks = "final answer:" * 20_000  # with nothing behind: the line itself
    assert final_answer(marks) == marks.rstrip(":")


def test_a_truncated_text_has_only_whole_answers() -> None:
    for text in ("Final answer: The Eiff", "The passages say that", "Reasoning.\nFinal answer:"):
        assert cause(final_answer(text, "length")) == "cut_off"
    assert final_answer("Final answer: Paris\nBecause the", "length") == "Paris"
    # The template opened the thinking, so the text has no <think>.
    rehearsed = "I will write Final answer: Rome\nbut perhaps"
    assert cause(final_answer(rehearsed, "length", True)) == "unfinished_thinking"
    assert final_answer(rehearsed, "stop", thinks=True) == "Rome"
    assert final_answer(rehearsed + "</think>Final answer: Paris\nAs", "length", True) == "Paris"


def test_verdicts() -> None:
    for text in (
        *("**Final answer:** Yes", "Final answer: Yes, both name Paris.", "Verdict: yes"),
        *("Final answer: yes - they agree", "They agree.\nFinal answer: correct"),
        *("<think>no, no</think>Final answer: yes", "Final answer: no\nWait.\nFinal answer: yes"),
    ):
        assert verdict(text) is True, text
    for text in ("Final answer:\n\n**NO**", "Final answer: incorrect", "NO (Rome is another city)"):
        assert verdict(text) is False, text
    for text in (
        *("Final answer: maybe", "Final answer: yes or no", "Yes\nNo", "Final answer: No idea"),
        *("Final answer: No, yes would be wrong", "The answers seem to agree."),
    ):
        assert cause(verdict(text)) == "unclear_verdict", text
    assert cause(verdict("<think>yes")) == "unfinished_thinking"
    assert cause(verdict("Final answer: no", "length")) == "cut_off"  # perhaps "not wrong"
    assert verdict("Final answer: no\nBecause", "length") is False


def test_the_last_object_with_the_name() -> None:
    for text, found in (
        ('So:\n```json\n{"a": 1, "b": "x}"}\n```\nDone.', {"a": 1, "b": "x}"}),
        *(('{"a": 1} or rather {"a": 2}', {"a": 2}), ('{"a": 1} and {"b": 2}', {"a": 1})),
        *(('{STATUS} {"a": {"a": 2}}', {"a": {"a": 2}}), ('[{"a": 1}]', {"a": 1})),
        *(("{'a': 1}", None), ('{"a": 1', None), ('{"a":' * 5000, None)),
    ):
        assert last_object(text, ("a",)) == found
        assert last_object(text, ("a", "c")) is None  # all names are needed
