"""The agent of RLVR (github.com/bdsaglam/rlvr): a model searches by tool calls until it completes.

In each turn the model's calls are read from its text. Each is answered by a message of its own: the
documents found, or what is wrong with the call. The episode ends

- with a call of `complete`, whatever else the turn has, and which of its three fields it gives;
- with a turn that has no call, or that was cut off: without an answer;
- after `max_turns` turns, without an answer; what the last one asks for is not carried out, since
  the model could not read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from qrag_jax.environments import episode, tool_functions
from qrag_jax.errors import InputError
from qrag_jax.llm.text import tool_calls
from qrag_jax.llm.text.prompts import Messages, Prompt, harmless, one_line
from qrag_jax.llm.text.tool_calls import HERMES, Malformed, ToolCall, tool

RETRIEVE, GET, COMPLETE = TOOLS = ("retrieve_documents", "get_document", "complete")
NOTHING = "No document was found."
NO_RESULT = "The result is empty."
# Tags by which forms and chat templates mark calls and results.
_MARKS = ("tool_call", "tool_response", "tool")

_GET = tool(
    GET,
    "Gives the document with this id.",
    {"doc_id": {"type": "string", "description": "The document's id."}},
)
_FIELDS: dict[str, dict[str, Any]] = {
    "reasoning": {"type": "string", "description": "How the facts lead to the answer."},
    "final_answer": {"type": "string", "description": "The answer, in a few words."},
    "cited_doc_ids": {
        "type": "array",
        "items": {"type": "string"},
        "description": "Ids of the documents that the answer rests on.",
    },
}
assert tuple(_FIELDS) == episode.FIELDS
_COMPLETE = tool(COMPLETE, "Ends the work on the question with the answer.", _FIELDS)


@dataclasses.dataclass(frozen=True)
class ToolAgent:
    # the first prompt, with the slot `question`; `tools` takes what they are and how to call them,
    # which a model that was trained on its tools may do without
    prompt: Prompt
    form: str = HERMES  # how calls are written, one of `FORMATS`
    # some of `TOOLS`, in the order in which they are described; `complete` is one of them
    tools: tuple[str, ...] = (RETRIEVE, COMPLETE)
    max_turns: int = 10  # turns of the model
    top_n: int = 2  # documents of a search that does not say how many
    # how many a search may ask for; more are not given. Where it is `top_n`, the tool has no such
    # argument.
    most: int = 20
    # of the user's functions (`tool_functions`), which are described behind `tools`
    functions: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if taken := [name for name in self._functions if name in TOOLS]:
            raise InputError(
                f"{tool_functions.PATH} has a function {taken[0]}, a tool of the agent; rename it."
            )
        self.prompt.check("question", optional=("tools",))

    @cached_property
    def _functions(self) -> frozenset[str]:
        return frozenset(f["function"]["name"] for f in self.functions)

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The tools, as chat templates take them."""
        every = {RETRIEVE: self._retrieve(), GET: _GET, COMPLETE: _COMPLETE}
        return (*(every[name] for name in self.tools), *self.functions)

    def opening(self, question: str) -> Messages:
        texts = {"question": question, "tools": tool_calls.describe(self.schemas, self.form)}
        return self.prompt.fill({slot: texts[slot] for slot in self.prompt.slots})

    def play(self, task: episode.ToolTask) -> episode.Play:
        trail = _Trail()
        try:
            return (yield from self._closed(task, trail))
        except episode.Unplayable as failed:
            return episode.Failed(failed.cause, str(failed), trail.tally)

    def _closed(self, task: episode.ToolTask, trail: _Trail) -> episode.Play:
        messages = self.opening(task.question)
        while True:
            said = yield from episode.ask(episode.Speak(messages))
            trail.tally.turns += 1
            if said.finish == "length":
                trail.tally.truncated = True
                return trail.closed({})
            read = tool_calls.read_calls(said.text, self.form)
            calls = [self._checked(call, trail) for call in read]
            last = [call for call in calls if isinstance(call, ToolCall) and call.name == COMPLETE]
            if last:
                trail.tally.completed = True
                return trail.closed(last[-1].arguments)
            if not calls or trail.tally.turns == self.max_turns:
                return trail.closed({})
            answers = []
            for call in calls:
                answers.append((yield from self._answer(call, trail)))
            messages = tuple(("tool", answer) for answer in answers)

    def _checked(self, call: ToolCall | Malformed, trail: _Trail) -> ToolCall | Malformed:
        """The call with the arguments that can be used; what cannot be is counted."""
        if isinstance(call, ToolCall) and call.name == COMPLETE:
            fields, wrong = _fields(call)
            trail.tally.malformed += wrong
            return ToolCall(COMPLETE, fields)
        if isinstance(call, ToolCall) and call.name in self._functions:
            return call  # its arguments are checked where the function is called
        known = isinstance(call, Malformed) or call.name in self.tools
        checked = tool_calls.check_call(call, self.schemas) if isinstance(call, ToolCall) else call
        if isinstance(checked, ToolCall) and checked.name == RETRIEVE:
            query = one_line(checked.arguments["query"])
            checked = ToolCall(RETRIEVE, {**checked.arguments, "query": query})
            if not query:
                checked = Malformed(f"The argument query of the tool {RETRIEVE} is empty.")
        if isinstance(checked, Malformed):
            trail.tally.malformed += known
            trail.tally.unknown_tool += not known
        return checked

    def _answer(self, call: ToolCall | Malformed, trail: _Trail) -> episode.Steps[str]:
        if isinstance(call, Malformed):
            return call.message
        if call.name in self._functions:
            called = yield from episode.ask(episode.Call(call.name, call.arguments))
            malformed = called.outcome == tool_functions.MALFORMED
            trail.tally.malformed += malformed
            trail.tally.calls += not malformed
            trail.tally.failed_calls += called.outcome == tool_functions.FAILED
            return harmless(called.text, _MARKS) or NO_RESULT
        if call.name == GET:
            doc_id = call.arguments["doc_id"].strip()
            documents = yield from trail.read(episode.Open(doc_id))
            missing = f'There is no document with the id "{harmless(one_line(doc_id), _MARKS)}".'
            return shown(documents) or missing
        most = min(call.arguments.get("top_n", self.top_n), self.most)
        documents = yield from trail.read(episode.Look(call.arguments["query"], most))
        return shown(documents) or NOTHING

    def _retrieve(self) -> dict[str, Any]:
        taken: dict[str, dict[str, Any]]
        taken = {"query": {"type": "string", "description": "What to search for."}}
        if self.most != self.top_n:
            about = f"How many documents to give, {self.top_n} if left out."
            taken["top_n"] = {"type": "integer", "description": about, "minimum": 1}
        about = "Searches for the documents that fit a query best."
        return tool(RETRIEVE, about, taken, optional=("top_n",))


