"""Tools of a model, and its calls: how each form is described, written, read and checked.

Two forms. Hermes (Qwen2.5, Qwen3), any number of calls with any text around them:

    <tool_call>
    {"name": "retrieve_documents", "arguments": {"query": "…"}}
    </tool_call>

Llama 3, the whole text is one call, with or without `<|python_tag|>` before it:

    {"name": "retrieve_documents", "parameters": {"query": "…"}}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from qrag_jax.llm.outcomes import Failure, well_formed
from qrag_jax.llm.text.extraction import last_object, without_thinking
from qrag_jax.llm.text.prompts import harmless, one_line

HERMES, LLAMA = FORMATS = ("hermes", "llama")

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_ARGUMENTS = {HERMES: "arguments", LLAMA: "parameters"}


# Types of parameters by their JSON schema, and their names in sentences; an array is one of texts.
_KINDS = {"string": "a text", "integer": "an integer", "array": "a list of texts"}


def tool(
    name: str,
    about: str,
    parameters: Mapping[str, Mapping[str, Any]],
    optional: Collection[str] = (),
) -> dict[str, Any]:
    """A tool as OpenAI's chat endpoint and chat templates take it.

    `parameters` have a JSON schema each, with a description; its type is one of `_KINDS`. A call
    may leave out the `optional` ones.
    """
    required = [parameter for parameter in parameters if parameter not in optional]
    taken = {"type": "object", "properties": dict(parameters), "required": required}
    function = {"name": name, "description": about, "parameters": taken}
    return {"type": "function", "function": function}


class ToolCall(NamedTuple):
    """A call as it was written; `check_call` compares it with the tools there are."""

    name: str
    arguments: Mapping[str, Any]


class Malformed(NamedTuple):
    """A call that cannot be carried out; `message` is one sentence for the model."""

    message: str


def read_calls(text: str, form: str) -> tuple[ToolCall | Malformed, ...]:
    """The calls in a model's text (without the token that ended its turn), in their order.

    What stands before the last `</think>` is not read, and nothing is if the thinking has no end.
    """
    said = without_thinking(well_formed(text))
    if isinstance(said, Failure):
        return ()
    return tuple(_read_hermes(said) if form == HERMES else _read_llama(said))


def check_call(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> ToolCall | Malformed:
    """The call with its arguments in their kinds, or what is wrong with it.

    It is wrong if there is no such tool, if an argument is unknown, missing, of another kind or too
    low. As in JSON schema, 2.0 is an integer; true, "2" and null are not.
    """
    functions = {spec["function"]["name"]: spec["function"]["parameters"] for spec in tools}
    name = call.name
    if (taken := functions.get(name)) is None:
        return Malformed(f"There is no tool {_shown(name)}; there are {_listed(functions)}.")
    properties = taken["properties"]
    if unknown := [arg for arg in call.arguments if arg not in properties]:
        known = f"The tool {name} takes {_listed(properties)}"
        return Malformed(f"{known}, but no argument {_shown(unknown[0])}.")
    arguments = {}
    for parameter, schema in properties.items():
        if parameter in call.arguments:
            value = argument_of(call.arguments[parameter], schema)
            if isinstance(value, Malformed):
                return Malformed(f"The argument {parameter} of the tool {name} {value.message}.")
            arguments[parameter] = value
        elif parameter in taken["required"]:
            return Malformed(f"The tool {name} needs the argument {parameter}, which is missing.")
    return ToolCall(name, arguments)


def write_call(call: ToolCall, form: str) -> str:
    """The text of a call, as the model should write it; `read_calls` reads the same call from it.

    Text in an argument cannot end the call, the thinking or the turn: "<" is written as an escape.
    """
    fields = {"name": call.name, _ARGUMENTS[form]: dict(call.arguments)}
    written = json.dumps(fields, ensure_ascii=False).replace("<", "\\u003c")
    return f"{_OPEN}\n{written}\n{_CLOSE}" if form == HERMES else written


_HERMES_WORDS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
SCHEMAS
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
_LLAMA_WORDS = """\
You may call these functions:

SCHEMAS

