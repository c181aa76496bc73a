"""Tool calls: each form is written, read and checked; a wrong one has one short message."""

from __future__ import annotations

import json
import random
import string
from typing import Any

import pytest

from qrag_jax.llm.text.tool_calls import (
    FORMATS,
    HERMES,
    LLAMA,
    Malformed,
    ToolCall,
    check_call,
    describe,
    read_calls,
    tool,
    write_call,
)

QUERY = {"query": {"type": "string"}, "top_n": {"type": "integer", "minimum": 1}}
CITED = {"type": "array", "items": {"type": "string"}}
RETRIEVE = tool("retrieve_documents", "Finds documents.", QUERY, optional=("top_n",))
COMPLETE = tool(
    "complete", "Ends the task.", {"final_answer": {"type": "string"}, "cited_doc_ids": CITED}
)
TOOLS = (RETRIEVE, COMPLETE)
HERMES_CALL = (
    '<tool_call>\n{"name": "retrieve_documents", "arguments": {"query": "Rome"}}\n</tool_call>'
)
LLAMA_CALL = '{"name": "retrieve_documents", "parameters": {"query": "Rome"}}'
CALLS = {HERMES: HERMES_CALL, LLAMA: LLAMA_CALL}
ROME = ToolCall("retrieve_documents", {"query": "Rome"})

PIECES = [
    *string.ascii_letters,
    *" \n\t\r\"'\\/<>&{}[],;:|#\u2028é語\U0001f600\x00",
    *("&lt;", "\\u003c", "\\n", "<tool_call>", "</tool_call>"),
    *("<think>", "</think>", "<|python_tag|>", "<|im_end|>", "}}"),
]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randrange(9)))


def random_call(rng: random.Random) -> ToolCall:
    if rng.random() < 0.5:
        top_n = {"top_n": rng.randrange(1, 10**6)} if rng.random() < 0.5 else {}
        return ToolCall("retrieve_documents", {"query": random_text(rng), **top_n})
    items = [text for _ in range(rng.randrange(5)) if (text := random_text(rng).strip())]
    return ToolCall("complete", {"final_answer": random_text(rng), "cited_doc_ids": items})


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_written_is_read(form: str) -> None:
    assert write_call(ROME, form) == CALLS[form]
    rng = random.Random(0)
    for _ in range(100):
        call = random_call(rng)
        written = write_call(call, form)
        assert not any(mark in written for mark in ("<|", "<think>", "</think>"))
        assert read_calls(written, form) == (call,)
        assert check_call(call, TOOLS) == call


def test_several_calls_with_text_around_them() -> None:
    assert read_calls(f"First.\n{HERMES_CALL} and {{then}} {HERMES_CALL}", HERMES) == (ROME, ROME)
    first, second = read_calls(f"{HERMES_CALL.rpartition('</')[0]} {HERMES_CALL}", HERMES)
    assert isinstance(first, Malformed)
    assert second == ROME


@pytest.mark.parametrize("form", FORMATS)
def test_no_call(form: str) -> None:
    call = CALLS[form]
    for text in ("", "Rome.", f"<think>{call}</think>It is Rome.", f"<think>\n{call}", "1 < 2 {x}"):
        assert read_calls(text, form) == ()
    assert read_calls(f"<think>\nHm: {call}\n</think>\n\n{call}", form) == (ROME,)
    assert read_calls(f"Hm: {call}</think>{call}", form) == (ROME,)
    if form == LLAMA:
        assert read_calls(f"\n<|python_tag|> {LLAMA_CALL}\n", LLAMA) == (ROME,)


def hermes(arguments: str) -> str:
    return f'<tool_call>{{"name": "complete", "arguments": {arguments}}}</tool_call>'


def assert_short(found: object, named: str) -> None:
    assert isinstance(found, Malformed)
    assert named in found.message
    assert len(found.message.splitlines()) == 1
    assert len(found.message) < 200


@pytest.mark.parametrize(
    ("form", "text", "named"),
    [
        (HERMES, hermes('{"a": NaN}'), "JSON"),
        (HERMES, hermes('{"a": {"b<|im_end|>": 1, "b<|im_end|>": 2}}'), '"b< |im_end|>"'),
        (HERMES, hermes('{"a": ' * 10**5), "deep"),
        (HERMES, hermes("null"), '"arguments"'),
        (HERMES, HERMES_CALL.replace("}}", "}} }"), "</tool_call>"),
        (LLAMA, '{"answer": "Rome"}', '"parameters"'),
        (LLAMA, f"I search. {LLAMA_CALL}", "text"),
    ],
)
def test_a_malformed_call_has_a_short_message(form: str, text: str, named: str) -> None:
    (found,) = read_calls(text, form)
    assert_short(found, named)


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("<|x|>\n" * 50, {}, "< |x|> < |x"),
        ("complete", {"k": 1}, '"k"'),
        ("complete", {"final_answer": ""}, "cited_doc_ids"),
        ("retrieve_documents", {"query": "a", "top_n": True}, "top_n"),
        ("retrieve_documents", {"query": "a", "top_n": 0}, "top_n"),
        ("complete", {"final_answer": "", "cited_doc_ids": [7]}, "cited_doc_ids"),
    ],
)
def test_a_wrong_call_has_a_short_message(name: str, arguments: dict[str, Any], named: str) -> None:
    assert_short(check_call(ToolCall(name, arguments), TOOLS), named)


def test_what_models_mean_is_repaired() -> None:
    """Whole numbers with a point, and halves of surrogate pairs."""
    whole = check_call(ToolCall("retrieve_documents", {"query": "", "top_n": 2.0}), TOOLS)
    assert isinstance(whole, ToolCall)
    assert repr(whole.arguments["top_n"]) == "2"
    for form, call in CALLS.items():
        (found,) = read_calls(call.replace("Rome", "\\ud800"), form)
        assert found == ToolCall("retrieve_documents", {"query": "\ufffd"})


def test_the_schemas_of_all_tools_are_shown() -> None:
    for form in FORMATS:
        assert all(json.dumps(each) in describe(TOOLS, form) for each in TOOLS)
    schema = RETRIEVE["function"]["parameters"]
    assert (schema["type"], schema["required"]) == ("object", ["query"])
