"""Tool calls: each form is written, read and checked, a wrong one has one short message; and
scaffolds of public chat templates, compared with the templates on whole conversations.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from qrag_jax.errors import InputError
from qrag_jax.llm.text.prompts import Messages
from qrag_jax.llm.text.scaffolds import scaffold_of
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
from tests.support.small_models import write_bpe_tokenizer

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


# ------------------------------------------------------------ scaffolds

CHATML = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def template(name: str) -> str:
    """A public template, as TRL ships it."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL, which has the templates, is not installed")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


SPECIAL = ["<|im_start|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += ["<|eot_id|>", "</s>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"]
EMPTY_THINKING = "<think>\n\n</think>\n\n"
OPENING: Messages = (("system", "Answer."), ("user", "Who built the tower?"))

# Name → file, thinking, the end of its turns.
TEMPLATES: dict[str, tuple[str, bool | None, str]] = {
    "qwen3": ("qwen3", None, "<|im_end|>"),
    "qwen3-no-thinking": ("qwen3", False, "<|im_end|>"),
    "llama3": ("llama3_1", None, "<|eot_id|>"),
    "qwen2.5": ("qwen2_5", None, "<|im_end|>"),
}
Make = Callable[[str], Any]


@pytest.fixture(scope="module")
def with_template(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_bpe_tokenizer(folder)
    base = PreTrainedTokenizerFast.from_pretrained(folder)
    base.add_tokens(SPECIAL, special_tokens=True)
    base.add_tokens(MARKS)

    def make(text: str) -> Any:
        tokenizer = copy.deepcopy(base)
        tokenizer.chat_template = text
        return tokenizer

    return make


def encoded(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def whole(tokenizer: Any, messages: Messages, thinking: bool | None) -> str:
    """The template on the whole conversation, up to the opening of the model's next turn."""
    turns = [{"role": role, "content": content} for role, content in messages]
    options = {} if thinking is None else {"enable_thinking": thinking}
    return tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True, **options
    )


def random_words(rng: random.Random) -> str:
    pieces = [*'theaé語 <>{}"\n.', "the ", " the", "Tower ", "\n\n", "1994"]
    return f"a{''.join(rng.choices(pieces, k=rng.randrange(12)))}b"


def random_turn(rng: random.Random, thinks: bool) -> str:
    said = random_words(rng)
    if rng.random() < 0.5:
        said += "\n" + write_call(ToolCall("look", {"query": random_words(rng)}), HERMES)
    return f"<think>\n{random_words(rng)}\n</think>\n\n{said}" if thinks else said


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_parts_make_what_the_template_makes_of_the_whole(
    name: str, with_template: Make
) -> None:
    file, thinking, end = TEMPLATES[name]
    tokenizer = with_template(template(file))
    scaffold = scaffold_of(tokenizer, thinking=thinking)
    (end_id,) = encoded(tokenizer, end)
    assert scaffold.append_only == (name != "qwen3")
    assert scaffold.kept == (EMPTY_THINKING if name == "qwen3-no-thinking" else "")
    assert scaffold.stop_ids[0] == end_id
    assert set(scaffold.stop_ids) == {end_id, tokenizer.eos_token_id}
    rng = random.Random(0)
    for _ in range(40):
        messages = OPENING[rng.randrange(2) :]
        ids = scaffold.opening(messages)
        thinks = rng.random() < 0.5 and thinking is not False
        for _ in range(rng.randrange(1, 4)):
            said = random_turn(rng, thinks)
            cut = rng.random() < 0.3
            sampled = np.asarray(encoded(tokenizer, said) + [end_id] * (not cut), np.int32)
            follows: Messages = (("tool", random_words(rng)),) * rng.randrange(1, 4)
            if scaffold.append_only and rng.random() < 0.3:
                follows = (("user", random_words(rng)),)
            after = scaffold.after(sampled, follows)
            assert (after[0] == end_id) == cut
            ids = np.concatenate([ids, sampled, after])
            messages += (("assistant", said), *follows)
        expected = whole(tokenizer, messages, thinking)
        if scaffold.kept:  # the template puts it into the last turn alone
            turn = "<|im_start|>assistant\n"
            expected = expected.replace(scaffold.kept, "").replace(turn, turn + scaffold.kept)
        assert tokenizer.decode(ids) == expected
        assert ids.tolist() == encoded(tokenizer, expected)


def test_sampled_ids_stay_as_they_are(with_template: Make) -> None:
    tokenizer = with_template(template("qwen3"))
    scaffold = scaffold_of(tokenizer)
    letters = [token for letter in "the" for token in encoded(tokenizer, letter)]
    half = encoded(tokenizer, "é")[:1]  # no character at all
    sampled = np.asarray(letters + half + encoded(tokenizer, "<|im_end|>"), np.int32)
    after = scaffold.after(sampled, (("tool", "the"),))
    canonical = np.asarray(encoded(tokenizer, "the<|im_end|>"), np.int32)
    np.testing.assert_array_equal(after, scaffold.after(canonical, (("tool", "the"),)))
    ids = np.concatenate([scaffold.opening(OPENING), sampled, after])
    assert ids.tolist() != encoded(tokenizer, tokenizer.decode(ids))  # a text would lose them


def test_a_users_message_begins_a_segment_where_thoughts_are_dropped(with_template: Make) -> None:
    tokenizer = with_template(template("qwen3"))
    scaffold = scaffold_of(tokenizer, thinking=True)
    messages = (*OPENING, ("assistant", "<think>\nHm\n</think>\n\nEve."), ("user", "When?"))
    opening = tokenizer.decode(scaffold.opening(messages))
    assert opening == whole(tokenizer, messages, True)
    assert "Hm" not in opening


def test_options_of_the_template(with_template: Make) -> None:
    look = tool("look", "Looks.", {"query": {"type": "string", "description": "what for"}})
    tokenizer = with_template(template("qwen3"))
    with_tools = scaffold_of(tokenizer, options={"tools": [look], "enable_thinking": False})
    # What `describe` says of tools in Hermes' form is what the template says.
    system = "Answer.\n\n" + describe([look], HERMES)
    plain = scaffold_of(tokenizer, thinking=False)
    described = plain.opening((("system", system), OPENING[1]))
    np.testing.assert_array_equal(with_tools.opening(OPENING), described)
    assert with_tools.kept == EMPTY_THINKING


REFUSE_TOOLS = """
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{- raise_exception('no\\n such role') }}{%- endif %}
{%- endfor %}"""
REFUSED = [
    ("", "chat template"),
    (REFUSE_TOOLS + CHATML, "tool"),
    (CHATML.replace("in messages", "in messages if m.role != 'tool'"), "tools"),
    (CHATML.replace("<|im_end|>", "<end>"), "'<'"),
    (CHATML.replace("m.content", "m.content.split('</think>')[-1].strip()"), "thinking"),
]


@pytest.mark.parametrize(("text", "name"), REFUSED)
def test_templates_that_cannot_be_cut_are_refused(
    text: str, name: str, with_template: Make
) -> None:
    with pytest.raises(InputError, match=name):
        scaffold_of(with_template(text))
