"""Chats with tools as others write them, in a model's own ids; and what a model says, as calls.

Messages are those of OpenAI's chat endpoint: role, content, tool_calls. Where the chat template
does not show tools, they are described in the system's message.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.llm.text.prompts import Messages
from qrag_jax.llm.text.scaffolds import Scaffold, scaffold_of
from qrag_jax.llm.text.tool_calls import HERMES, LLAMA, ToolCall, describe, read_calls, write_call

_BEGINS = {HERMES: "<tool_call>", LLAMA: ""}
_ROLES = {"developer": "system", "function": "tool"}


class TextLost(ValueError):
    """A text that has no place in the model's ids; the message is one sentence."""


class Spoken(NamedTuple):
    content: str  # the text without calls
    calls: tuple[tuple[str, str], ...]  # names and arguments, these as JSON


class ChatRenderer:
    """Between messages and ids.

    Calls are written in `form`, one of `tool_calls.FORMATS`; for `thinking` see `scaffold_of`.
    """

    def __init__(self, tokenizer: Any, form: str, thinking: bool | None = None) -> None:
        self._tokenizer, self._form, self._thinking = tokenizer, form, thinking
        self._special = [
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        ]
        self._cut = functools.lru_cache(maxsize=64)(self._cut_for)

    def opening(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray:
        """The ids `[token]` of a conversation, up to where the model speaks."""
        scaffold, told = self._scaffold(tools)
        texts = [self.text(message) for message in messages]
        if told and texts and texts[0][0] == "system":
            texts[0] = "system", f"{texts[0][1]}\n\n{told}"
        elif told:
            texts.insert(0, ("system", told))
        with _losing():
            return scaffold.opening(tuple(texts))

    def after(
        self,
        said: np.ndarray,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> np.ndarray | None:
        """The ids behind sampled ones; None: the template rewrites the turns before."""
        scaffold, _ = self._scaffold(tools)
        texts = tuple(self.text(message) for message in messages)
        roles = {role for role, _ in texts}
        if not texts or "assistant" in roles or ("user" in roles and not scaffold.append_only):
            return None
        with _losing():
            return scaffold.after(said, texts)

    def stop_ids(self) -> tuple[int, ...]:
        return self._scaffold(())[0].stop_ids

    def spoken(self, sampled: np.ndarray) -> Spoken:
        """What sampled ids say. A call that cannot be read stays text."""
        ids = sampled.tolist()
        if ids and ids[-1] in self.stop_ids():
            ids = ids[:-1]
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        calls = [call for call in read_calls(text, self._form) if isinstance(call, ToolCall)]
        if not calls:
            return Spoken(text, ())
        begin = _BEGINS[self._form]
        content = text[: text.find(begin)].strip() if begin else ""
        written = (json.dumps(dict(call.arguments), ensure_ascii=False) for call in calls)
        return Spoken(content, tuple(zip((call.name for call in calls), written)))

    def text(self, message: Mapping[str, Any]) -> tuple[str, str]:
        """The role and the text of a message; marks that end turns are made harmless in it."""
        role = _ROLES.get(message["role"], message["role"])
        text = content_text(message.get("content"))
        if calls := message.get("tool_calls"):
            parts = [text, *(self._written(call) for call in calls)]
            text = "\n".join(part for part in parts if part)
        for mark in self._special:
            if mark in text:
                text = text.replace(mark, f"{mark[0]} {mark[1:]}")
        self._check(role, text)
        return role, text

    def _written(self, call: Mapping[str, Any]) -> str:
        inside = call.get("function") or call
        arguments = inside["arguments"]
        try:
            given = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            given = None
        if not isinstance(given, dict):
            return f"{inside['name']}({arguments})"  # no call of ours: shown as it is
        return write_call(ToolCall(inside["name"], given), self._form)

    def _check(self, role: str, text: str) -> None:
        try:
            ids = self._tokenizer(text, add_special_tokens=False).input_ids
            back = self._tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        except (UnicodeError, TypeError, ValueError):
            back = None
        if back == text:
            return
        bare = text.encode("utf-8", "replace").decode()
        place = next((n for n, (a, b) in enumerate(zip(text, back or "")) if a != b), 0)
        raise TextLost(
            f"the tokenizer cannot give back a text of the {role} ({bare[place : place + 40]!r}); "
            "use a model whose tokenizer can, or mend the environment's text"
        )

    def _scaffold(self, tools: Sequence[Mapping[str, Any]]) -> tuple[Scaffold, str]:
        """The scaffold for these tools; and what the system's message says of them."""
        return self._cut(json.dumps([*tools], sort_keys=True))

    def _cut_for(self, key: str) -> tuple[Scaffold, str]:
        tools, plain = json.loads(key), scaffold_of(self._tokenizer, thinking=self._thinking)
        if not tools:
            return plain, ""
        asked: Messages = (("user", "A"),)
        shown = scaffold_of(self._tokenizer, thinking=self._thinking, options={"tools": tools})
        if not np.array_equal(shown.opening(asked), plain.opening(asked)):
            return shown, ""
        return plain, describe(tools, self._form)


@contextlib.contextmanager
def _losing() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise TextLost(str(error).rstrip(".")) from None


def content_text(content: Any) -> str:
    """The text of a message's content, which may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        if not isinstance(part, Mapping) or "text" not in part:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise TextLost(f"a message has a part of the type {kind}, which is no text")
        parts.append(part["text"])
    return "".join(parts)