To call a function, answer with one JSON object and nothing else:
{"name": "the function", "parameters": {"argument": value}}"""


def describe(schemas: Iterable[Mapping[str, Any]], form: str) -> str:
    """What a system prompt says about the tools of these schemas and how to call them.

    For "hermes" these are the words of the chat templates of Qwen2.5 and Qwen3, with which their
    models were trained.
    """
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return (_HERMES_WORDS if form == HERMES else _LLAMA_WORDS).replace("SCHEMAS", lines)


def _read_hermes(said: str) -> Iterable[ToolCall | Malformed]:
    start = said.find(_OPEN)
    while start >= 0:
        start += len(_OPEN)
        call, end = _json_call(said, start, HERMES)
        if isinstance(call, ToolCall) and not said[end:].lstrip().startswith(_CLOSE):
            call = Malformed(f"The JSON object of the tool call is not followed by {_CLOSE}.")
        yield call
        start = said.find(_OPEN, end)


def _read_llama(said: str) -> Iterable[ToolCall | Malformed]:
    bare = said.strip()
    whole = bare.removeprefix(_PYTHON_TAG).lstrip()
    around = Malformed("The tool call has text around it; write one JSON object and nothing else.")
    if whole == bare and not bare.startswith("{"):
        if last_object(bare, ("name", "parameters")) is not None:
            yield around
        return
    call, end = _json_call(whole, 0, LLAMA)
    yield around if isinstance(call, ToolCall) and end < len(whole) else call


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{_shown(twice)} is there twice")
    return members


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_number)


def _json_call(said: str, start: int, form: str) -> tuple[ToolCall | Malformed, int]:
    """The call whose JSON object begins behind `start`, and where the object ends.

    Of a broken object the end is not known: then it is `start`.
    """
    fields = f'{{"name": …, "{_ARGUMENTS[form]}": {{…}}}}'
    try:
        value, end = _DECODER.raw_decode(said, len(said) - len(said[start:].lstrip()))
        # Escapes may have made halves of surrogate pairs.
        value = json.loads(well_formed(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        reason = "it is too deep" if deep else getattr(error, "msg", str(error).partition(":")[0])
        return Malformed(f"The tool call is not JSON ({reason}); write {fields}."), start
    if not isinstance(value, dict) or value.keys() != {"name", _ARGUMENTS[form]}:
        return Malformed(f"The tool call is not of the form {fields}."), end
    name, arguments = value["name"], value[_ARGUMENTS[form]]
    if not isinstance(name, str):
        return Malformed(f'The "name" of the tool call is {_called(name)}, not a text.'), end
    if not isinstance(arguments, dict):
        what = f'"{_ARGUMENTS[form]}" of the tool call is {_called(arguments)}'
        return Malformed(f"The {what}, not a JSON object."), end
    return ToolCall(name, arguments), end


def argument_of(value: Any, schema: Mapping[str, Any]) -> Any:
    """The value in the kind of its parameter, or the end of a sentence about the argument."""
    kind, name = schema["type"], _called(value)
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value, name = int(value), "an integer"
    if name != ("a list" if kind == "array" else _KINDS[kind]):
        return Malformed(f"must be {_KINDS[kind]}, not {name}")
    if kind == "array" and not all(isinstance(item, str) for item in value):
        return Malformed(f"must be {_KINDS[kind]}, not another list")
    if value < (least := schema.get("minimum", value)):
        return Malformed(f"must be at least {least}")
    return value


def _called(value: Any) -> str:
    """What a sentence calls a value that JSON gave."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = ((str, "a text"), (int, "an integer"), (float, "a fraction"), (list, "a list"))
    return next((name for kind, name in names if isinstance(value, kind)), "an object")


def _shown(text: str) -> str:
    """What the model wrote, in quotes, short and without anything that could end the message."""
    bare = harmless(one_line(text))
    return f'"{bare[:60]}…"' if len(bare) > 60 else f'"{bare}"'


def _listed(names: Iterable[str]) -> str:
    *most, last = [*names] or ["none"]
    return f"{', '.join(most)} and {last}" if most else last
