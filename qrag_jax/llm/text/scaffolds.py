"""The ids that a chat template puts around what a model samples: tokens in, tokens out.

A conversation is its opening, what was sampled, what follows, what was sampled, …; each part is
ids behind the ids before it. Sampled ids are never decoded and encoded again, so the model is
trained on the tokens that it has sampled.

A `ChatRenderer` makes ids of chats with tools as others write them, and calls of what a model says.
Its messages are those of OpenAI's chat endpoint: role, content, tool_calls. Where the chat template
does not show tools, they are described in the system's message.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import well_formed
from qrag_jax.llm.text.prompts import Messages
from qrag_jax.llm.text.tool_calls import HERMES, ToolCall, describe, read_calls, write_call
from qrag_jax.runtime.whole_files import reading

# Stand-ins in the conversations that a template is tried with: no template has such words.
_ASKED, _THOUGHT, _OTHER_THOUGHT = "Ask5f1c", "Idea5f1c", "Guess5f1c"
_SAID, _OTHER_SAID, _RESULT, _OTHER_RESULT = "Said5f1c", "Reply5f1c", "Result5f1c", "Fact5f1c"
_THINK, _END_OF_THINK = "<think>\n", "\n</think>\n\n"


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    tokenizer: Any
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise InputError(f"{self.name} is not there; give a chat model's tokenizer")

    @property
    def name(self) -> str:
        known = getattr(self.tokenizer, "name_or_path", "") or "a tokenizer"
        return f"the chat template of {known}"

    def opened(self, messages: Messages) -> str:
        """The text of the messages and the opening of the model's turn."""
        from jinja2 import TemplateError  # transformers needs it for templates alone

        turns = [{"role": role, "content": content} for role, content in messages]
        roles = ", ".join(role for role, _ in messages)
        fix = f"use a model whose template takes the roles {roles}"
        with reading(f"a chat by {self.name}", fix, (TemplateError, TypeError)):
            return self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True, **self.options
            )

    def following(self, messages: Messages) -> str:
        """The text from the end of a turn of the model on, with the messages that follow it."""
        before: Messages = (("user", _ASKED), ("assistant", _SAID))
        return self.opened(before + messages).partition(_SAID)[2]

    def opening(self, messages: Messages) -> np.ndarray:
        """The ids `[token]` (int32) of a conversation, up to where the model begins to speak."""
        return self.ids(self.opened(messages))

    def ids(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer(text, add_special_tokens=False).input_ids, np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaffold(ChatTemplate):
    """The chat template of a tokenizer, cut at the turns of the model; `scaffold_of` makes it.

    The contents of messages are taken as they are: a text that is not ours goes through
    `prompts.harmless` first, or a mark in it could end a turn.
    """

    # whether the template leaves earlier turns as they are when a user's message follows. If not
    # (it drops what the model thought), then at the user's next message a new segment begins: the
    # `opening` of the whole conversation
    append_only: bool
    stop_ids: tuple[int, ...]  # the ids that end a turn of the model; the first is the template's
    # text with which the template opens a turn of the model and that it leaves out of earlier
    # turns, such as Qwen3's empty thinking; "" if there is none. It stays in our ids, because the
    # model has read it before it spoke
    kept: str

    def after(self, said: np.ndarray, messages: Messages) -> np.ndarray:
        """The ids `[token]` (int32) to append to sampled ids, so that messages follow them.

        If the last of the sampled ids is not the first of `stop_ids`, because the turn was cut by
        its length, the result begins with that end of the turn. A user's message can follow an
        append-only template alone.
        """
        ids = self.ids(self.following(messages))
        return ids[1:] if len(said) and said[-1] == ids[0] else ids


def scaffold_of(
    tokenizer: Any, *, thinking: bool | None = None, options: Mapping[str, Any] | None = None
) -> Scaffold:
    """Cuts the chat template of a tokenizer and checks the cuts.

    The template is tried with small conversations of two turns. Opening, turns and what follows
    them must make the text that the template makes of the whole conversation, or the same with
    `Scaffold.kept` behind each opening of a turn. What follows a turn begins with a special token,
    which tokenizers join with no text before it, so its ids do not depend on the turn.

    Args:
        thinking: the template's option `enable_thinking`; None leaves it to the template. With
            False, what the template does to a turn that has thoughts is not looked at.
        options: further options of the template, such as `tools`, a list of JSON schemas.
    """
    settings = dict(options or {})
    if thinking is not None:
        settings["enable_thinking"] = thinking
    template = ChatTemplate(tokenizer, settings)
    _check_results(template)
    thinks = settings.get("enable_thinking") is not False
    if (kept := _kept(template, "tool", thinks)) is None:
        raise InputError(
            f"{template.name} rewrites earlier turns of the model when a tool answers; give another"
            f"{', or set thinking to False' if thinks else ''}"
        )
    end = template.ids(template.following((("tool", _RESULT),)))[0]
    ends = dict.fromkeys((int(end), tokenizer.eos_token_id))
    return Scaffold(
        tokenizer,
        settings,
        append_only=_kept(template, "user", thinks) == kept,
        stop_ids=tuple(token for token in ends if token is not None),
        kept=kept,
    )


def _check_results(template: ChatTemplate) -> None:
    """Refuses a template that cannot show a turn of the model and two results of tools after it."""
    following = template.following((("tool", _RESULT), ("tool", _OTHER_RESULT)))
    if _RESULT not in following or _OTHER_RESULT not in following:
        raise InputError(f"{template.name} drops messages of tools or the model; give another")
    end = template.ids(following)[0]
    written = template.tokenizer.decode([end])
    known = template.tokenizer.added_tokens_decoder.get(int(end))
    if known is None or not known.special or not following.startswith(known.content):
        raise InputError(f"{template.name} ends a turn with {written!r}, no special token")


def _kept(template: ChatTemplate, role: str, thinks: bool) -> str | None:
    """See `Scaffold.kept`; None if the template rewrites turns when messages of `role` follow."""
    opening = template.opened((("user", _ASKED),))
    results: Sequence[Messages] = [((role, _RESULT),), ((role, _OTHER_RESULT),)]
    said = [_SAID, _OTHER_SAID]
    history = template.opened((("user", _ASKED), ("assistant", _SAID), *results[0]))
    header = history.partition(_SAID)[0]
    if thinks:
        think = "" if opening.rstrip().endswith(_THINK.strip()) else _THINK
        ideas = zip((_THOUGHT, _OTHER_THOUGHT), said)
        said = [f"{think}{idea}{_END_OF_THINK}{text}" for idea, text in ideas]
    whole = template.opened(
        (
            ("user", _ASKED),
            *(("assistant", said[0]), *results[0]),
            *(("assistant", said[1]), *results[1]),
        )
    )
    first, last = (template.following(messages) for messages in results)
    candidates = [""]
    if not thinks and opening.startswith(header):
        candidates.append(opening.removeprefix(header))
    parts = [opening, said[0], first, said[1]]
    for kept in candidates:
        shown = [part.removesuffix(kept) for part in parts]
        if "".join([*shown, last]) == whole:
            return kept
    return None


# ---------------------------------------------------------------- chats with tools

_ROLES = {"developer": "system", "function": "tool"}


class ChatRenderer:
    """Between messages and ids. Calls are written in `form`, one of `tool_calls.FORMATS`."""

    def __init__(self, tokenizer: Any, form: str, thinking: bool | None = None) -> None:
        self._tokenizer, self._form, self._thinking = tokenizer, form, thinking
        added = tokenizer.added_tokens_decoder.values()
        self._special = [token.content for token in added if token.special]
        self._cut = functools.lru_cache(maxsize=64)(self._cut_for)

    def opening(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray:
        """The ids `[token]` of a conversation, up to where the model speaks."""
        scaffold, described = self._scaffold(tools)
        texts = [self.text(message) for message in messages]
        if described and texts and texts[0][0] == "system":
            texts[0] = "system", f"{texts[0][1]}\n\n{described}"
        elif described:
            texts.insert(0, ("system", described))
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
        return scaffold.after(said, texts)

    def stop_ids(self) -> tuple[int, ...]:
        return self._scaffold(())[0].stop_ids

    def spoken(self, sampled: np.ndarray) -> tuple[str, tuple[tuple[str, str], ...]]:
        """What sampled ids say without calls, and each call's name and arguments (as JSON).

        A call that cannot be read stays text.
        """
        ids = sampled.tolist()
        if ids and ids[-1] in self.stop_ids():
            ids = ids[:-1]
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        calls = [call for call in read_calls(text, self._form) if isinstance(call, ToolCall)]
        if not calls:
            return text, ()
        content = text[: text.find("<tool_call>")].strip() if self._form == HERMES else ""
        written = (json.dumps(dict(call.arguments), ensure_ascii=False) for call in calls)
        return content, tuple(zip((call.name for call in calls), written))

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
        return role, well_formed(text)

    def _written(self, call: Mapping[str, Any]) -> str:
        inside = call.get("function") or call
        arguments = inside["arguments"]
        try:
            values = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            values = None
        if not isinstance(values, dict):
            return f"{inside['name']}({arguments})"  # no call of ours: shown as it is
        return write_call(ToolCall(inside["name"], values), self._form)

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


def content_text(content: Any) -> str:
    """The text of a message's content, which may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        if not isinstance(part, Mapping) or "text" not in part:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InputError(f"a message has a part of the type {kind}, which is no text")
        parts.append(part["text"])
    return "".join(parts)
