"""A renderer for verifiers that asks the trainer, so that there is one form of texts.

What was sampled stays as it is; new messages come behind it. verifiers imports this file by its
path and gives it the fields of `ServedConfig`.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any, ClassVar

from renderers.base import (
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    ToolCallParseStatus,
    extract_message_tool_names,
)
from renderers.configs import BaseRendererConfig

KEY = "QRAG_API_KEY"  # names the environment variable that has the trainer's key
_TIMEOUT = 120.0  # seconds


class ServedConfig(BaseRendererConfig):
    name: str = "custom"
    url: str
    stop_ids: tuple[int, ...]
    _internal_fields: ClassVar[frozenset[str]] = frozenset({"url", "stop_ids"})


class ServedRenderer:
    """See `renderers.base.Renderer`."""

    config_class = ServedConfig
    supports_tools = True
    is_prefix_stable = False

    def __init__(self, tokenizer: Any, config: ServedConfig) -> None:
        self.config, self._tokenizer = config, tokenizer
        self.effective_thinking_retention = "template"

    def render(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
        **_: Any,
    ) -> RenderedTokens:
        ids = self._ask("opening", messages=messages, tools=tools)["token_ids"]
        return _attributed(ids, [], messages)

    def render_ids(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        return self.render(messages, tools=tools).token_ids

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        before = [*previous_prompt_ids, *previous_completion_ids]
        found = self._ask(
            "after", token_ids=[*previous_completion_ids], messages=new_messages, tools=tools
        )["token_ids"]
        return None if found is None else _attributed(found, before, new_messages)

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[Any] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse:
        found = self._ask("spoken", token_ids=[*token_ids])
        ok = ToolCallParseStatus.OK
        calls = [
            ParsedToolCall(raw=given, name=name, arguments=json.loads(given), status=ok)
            for name, given in found["calls"]
        ]
        return ParsedResponse(content=found["content"], tool_calls=calls)

    def get_stop_token_ids(self) -> list[int]:
        return [*self.config.stop_ids]

    def _ask(self, what: str, **body: Any) -> dict[str, Any]:
        root = self.config.url.rstrip("/").removesuffix("/v1")
        key = {"Authorization": f"Bearer {os.environ.get(KEY, '')}"}
        data = json.dumps(body, default=_plain).encode()
        request = urllib.request.Request(  # noqa: S310 - the trainer's own address on this machine
            f"{root}/render/{what}", data, key | {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:  # noqa: S310
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]["message"]) from None


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else str(value)


def _attributed(ids: list[int], before: list[int], messages: list[Any]) -> RenderedTokens:
    """All new ids are of the last message: only their order matters for a path of tokens."""
    last = len(messages) - 1
    return RenderedTokens(
        token_ids=[*before, *ids],
        message_indices=[*([-1] * len(before)), *([last] * len(ids))],
        message_roles=[message.get("role") or "" for message in messages],
        message_tool_names=extract_message_tool_names(messages),
    )
