"""Environments of verifiers 0.4: a taskset, played by an agent against /inference/v1/generate.

The trainer serves that address on 127.0.0.1 and keeps what it has sampled. A trace says which of it
is part of the episode, and what stands between.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .program import Clock, EpisodeFailed, Link, Refused, code_of, imported, one_line

TypeAdapter: Any = importlib.import_module("pydantic").TypeAdapter
vf: Any = importlib.import_module("verifiers.v1")
_LOADERS: Any = importlib.import_module("verifiers.v1.utils.loaders")
_AGENTS: Any = importlib.import_module("verifiers.v1.configs.agent")
_CLIENTS: Any = importlib.import_module("verifiers.v1.clients")
_ENV: Any = importlib.import_module("verifiers.v1.env")
_SAMPLING: Any = importlib.import_module("verifiers.v1.types").SamplingConfig
_TRAIN_CLIENT: Any = importlib.import_module("verifiers.v1.configs.client").TrainClientConfig

_PROMPTS = 600  # first messages that the trainer is shown
_KEY = "QRAG_API_KEY"  # verifiers hides variables of such names from programs that it starts
_DIRECT = "qrag_direct_harness"  # the id of our harness
_PASSING = ("ProviderError", "InterceptionError", "SandboxError", "TunnelError", "ToolsetError")


def _loaded(asked: Mapping[str, Any]) -> tuple[Any, str]:
    """The environment, and the digest of its package's code."""
    name = asked["id"]
    module_name = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    builtin = f"verifiers.v1.tasksets.{module_name}"
    module = imported(name, builtin if importlib.util.find_spec(builtin) else module_name)
    try:
        _LOADERS.taskset_class(name)
    except (AttributeError, TypeError, ValueError):
        raise Refused(
            f"the package {module_name} exports no Taskset, or several; name a package whose "
            "__all__ has one"
        ) from None
    if asked["harness"] == "direct":
        sys.modules.setdefault(_DIRECT, importlib.import_module(f"{__package__}.direct"))
    return _LOADERS.load_environment(_config(asked)), code_of(module)


def _config(asked: Mapping[str, Any]) -> Any:
    """The environment's config: its own fields, and limits, runtime and harness of each agent."""
    name, given = asked["id"], dict(asked["arguments"])
    cls = _LOADERS.environment_class(name)
    config_cls = _LOADERS.concrete_type(cls, _LOADERS.EnvConfig, origin=_LOADERS.Env)
    config_cls = config_cls or _LOADERS.EnvConfig
    fields: dict[str, Any] = {"taskset": {"id": name, **given.pop("taskset", {})}}
    limits, harness = asked["limits"], asked["harness"]
    agent: dict[str, Any] = {"runtime": {"type": "subprocess"}, "timeout": {"rollout": None}}
    agent["max_turns"] = limits["turns"]
    if limits["tokens"]:
        agent["max_output_tokens"] = limits["tokens"]
    if harness != "own":
        agent["harness"] = {"id": _DIRECT if harness == "direct" else harness}
    own = config_cls.model_fields
    for role, about in own.items():
        if isinstance(about.default, _AGENTS.AgentConfig):
            fields[role] = {**agent, **given.pop(role, {})}
    for field, value in given.items():
        # What is no field of the environment is one of its taskset.
        (fields if field in own else fields["taskset"])[field] = value
    return config_cls.model_validate(fields)