def shown(documents: Sequence[episode.Document]) -> str:
    """The documents as a model is shown them, with a blank line between; "" if there are none."""
    return "\n\n".join(harmless(f"Document ID: {d.id}\n{d.text}", _MARKS) for d in documents)


def _fields(call: ToolCall) -> tuple[dict[str, Any], bool]:
    """The fields of a call of `complete` that can be used; whether others are wrong or missing.

    An empty text or list counts as missing.
    """
    fields = {}
    for name, schema in _FIELDS.items():
        if name not in call.arguments:
            continue
        value = tool_calls.argument_of(call.arguments[name], schema)
        if not isinstance(value, Malformed) and (
            value.strip() if isinstance(value, str) else value
        ):
            fields[name] = value
    return fields, len(fields) < len(episode.FIELDS) or len(call.arguments) > len(fields)


class _Trail:
    """What was asked for and seen in one episode."""

    def __init__(self) -> None:
        self.tally = episode.ToolTally()
        self._seen: dict[str, None] = {}
        self._asked: set[episode.Look | episode.Open] = set()

    def read(
        self, step: episode.Look | episode.Open
    ) -> episode.Steps[tuple[episode.Document, ...]]:
        """The documents of a search, or the one that is opened; () if there is none."""
        asked = episode.Look(step.query.casefold(), 0) if isinstance(step, episode.Look) else step
        self.tally.repeated += asked in self._asked
        self._asked.add(asked)
        documents = yield from episode.ask(step)
        self.tally.searches += isinstance(step, episode.Look)
        self._seen |= dict.fromkeys(d.id for d in documents)
        return documents

    def closed(self, fields: Mapping[str, Any]) -> episode.Closed:
        cited = dict.fromkeys(name.strip() for name in fields.get("cited_doc_ids", ()))
        return episode.Closed(
            answer=fields.get("final_answer", "").strip(),
            cited=tuple(cited),
            seen=tuple(self._seen),
            fields=len(fields),
            tally=self.tally,
        )
