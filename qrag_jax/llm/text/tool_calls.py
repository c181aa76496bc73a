"""Tools of a model, and its calls: how each form is described, written, read and checked.

Two forms. Hermes (Qwen2.5, Qwen3), any number of calls with any text around them:

    <tool_call>
    {"name": "retrieve_documents", "arguments": {"query": "…"}}
    </tool_call>

Llama 3, the whole text is one call, with or without `<|python_tag|>` before it:

    {"name": "retrieve_documents", "parameters": {"query": "…"}}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from qrag_jax.llm.text.extraction import NoAnswer, last_object, well_formed, without_thinking
from qrag_jax.llm.text.prompts import harmless, one_line

HERMES, LLAMA = FORMATS = ("hermes", "llama")

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_ARGUMENTS = {HERMES: "arguments", LLAMA: "parameters"}


# Kind of a parameter → its JSON schema, and its name in sentences.
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "string": ({"type": "string"}, "a text"),
    "integer": ({"type": "integer"}, "an integer"),
    "strings": ({"type": "array", "items": {"type": "string"}}, "a list of texts"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a tool."""

    name: str  # letters, digits and underscores
    kind: str  # "string", "integer" or "strings"
    about: str  # what the model is told about it
    required: bool = True  # whether each call must give it
    least: int | None = None  # the lowest integer allowed; None: any

    @property
    def schema(self) -> dict[str, Any]:
        """Its JSON schema."""
        least = {} if self.least is None else {"minimum": self.least}
        return {**KINDS[self.kind][0], "description": self.about, **least}


@dataclasses.dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the model may call; `about` is what the model is told about it."""

    name: str
    about: str
    parameters: tuple[Parameter, ...]

    @property
    def schema(self) -> dict[str, Any]:
        """The function tool as OpenAI's chat endpoint and chat templates take it."""
        parameters = {
            "type": "object",
            "properties": {parameter.name: parameter.schema for parameter in self.parameters},
            "required": [parameter.name for parameter in self.parameters if parameter.required],
        }
        function = {"name": self.name, "description": self.about, "parameters": parameters}
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
    if isinstance(said, NoAnswer):
        return ()
    return tuple(_read_hermes(said) if form == HERMES else _read_llama(said))


def check_call(call: ToolCall, tools: Sequence[ToolSpec]) -> ToolCall | Malformed:
    """The call with its arguments in their kinds, or what is wrong with it.

    It is wrong if there is no such tool, if an argument is unknown, missing, of another kind or too
    low. As in JSON schema, 2.0 is an integer; true, "2" and null are not.
    """
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        known = _listed(tool.name for tool in tools)
        return Malformed(f"There is no tool {_shown(call.name)}; there are {known}.")
    parameters = {parameter.name: parameter for parameter in tool.parameters}
    for name in call.arguments:
        if name not in parameters:
            known = f"The tool {tool.name} takes {_listed(parameters)}"
            return Malformed(f"{known}, but no argument {_shown(name)}.")
    arguments = {}
    for name, parameter in parameters.items():
        if name in call.arguments:
            value = _of_kind(call.arguments[name], parameter)
            if isinstance(value, Malformed):
                return Malformed(f"The argument {name} of the tool {tool.name} {value.message}.")
            arguments[name] = value
        elif parameter.required:
            return Malformed(f"The tool {tool.name} needs the argument {name}, which is missing.")
    return ToolCall(tool.name, arguments)


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
        found, end = _json_call(said, start, HERMES)
        if isinstance(found, ToolCall) and not said[end:].lstrip().startswith(_CLOSE):
            found = Malformed(f"The JSON object of the tool call is not followed by {_CLOSE}.")
        yield found
        start = said.find(_OPEN, end)


def _read_llama(said: str) -> Iterable[ToolCall | Malformed]:
    bare = said.strip()
    whole = bare.removeprefix(_PYTHON_TAG).lstrip()
    if whole == bare and not bare.startswith("{"):
        around = last_object(bare, ("name", "parameters")) is not None
    else:
        found, end = _json_call(whole, 0, LLAMA)
        around = isinstance(found, ToolCall) and end < len(whole)
        if not around:
            yield found
    if around:
        yield Malformed("The tool call has text around it; write one JSON object and nothing else.")


class _DuplicateError(ValueError):
    """A JSON object has one name twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateError(next(name for name in names if names.count(name) > 1))
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"JSON has no {text}.")


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
    except _DuplicateError as error:
        return Malformed(f"The tool call gives {_shown(str(error))} twice."), start
    except RecursionError:
        return Malformed("The JSON object of the tool call is too deep."), start
    except ValueError as error:
        reason = getattr(error, "msg", "a number cannot be read")
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


def _of_kind(value: Any, parameter: Parameter) -> Any:
    """The value in the kind of its parameter, or the end of a sentence about the argument."""
    if parameter.kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    fits = {
        "string": isinstance(value, str),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "strings": isinstance(value, list) and all(isinstance(item, str) for item in value),
    }[parameter.kind]
    if not fits:
        kind, found = KINDS[parameter.kind][1], _called(value)
        return Malformed(f"must be {kind}, not {'another list' if found in kind else found}")
    if parameter.least is not None and value < parameter.least:
        return Malformed(f"must be at least {parameter.least}")
    return value


def _called(value: Any) -> str:
    """What a sentence calls a value that JSON gave."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {
        str: "a text",
        int: "an integer",
        float: "a fraction",
        list: "a list",
        dict: "an object",
    }
    return names[str if isinstance(value, str) else type(value)]


def _shown(text: str) -> str:
    """What the model wrote, in quotes, short and without anything that could end the message."""
    bare = harmless(one_line(text))
    return f'"{bare[:60]}…"' if len(bare) > 60 else f'"{bare}"'


def _listed(names: Iterable[str]) -> str:
    *most, last = [*names] or ["none"]
    return f"{', '.join(most)} and {last}" if most else last
