"""Readers of what a model wrote: rewritten queries, Boolean queries, tool calls, final answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from benchmarks.tried_inputs import TextReader
from qrag_jax.environments.query_rewriting.output import FORMS, OUTCOMES, read_output
from qrag_jax.environments.rag import reading, search_r1
from qrag_jax.llm.outcomes import Answer
from qrag_jax.llm.text.extraction import final_answer, verdict
from qrag_jax.llm.text.json_objects import last_object
from qrag_jax.llm.text.tool_calls import FORMATS, ToolCall, check_call, read_calls, write_call
from qrag_jax.llm.text.tool_specs import Parameter, ToolSpec
from qrag_jax.retrieval.boolean_query import BooleanError, parse_boolean

TOOLS = (
    ToolSpec(
        "find",
        "Finds passages.",
        (
            Parameter("query", "string", "what for"),
            Parameter("count", "integer", "how many", required=False, least=1),
            Parameter("fields", "strings", "where", required=False),
        ),
    ),
)
_CALL = ToolCall("find", {"query": "oslo fjord", "count": 3, "fields": ["title", "text"]})


def rewritten(text: str) -> None:
    """Reads a query in both forms; whatever the text is, there is an outcome."""
    for form in FORMS:
        for cut_off in (False, True):
            found = read_output(text, form, cut_off=cut_off)
            if found.outcome not in OUTCOMES or bool(found.query) != (found.outcome == OUTCOMES[0]):
                raise AssertionError(f"{found} of a text in the form {form}")


def called(text: str) -> None:
    """Reads and checks tool calls in all forms."""
    for form in FORMATS:
        for call in read_calls(text, form):
            checked = check_call(call, TOOLS) if isinstance(call, ToolCall) else call
            if isinstance(checked, ToolCall):
                write_call(checked, form)


def boolean(text: str) -> None:
    """Reads a Boolean query."""
    parse_boolean(text)


def answered(text: str) -> None:
    """Reads a final answer, a verdict, a planner's and a reader's reply, and Search-R1's."""
    final_answer(text)
    verdict(text)
    last_object(text, ("action",))
    reading.read("where", text)
    search_r1.read(Answer(text))


def readers() -> list[TextReader]:
    """The readers of this module."""
    tagged = '<think>It is in Norway.</think><answer>{"query": "oslo AND (fjord OR sea)"}</answer>'
    query = '(aspirin OR "acetyl acid"[Title]) AND pain* NOT child[MeSH Terms]'
    samples: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
        "rewritten queries": (rewritten, (tagged, '{"query": "oslo"}', "oslo AND fjord")),
        "tool calls": (called, tuple(write_call(_CALL, form) for form in FORMATS)),
        "final answers": (
            answered,
            (
                "<think>So.</think>\n**Final answer:** Oslo",
                json.dumps({"status": "FOUND", "answer": "Oslo"}),
                "<think>I look.</think><search>oslo</search>",
            ),
        ),
    }
    return [
        *(TextReader(name, texts, read) for name, (read, texts) in samples.items()),
        TextReader("Boolean queries", (query, "oslo fjord"), boolean, (BooleanError,)),
    ]
