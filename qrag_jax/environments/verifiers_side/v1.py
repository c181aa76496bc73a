"""Environments of verifiers 0.4: a taskset, played by an agent whose model is the trainer's.

Turns are asked of the trainer, which makes ids of messages, too: there is one form of texts. A
trace says which turns are part of the episode, and what stands between.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from openai import AsyncOpenAI
from pydantic import TypeAdapter
from renderers.base import RenderedTokens, extract_message_tool_names
from verifiers.v1.clients import Client, ModelContext
from verifiers.v1.clients.train import response_from_generate, serialize_completion, tool_to_wire
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.env import RunSlot
from verifiers.v1.errors import ProviderError
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.interception import server as interception
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils import loaders

from .program import Clock, EpisodeFailed, Link, Refused, code_of, imported, one_line

_PROMPTS = 600  # first messages that the trainer is shown
_DIRECT = "qrag_direct_harness"  # the id of our harness, which is this module under another name
_PASSING = ("ProviderError", "InterceptionError", "SandboxError", "TunnelError", "ToolsetError")

__all__ = ["DirectHarness"]  # what verifiers loads of the module `_DIRECT`


def _loaded(asked: Mapping[str, Any]) -> tuple[Any, str]:
    """The environment, and the digest of its package's code."""
    name = asked["id"]
    module_name = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    builtin = f"verifiers.v1.tasksets.{module_name}"
    module = imported(name, builtin if importlib.util.find_spec(builtin) else module_name)
    try:
        loaders.taskset_class(name)
    except (AttributeError, TypeError, ValueError):
        raise Refused(
            f"the package {module_name} exports no Taskset, or several, in __all__; name another"
        ) from None
    if asked["harness"] == "direct":
        sys.modules[_DIRECT] = sys.modules[__name__]
    return loaders.load_environment(_config(asked)), code_of(module)


def _config(asked: Mapping[str, Any]) -> Any:
    """The environment's config: its own fields, and limits, runtime and harness of each agent."""
    name, arguments = asked["id"], dict(asked["arguments"])
    cls = loaders.environment_class(name)
    config_cls = loaders.concrete_type(cls, loaders.EnvConfig, origin=loaders.Env)
    config_cls = config_cls or loaders.EnvConfig
    fields: dict[str, Any] = {"taskset": {"id": name, **arguments.pop("taskset", {})}}
    limits, harness = asked["limits"], asked["harness"]
    agent: dict[str, Any] = {"runtime": {"type": "subprocess"}, "timeout": {"rollout": None}}
    agent["max_turns"] = limits["turns"]
    if limits["tokens"]:
        agent["max_output_tokens"] = limits["tokens"]
    if harness != "own":
        agent["harness"] = {"id": _DIRECT if harness == "direct" else harness}
    env_fields = config_cls.model_fields
    for role, about in env_fields.items():
        if isinstance(about.default, AgentConfig):
            fields[role] = {**agent, **arguments.pop(role, {})}
    for field, value in arguments.items():
        # What is no field of the environment is one of its taskset.
        (fields if field in env_fields else fields["taskset"])[field] = value
    return config_cls.model_validate(fields)


class TasksetPlayer:
    def __init__(self, link: Link, asked: Mapping[str, Any]) -> None:
        self._link, self._asked, self._clocks = link, asked, dict[int, Clock]()
        client, resolve = TrainerClient(link, self._clocks), interception.resolve_client
        interception.resolve_client = lambda config: (
            client if isinstance(config, TrainClientConfig) else resolve(config)
        )
        self._environment, self._code = _loaded(asked)
        taskset = self._environment.taskset
        most = asked["tasks"] or (None if taskset.bounded else asked["endless"])
        self._tasks = [*itertools.islice(taskset, most)]

    def about(self) -> dict[str, Any]:
        """The fields of `opened`: tasks, prompts, digest, code."""
        rows = [task.data.model_dump(mode="json", exclude_none=True) for task in self._tasks]
        text = json.dumps(rows, sort_keys=True, default=str)
        return {
            "tasks": len(self._tasks),
            "prompts": [_prompt(task.data) for task in self._tasks[:_PROMPTS]],
            "code": self._code,
            "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
        }

    def serving(self) -> Any:
        """A context in which episodes can be played."""
        return self._environment.serving()

    async def play(self, asked: Mapping[str, Any]) -> None:
        episode = asked["episode"]
        self._clocks[episode] = clock = Clock(self._asked["limits"]["seconds"])
        try:
            outcome = await clock.bounded(self._played(asked, episode))
        except EpisodeFailed as failed:
            outcome = {"failure": {"cause": failed.cause, "message": one_line(failed)}}
        except Exception as error:
            message = f"the environment raised ({type(error).__name__}: {one_line(error)})"
            outcome = {"failure": {"cause": "own_code", "message": message}}
        finally:
            del self._clocks[episode]
        self._link.say("played", episode=episode, **outcome)

    async def _played(self, asked: Mapping[str, Any], episode: int) -> dict[str, Any]:
        sampling = {"max_tokens": self._asked["limits"]["turn_tokens"]}
        if asked["temperature"] is not None:
            sampling["temperature"] = asked["temperature"]
        context = ModelContext(
            model=self._asked["model"],
            client=TrainClientConfig(
                base_url="http://trainer.invalid/v1", api_key_var="QRAG_NO_KEY"
            ),
            sampling=SamplingConfig(**sampling),
        )

        def named(trace: Any) -> None:
            trace.id = f"{episode}-{trace.id}"

        slot = RunSlot(self._tasks[asked["task"]])
        return _found(await self._environment.run_slot(slot, context, on_trace=named))