class TasksetPlayer:
    def __init__(self, link: Link, asked: Mapping[str, Any]) -> None:
        self._link, self._asked = link, asked
        self._environment, self._code = _loaded(asked)
        taskset = self._environment.taskset
        most = asked["tasks"] or (None if taskset.bounded else asked["endless"])
        self._tasks = [*itertools.islice(taskset, most)]
        self._serving = contextlib.AsyncExitStack()

    def about(self) -> dict[str, Any]:
        """The fields of `opened`: sizes, prompts, digest, code."""
        rows = [task.data.model_dump(mode="json", exclude_none=True) for task in self._tasks]
        text = json.dumps(rows, sort_keys=True, default=str)
        return {
            "sizes": {"train": len(self._tasks), "eval": 0},
            "prompts": [_prompt(task.data) for task in self._tasks[:_PROMPTS]],
            "code": self._code,
            "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
        }

    async def start(self) -> None:
        await self._serving.enter_async_context(self._environment.serving())

    async def stop(self) -> None:
        await self._serving.aclose()

    async def play(self, asked: Mapping[str, Any]) -> None:
        (episode,) = asked["episodes"]
        began, clock = time.monotonic(), Clock(self._asked["limits"]["seconds"])
        self._link.clocks[episode] = clock
        try:
            found = await clock.bounded(self._played(asked, episode))
        except EpisodeFailed as failed:
            found = {"failure": {"cause": failed.cause, "message": one_line(failed)}}
        except Exception as error:
            message = f"the environment raised ({type(error).__name__}: {one_line(error)})"
            found = {"failure": {"cause": "own_code", "message": message}}
        finally:
            del self._link.clocks[episode]
        self._link.say("played", episode=episode, seconds=time.monotonic() - began, **found)

    async def _played(self, asked: Mapping[str, Any], episode: int) -> dict[str, Any]:
        served, limits = asked["served"], self._asked["limits"]
        os.environ[_KEY] = served["key"]
        renderer = self._asked["renderer"] or {
            "name": "custom",
            "import_path": f"{Path(__file__).with_name('renderer.py')}:ServedRenderer",
            "url": served["url"],
            "stop_ids": served["stop_ids"],
        }
        of_client = {"base_url": served["url"], "api_key_var": _KEY, "renderer": renderer}
        client = _TRAIN_CLIENT.model_validate(
            of_client | {"renderer_model_name": served["tokenizer"]}
        )
        sampling = {"max_tokens": limits["turn_tokens"]}
        if served["temperature"] is not None:
            sampling["temperature"] = served["temperature"]
        context = _CLIENTS.ModelContext(
            model=self._asked["model"], client=client, sampling=_SAMPLING(**sampling)
        )

        def named(trace: Any) -> None:
            # verifiers gives it with each request. A header of the client would name the episode,
            # too, but a client of each episode would stay open, with its connections.
            trace.id = f"{episode}-{trace.id}"

        slot = _ENV.RunSlot(self._tasks[asked["task"]])
        return _found(await self._environment.run_slot(slot, context, on_trace=named))


def _found(episode: Any) -> dict[str, Any]:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok:
        last = errors[-1] if errors else None
        kind = last.type if last else "no error"
        text = one_line(last.message if last else "the episode is not whole")
        where = _own_line(last.traceback) if last and last.traceback else ""
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
            given = None if reward is None else reward.score
            raise EpisodeFailed(
                "no_number", f"the rubric's {name} gives {given!r}, which is no number"
            )
    parts = {name: reward.score for name, reward in trace.rewards.items()}
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
    """The nodes of the branches that train: parent, ids, which of these were sampled."""
    kept = {id(node) for branch in trace.branches if branch.trainable for node in branch.nodes}
    return [
        {
            "parent": -1 if node.parent is None else node.parent,
            "ids": [*node.token_ids],
            "mask": [*node.mask],
            "trains": bool(node.sampled and id(node) in kept),
        }
        for node in trace.nodes
    ]


def _prompt(data: Any) -> list[dict[str, Any]]:
    found = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*found, {"role": "user", "content": data.prompt}]
    return [*found, *(message.model_dump(exclude_none=True) for message in data.prompt or ())]


def _own_line(traceback: str) -> str:
    """The last line of a traceback, if it says more."""
    lines = traceback.strip().splitlines()
    return f" ← {one_line(lines[-1], 120)}" if lines else ""
