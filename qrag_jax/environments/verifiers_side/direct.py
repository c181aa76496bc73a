"""A harness for verifiers 0.4: the chat with tools of its `null`, in the environment's own process.

`null` starts a program for each episode, which takes seconds. Here a loop does the same calls; it
runs no code of the model. verifiers allows it: what counts is that all calls go to its endpoint.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from contextlib import AsyncExitStack
from typing import Any

from openai import AsyncOpenAI

Harness: Any = importlib.import_module("verifiers.v1.harness").Harness
HarnessConfig: Any = importlib.import_module("verifiers.v1.configs.harness").HarnessConfig
_MCP: Any = importlib.import_module("verifiers.v1.harnesses.utils.mcp")
_RESULT: Any = importlib.import_module("verifiers.v1.runtimes").ProgramResult
_TO_WIRE: Any = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire

__all__ = ["DirectHarness"]


class DirectConfig(HarnessConfig):
    """It has no fields of its own."""


class DirectHarness(Harness[DirectConfig]):
    """See `verifiers.v1.harness.Harness`."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        *rest: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        secret, mcp_urls, data = rest
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [_TO_WIRE(message) for message in prompt or ()]
        servers = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        async with AsyncExitStack() as stack:
            tools, dispatch, connected = await _MCP.connect_mcp({"mcpServers": servers}, stack)
            client = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
            )
            try:
                await _talk(client, ctx.model, messages, tools, (dispatch, connected))
            except Exception as error:
                # A refused turn (a limit, a stop) is an end, which the trace knows already.
                if trace.stop_condition is None:
                    text = f"{type(error).__name__}: {error}"
                    return _RESULT(exit_code=1, stdout="", stderr=text)
        return _RESULT(exit_code=0, stdout="", stderr="")


async def _talk(
    client: AsyncOpenAI,
    model: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    mcp: tuple[Any, Any],
) -> None:
    """Turns until one without a call."""
    dispatch, servers = mcp
    more: dict[str, Any] = {"tools": tools} if tools else {}
    while True:
        asked: Any = {"model": model, "messages": messages, **more}
        reply = await client.chat.completions.create(**asked)
        said = reply.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return
        call: Any
        for call in said.tool_calls:
            content = await _called(call, dispatch, servers)
            named = {"tool_call_id": call.id, "name": call.function.name}
            messages.append({"role": "tool", **named, "content": content})


async def _called(call: Any, dispatch: Any, servers: Any) -> Any:
    name = call.function.name
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are not JSON ({error})"
    if not isinstance(arguments, dict):
        return "error: the arguments are not a JSON object"
    if name not in dispatch:
        return f"error: there is no tool {name!r}; there are {', '.join(dispatch) or 'none'}"
    return await asyncio.ensure_future(_MCP.call_mcp(servers, dispatch, name, arguments))