def _found(episode: Any) -> dict[str, Any]:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok:
        last = errors[-1] if errors else None
        kind = last.type if last else "no error"
        text = one_line(last.message if last else "the episode is not whole")
        lines = (last.traceback or "").strip().splitlines() if last else []
        where = f" ← {one_line(lines[-1], 120)}" if lines else ""
        if "score" in text or "reward" in text or kind == "TaskError":
            raise EpisodeFailed("raised", f"the rubric or the task raised ({kind}: {text}{where})")
        cause = "connection" if kind in _PASSING else "own_code"
        raise EpisodeFailed(cause, f"the environment failed ({kind}: {text}{where})")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        raise EpisodeFailed(
            "own_code",
            f"the environment plays {len(trained)} trained agents an episode, and one is learned "
            "from here; name an environment of one agent",
        )
    (trace,) = trained
    for name, reward in trace.rewards.items():
        if reward is None or not math.isfinite(reward.value):
            score = None if reward is None else reward.score
            raise EpisodeFailed("no_number", f"the rubric's {name} gives {score!r}, no number")
    parts = {name: float(reward.score) for name, reward in trace.rewards.items()}
    parts |= {
        name: float(value)
        for name, value in trace.metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return {
        "reward": float(trace.reward),
        "parts": parts,
        "stop": trace.stop_condition,
        "truncated": bool(trace.is_truncated or trace.is_timeout),
        "nodes": _nodes(trace),
        "record": json.loads(TypeAdapter(type(episode)).dump_json(episode, exclude_none=True)),
    }


def _nodes(trace: Any) -> list[dict[str, Any]]:
    """The nodes of the branches that train, for `environment_play.segments_of`."""
    kept = {id(node) for branch in trace.branches if branch.trainable for node in branch.nodes}
    return [
        {
            "parent": -1 if node.parent is None else node.parent,
            "ids": [*node.token_ids],
            "mask": [*node.mask],
            "log_probs": [*node.logprobs],
            "trains": bool(node.sampled and id(node) in kept),
        }
        for node in trace.nodes
    ]


def _prompt(data: Any) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message.model_dump(exclude_none=True) for message in data.prompt or ())]


# ---------------------------------------------------------------- turns


class TrainerClient(Client):
    """Asks the trainer for turns: it makes ids of messages, samples, and reads what was said.

    While the model speaks, the clock of its episode stands still.
    """

    def __init__(self, link: Link, clocks: Mapping[int, Clock]) -> None:
        self._link, self._clocks = link, clocks

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        *,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        if not isinstance(dialect, ChatDialect) or turn is None or session_id is None:
            raise NotImplementedError("only turns of chats can be trained; use such a harness")
        episode = int(session_id.partition("-")[0])
        clock = self._clocks.get(episode) or Clock(0)
        clock.speaks(on=True)
        try:
            reply = await self._link.ask(
                "turn",
                episode=episode,
                messages=[message_to_wire(message) for message in turn.prompt],
                tools=[tool_to_wire(tool) for tool in turn.tools],
                # What was sampled stays as it is, where new messages can come behind it.
                before=turn.previous_renderer_token_ids(),
                tail=[message_to_wire(message) for message in turn.tail],
                sampling=sampling.model_dump(exclude_none=True),
            )
        finally:
            clock.speaks(on=False)
        if "error" in reply:
            raise ProviderError(reply["error"], status_code=reply["status"])
        calls = [SimpleNamespace(id=None, name=n, arguments=args) for n, args in reply["calls"]]
        stopped = "tool_calls" if calls and reply["finish"] == "stop" else reply["finish"]
        bridged = turn if reply["follows"] else None
        result = {
            "content": reply["content"],
            "tool_calls": calls,
            "finish_reason": stopped,
            "prompt_ids": reply["prompt"],
            "completion_ids": reply["ids"],
            "completion_logprobs": reply["log_probs"],
            "prompt_attribution": _attributed(turn, reply),
        }
        response = response_from_generate(result, body["model"], bridged)
        response.raw = serialize_completion(response, body["model"])
        return response


def _attributed(turn: Any, reply: Mapping[str, Any]) -> RenderedTokens:
    """All new ids are of the last message: only their order matters for a path of tokens."""
    shown = turn.tail if reply["follows"] else turn.prompt
    messages = [message_to_wire(message) for message in shown]
    before = turn.renderer_path_len if reply["follows"] else 0
    last = [len(messages) - 1] * (len(reply["prompt"]) - before)
    return RenderedTokens(
        token_ids=reply["prompt"],
        message_indices=[*([-1] * before), *last],
        message_roles=[message.get("role") or "" for message in messages],
        message_tool_names=extract_message_tool_names(messages),
    )


# ---------------------------------------------------------------- the harness


class DirectConfig(HarnessConfig):
    """It has no fields of its own."""


class DirectHarness(Harness[DirectConfig]):
    """The chat with tools of verifiers' `null`, in the environment's own process.

    `null` starts a program for each episode, which takes seconds. Here a loop does the same calls;
    it runs no code of the model. verifiers allows it: what counts is that all calls go to its
    endpoint.
    """

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
            messages += [message_to_wire(message) for message in prompt or ()]
        servers = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        async with contextlib.AsyncExitStack() as stack:
            tools, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)
            client = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
            )
            try:
                await _talk(client, ctx.model, messages, tools, (dispatch, connected))
            except Exception as error:
                # A refused turn (a limit, a stop) is an end, which the trace knows already.
                if trace.stop_condition is None:
                    text = f"{type(error).__name__}: {error}"
                    return ProgramResult(exit_code=1, stdout="", stderr=text)
        return ProgramResult(exit_code=0, stdout="", stderr="")


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
    return await call_mcp(servers, dispatch, name, arguments)
