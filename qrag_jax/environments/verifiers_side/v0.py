"""Environments of verifiers below 0.4: `load_environment`, played in this process.

The trainer answers each call of the model, through a client of ours, and keeps the tokens. What an
episode is, how it ends and what it is worth is the environment's own.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import importlib
import json
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from .clock import Clock
from .faults import FaultyRubric
from .packages import code_of, imported
from .wire import EpisodeFailed, Link, Refused, one_line, told

try:  # 0.3 has moved it
    vf: Any = importlib.import_module("verifiers.legacy")
except ModuleNotFoundError:
    vf = importlib.import_module("verifiers")

_CLIENT: Any = importlib.import_module(f"{vf.__name__}.clients").Client
_TYPES: Any = importlib.import_module(f"{vf.__name__}.types")
_STATE_TO_OUTPUT: Any = importlib.import_module(f"{vf.__name__}.utils.save_utils").state_to_output
_PROMPTS = 600  # first messages that the trainer is shown
_REFUSALS = 8  # calls behind a limit, after which an environment is one that never stops
_PASSING = ("InfraError", "TunnelError", "SandboxError", "BrowserSandboxError")


class LinkClient(_CLIENT):
    """Answers the calls of one episode by the trainer; see `verifiers` for its methods."""

    def __init__(self, link: Link, episode: int, model: str, clock: Clock) -> None:
        super().__init__(None)
        self.failure: EpisodeFailed | None = None
        self._link, self._episode, self._model, self._clock = link, episode, model, clock
        self._refused = 0

    async def get_response(
        self,
        prompt: Any,
        model: str,
        sampling_args: Mapping[str, Any],
        tools: Any = None,
        **kwargs: Any,
    ) -> Any:
        if model != self._model:
            raise self._failed(
                "request",
                f"the environment asks for the model {model!r}, and only {self._model!r}, which is "
                "trained, is here; give it another client for other models",
            )
        request = {
            "model": model,
            "messages": [_plain(message) for message in prompt],
            "tools": [_tool(tool) for tool in tools or ()],
            "sampling": {k: v for k, v in dict(sampling_args or {}).items() if v is not None},
        }
        with self._clock.model_speaks():
            reply = await self._link.sample(self._episode, request)
        if over := reply.get("over"):
            self._refused += 1
            if self._refused > _REFUSALS:
                raise self._failed(
                    "endless",
                    f"the environment never stops: it asked {self._refused} times for a further "
                    f"turn behind the limit of {over}",
                )
            raise vf.OverlongPromptError(f"the limit of {over} is reached")
        if failure := reply.get("failure"):
            raise self._failed(failure["cause"], failure["message"])
        return _response(reply, model)

    def _failed(self, cause: str, message: str) -> Exception:
        """What is raised: environments end an episode at it, and it is kept if they do not."""
        self.failure = self.failure or EpisodeFailed(cause, message)
        return vf.ModelError(message)

    def setup_client(self, config: Any) -> Any:
        return None

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return messages, {}

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
    ) -> Any:
        return await self.get_response(prompt, model, sampling_args, tools, **kwargs)

    async def raise_from_native_response(self, response: Any) -> None:
        return None

    async def from_native_response(self, response: Any) -> Any:
        return response

    async def close(self) -> None:
        return None


def open_environment(link: Link, asked: Mapping[str, Any]) -> LegacyPlayer:
    """Loads the package.

    Raises:
        Refused: there is none, or it exports nothing that can be used.
    """
    name = asked["id"]
    module_name = name.replace("-", "_").split("/")[-1]
    module = imported(name, module_name, "v0")
    if not callable(getattr(module, "load_environment", None)):
        raise Refused(
            f"the package {module_name} has no load_environment; name a package that has one"
        )
    environment = vf.load_environment(name, **asked["arguments"])
    return LegacyPlayer(link, asked, environment, code_of(module))


class LegacyPlayer:
    """See `program.Player`."""

    def __init__(self, link: Link, asked: Mapping[str, Any], environment: Any, code: str) -> None:
        self._link, self._environment, self._code = link, environment, code
        self._limits, self._model = asked["limits"], asked["model"]
        self._rubric = FaultyRubric(environment.rubric)
        self._rows: dict[str, list[dict[str, Any]]] = {
            "train": _rows(environment, "dataset", environment.build_dataset),
            "eval": _rows(environment, "eval_dataset", environment.build_eval_dataset),
        }
        logging.getLogger(vf.__name__).setLevel(logging.WARNING)

    def about(self) -> dict[str, Any]:
        text = json.dumps(self._rows, default=str, sort_keys=True)
        rows = [*self._rows["train"], *self._rows["eval"]]
        return {
            "sizes": {split: len(rows) for split, rows in self._rows.items()},
            "prompts": [_prompt(row) for row in rows[:_PROMPTS]],
            "tools": [_tool(tool) for tool in getattr(self._environment, "tool_defs", None) or ()],
            "grouped": bool(self._environment.rubric.has_group_rewards),
            "code": self._code,
            "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
        }

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        return None

    async def play(self, asked: Mapping[str, Any]) -> None:
        row = self._rows[asked["split"]][asked["task"]]
        began, clock = time.monotonic(), Clock(self._limits["seconds"])
        clients = [
            LinkClient(self._link, episode, self._model, clock) for episode in asked["episodes"]
        ]
        failure: EpisodeFailed | None = None
        states: list[Any] = []
        try:
            states = await clock.bounded(self._states(row, clients))
        except EpisodeFailed as failed:
            failure = failed
        except Exception as error:
            failure = EpisodeFailed("own_code", f"the environment raised ({told(error)})")
        for place, (episode, client) in enumerate(zip(asked["episodes"], clients)):
            state = states[place] if states else None
            own = failure or client.failure
            self._link.say(
                "played",
                episode=episode,
                seconds=time.monotonic() - began,
                **self._found(state, own),
            )

    async def _states(self, row: Mapping[str, Any], clients: list[LinkClient]) -> list[Any]:
        environment = self._environment
        settings = {**copy.deepcopy(environment.sampling_args or {}), "max_tokens": None}
        states = await asyncio.gather(
            *(
                environment.rollout(copy.deepcopy(dict(row)), client, self._model, settings)
                for client in clients
            )
        )
        if all(client.failure is None and not _error(s) for client, s in zip(clients, states)):
            await self._rubric.score(states)
        for state in states:
            await environment.rubric.cleanup(state)
        return [*states]

    def _found(self, state: Any, failure: EpisodeFailed | None) -> dict[str, Any]:
        """The fields of `played`."""
        if failure is None and (error := _error(state)) is not None:
            passing = type(error).__name__ in _PASSING
            failure = EpisodeFailed(
                "connection" if passing else "own_code", f"the environment failed ({told(error)})"
            )
        if failure is None:
            failure = self._rubric.fault(state) or _not_a_number(state)
        if failure is not None:
            return {"failure": {"cause": failure.cause, "message": one_line(failure)}, "calls": []}
        record = _STATE_TO_OUTPUT(state, [])
        return {
            "reward": float(state["reward"]),
            "parts": {
                name: float(value)
                for name, value in (state["metrics"] or {}).items()
                if isinstance(value, int | float) and math.isfinite(value)
            },
            "stop": state.get("stop_condition"),
            "truncated": bool(state.get("is_truncated")),
            "calls": [int(step["response"].id) for step in state["trajectory"]],
            "record": json.loads(json.dumps(record, default=_jsonable)),
        }


def _rows(environment: Any, name: str, build: Any) -> list[dict[str, Any]]:
    built = build()
    return [] if built is None else built.to_list()


def _prompt(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [_plain(message) for message in prompt]


def _error(state: Any) -> Any:
    return state.get("error")


def _not_a_number(state: Any) -> EpisodeFailed | None:
    reward = state.get("reward")
    if isinstance(reward, int | float) and math.isfinite(reward):
        return None
    return EpisodeFailed("no_number", f"the rubric gives the reward {reward!r}, which is no number")


def _plain(message: Any) -> dict[str, Any]:
    """A message as JSON values; fields that say nothing are left out."""
    fields = message if isinstance(message, Mapping) else message.model_dump()
    found = {
        name: fields[name]
        for name in ("role", "content", "tool_call_id", "name", "reasoning_content")
        if fields.get(name) is not None
    }
    if calls := fields.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _call(call: Any) -> dict[str, Any]:
    if isinstance(call, str):
        call = json.loads(call)
    fields = call if isinstance(call, Mapping) else call.model_dump()
    inside = fields.get("function") or fields
    return {"id": fields.get("id"), "name": inside["name"], "arguments": inside["arguments"]}


def _tool(tool: Any) -> dict[str, Any]:
    fields = tool if isinstance(tool, Mapping) else tool.model_dump()
    inside = fields.get("function") or fields
    return {
        "type": "function",
        "function": {name: inside[name] for name in ("name", "description", "parameters")},
    }


def _response(reply: Mapping[str, Any], model: str) -> Any:
    """The turn as verifiers knows it; its id is the number of the call."""
    calls = [
        _TYPES.ToolCall(id=call["id"], name=call["name"], arguments=call["arguments"])
        for call in reply["tool_calls"]
    ]
    prompt, ids = reply["prompt_ids"], reply["ids"]
    cut = reply["finish"] == "length"
    tokens = _TYPES.ResponseTokens(
        prompt_ids=prompt,
        prompt_mask=[0] * len(prompt),
        completion_ids=ids,
        completion_mask=[1] * len(ids),
        completion_logprobs=reply["log_probs"],
    )
    message = _TYPES.ResponseMessage(
        content=reply["content"],
        tool_calls=calls or None,
        finish_reason="length" if cut else "tool_calls" if calls else "stop",
        is_truncated=cut,
        tokens=tokens,
    )
    usage = _TYPES.Usage(
        prompt_tokens=len(prompt),
        reasoning_tokens=0,
        completion_tokens=len(ids),
        total_tokens=len(prompt) + len(ids),
    )
    return _TYPES.Response(
        id=str(reply["call"]), created=0, model=model, usage=usage, message=message
    )


def _jsonable(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else str(value)
